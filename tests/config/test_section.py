"""The strict section: typos, values, defaults, and what DeepSpeed is given besides."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ds_infinipipe.cli.files.schema import schema_text
from ds_infinipipe.config.deepspeed import (
    DEEPSPEED_KEYS,
    check_deepspeed_settings,
    read_deepspeed_json,
    refuse_misspelt_keys,
    warn_unknown_keys,
)
from ds_infinipipe.config.section import (
    InfiniPipeConfig,
    ModelSettings,
    ParallelSettings,
    derive_deepspeed_config,
    sequences_per_step,
)
from ds_infinipipe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

TINY_MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 320,
}


def sections() -> list[type[BaseModel]]:
    kinds = [field.annotation for field in InfiniPipeConfig.model_fields.values()]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def message(section: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        InfiniPipeConfig.from_section(section)
    text = str(caught.value)
    assert "\n" not in text
    return text


def derive(world_size: int = 4, **changes: Any) -> dict[str, Any]:
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3},
        "infinipipe": {"parallel": {"pp": 2, "sp": 2}},
        **changes,
    }
    return derive_deepspeed_config(config, world_size)


def test_every_default_works() -> None:
    config = InfiniPipeConfig.from_deepspeed({})
    assert config == InfiniPipeConfig()
    assert config.load_cluster().name == "cpu-local"
    assert config.parallel.resolve(4) == (1, 4, 1)


def test_writing_out_the_defaults_changes_nothing() -> None:
    dumped = json.loads(InfiniPipeConfig().model_dump_json())
    assert InfiniPipeConfig.from_section(dumped) == InfiniPipeConfig()


@pytest.mark.parametrize("section", sections(), ids=lambda s: s.__name__)
def test_every_field_has_a_docstring(section: type[BaseModel]) -> None:
    assert [n for n, f in section.model_fields.items() if not f.description] == []


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"planer": {}}, "infinipipe.planer is unknown; did you mean 'planner'?"),
        (
            {"planner": {"memory_limit_gb": 3}},
            "infinipipe.planner.memory_limit_gb is unknown; did you mean 'memory_limit_gib'?",
        ),
        ({"data": {"tokeniser": "bytes"}}, "infinipipe.data.tokeniser is unknown; did you mean"),
        (
            {"qqq": 1},
            "infinipipe.qqq is unknown; known are checkpoint, cluster, data, debug, model",
        ),
    ],
)
def test_an_unknown_key_names_its_path_and_close_matches(
    section: dict[str, Any], expected: str
) -> None:
    assert message(section).startswith(expected)


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"parallel": {"pp": 0}}, ["infinipipe.parallel.pp is 0", "greater than or equal to 1"]),
        ({"parallel": {"pp": "2"}}, ['infinipipe.parallel.pp is "2"', "valid integer"]),
        ({"parallel": {"sp": "all"}}, ['infinipipe.parallel.sp is "all"', "'auto'"]),
        ({"parallel": {"dp": 0}}, ["infinipipe.parallel.dp is 0", "greater than or equal to 1"]),
        ({"data": {"over_length": "cut"}}, ["infinipipe.data.over_length", "'truncate'"]),
        ({"data": {"path": []}}, ["infinipipe.data.path is []"]),
        ({"data": {"context_length": 1}}, ["context_length is 1: must be", "(Most tokens of one"]),
        ({"planner": {"memory_limit_gib": -1}}, ["memory_limit_gib is -1", "greater than 0"]),
        ({"planner": 3}, ["infinipipe.planner is 3"]),
        ({"runtime": {"timeout_s": 0}}, ["infinipipe.runtime.timeout_s is 0"]),
        ({"runtime": {"timeout_s": math.inf}}, ["timeout_s is Infinity", "finite"]),
        ({"runtime": {"watchdog_s": math.nan}}, ["watchdog_s is NaN"]),
        ({"planning": {"deadline_s": math.inf}}, ["deadline_s is Infinity", "finite"]),
        (
            {"runtime": {"timeout_s": 20.0}},
            ["runtime.timeout_s is 20 and planning.deadline_s 30", "raise the first or lower"],
        ),
        ({"model": {"path": "a", "config": {}}}, ["path and config exclude each other"]),
        ({"cluster": 3}, ["infinipipe.cluster is 3"]),
    ],
)
def test_a_wrong_value_is_named_with_its_path(section: dict[str, Any], parts: list[str]) -> None:
    text = message(section)
    assert [part for part in parts if part not in text] == []


def test_several_faults_are_all_named() -> None:
    text = message({"planner": {"x": 1}, "parallel": {"pp": 0}})
    assert "infinipipe.planner.x" in text
    assert "infinipipe.parallel.pp" in text


def test_lists_of_paths_and_patterns_are_accepted() -> None:
    config = InfiniPipeConfig.from_section({"data": {"path": ["a", "b"], "patterns": ["*.py"]}})
    assert config.data.path == ("a", "b")
    assert config.data.patterns == ("*.py",)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("gradient_cliping", "gradient_clipping"),
        ("zero_optimisation", "zero_optimization"),
        ("Optimizer", "optimizer"),
        ("lr_scheduler", "scheduler"),
        ("infinipip", "infinipipe"),
    ],
)
def test_a_top_level_key_that_resembles_a_known_one_is_an_error(key: str, meant: str) -> None:
    config = {"train_batch_size": 4, key: {}}
    for check in (InfiniPipeConfig.from_deepspeed, check_deepspeed_settings):
        with pytest.raises(ConfigError, match=f"key '{key}' of .* is unknown; did you .*'{meant}'"):
            check(config)


def test_other_unknown_keys_are_warned_about_and_notes_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"train_batch_size": 4, "my_notes": 1, "_comment": "", "meta": {}}
    InfiniPipeConfig.from_deepspeed(config)
    check_deepspeed_settings(config)
    assert caplog.messages == []
    warn_unknown_keys(config)
    assert caplog.messages == [
        f"key '{key}' of the DeepSpeed configuration is unknown: nothing reads it"
        for key in ("my_notes", "meta")
    ]


def test_keys_deepspeed_knows_are_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    keys = dict.fromkeys(DEEPSPEED_KEYS)
    refuse_misspelt_keys(keys)
    warn_unknown_keys(keys)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not JSON: .* line 1 column 2 .*; correct it there"),
        ("[1]", "must hold one JSON object"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ("[" * 100_000 + "]" * 100_000, "nested deeper than 100 levels"),
        ('{"a": ' * 200 + "1" + "}" * 200, "nested deeper than 100 levels"),
        ("9" * 5000, "is not JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        read_deepspeed_json(file)


def test_a_byte_order_mark_is_no_part_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(b'\xef\xbb\xbf{"train_batch_size": 3}')
    assert read_deepspeed_json(file) == {"train_batch_size": 3}


def test_a_broken_model_config_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^the model config .*config\.json is not JSON"):
        ModelSettings(path=str(tmp_path)).load_spec()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read: there is no such"):
        InfiniPipeConfig.from_deepspeed(tmp_path / "absent.json")


def test_a_section_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="infinipipe is 3; it must be an object"):
        InfiniPipeConfig.from_deepspeed({"infinipipe": 3})


def test_the_exported_schema_is_the_committed_one() -> None:
    committed = (ROOT / "configs" / "json" / "infinipipe.schema.json").read_text()
    assert committed == schema_text() + "\n", "run: infinipipe schema > configs/json/..."


def test_the_schema_describes_and_closes_every_section() -> None:
    schema = InfiniPipeConfig.json_schema()
    assert schema["additionalProperties"] is False
    assert all(d["additionalProperties"] is False for d in schema["$defs"].values())
    assert (
        "Pipeline stages" in schema["$defs"]["ParallelSettings"]["properties"]["pp"]["description"]
    )


def test_auto_sequence_parallelism_takes_what_pp_leaves() -> None:
    assert ParallelSettings(pp=2).resolve(8) == (2, 4, 1)


@pytest.mark.parametrize(("pp", "sp", "world"), [(2, 2, 8), (3, "auto", 4), (4, "auto", 2)])
def test_a_world_size_that_does_not_fit_is_refused_with_numbers(
    pp: int, sp: Any, world: int
) -> None:
    with pytest.raises(
        ConfigError, match=rf"pp {pp} x sp \d+ x dp 1 = \d+ ranks, but {world} were"
    ):
        ParallelSettings(pp=pp, sp=sp).resolve(world)


def test_deepspeed_gets_its_own_batch_identity() -> None:
    derived = derive()
    assert derived["train_batch_size"] == 2
    assert derived["train_micro_batch_size_per_gpu"] == 1
    assert derived["gradient_accumulation_steps"] == 1
    assert "infinipipe" not in derived


def test_the_users_dictionary_is_left_alone() -> None:
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "zero_optimization": {}}
    before = json.dumps(config)
    derive_deepspeed_config(config, 1)
    assert json.dumps(config) == before


def test_torch_adam_is_used_unless_the_user_says_otherwise() -> None:
    assert derive(optimizer={"type": "AdamW"})["optimizer"]["params"]["torch_adam"] is True
    given = derive(optimizer={"type": "Adam", "params": {"torch_adam": False}})
    assert given["optimizer"]["params"]["torch_adam"] is False


def test_torchs_adam_is_the_fused_one_unless_the_user_says_otherwise() -> None:
    def fused(**params: Any) -> Any:
        optimizer = {"type": "AdamW", "params": params}
        return derive(optimizer=optimizer)["optimizer"]["params"].get("fused")

    assert fused() is True
    assert fused(fused=False) is False
    assert fused(foreach=True) is None
    assert fused(differentiable=True) is None
    assert fused(torch_adam=False) is None


def test_gradients_are_reduce_scattered_in_buckets_of_the_given_size() -> None:
    assert derive()["zero_optimization"] == {
        "stage": 3,
        "reduce_scatter": True,
    }
    zero = {"stage": 3, "reduce_bucket_size": 600}
    assert derive(zero_optimization=zero)["zero_optimization"]["reduce_bucket_size"] == 600


def test_half_precision_accumulates_gradients_in_fp32() -> None:
    assert derive(bf16={"enabled": True})["data_types"]["grad_accum_dtype"] == "fp32"
    assert derive(fp16={"enabled": True})["data_types"]["grad_accum_dtype"] == "fp32"
    assert "data_types" not in derive(bf16={"enabled": False})
    for half in ("bf16", "fp16"):  # the runtime's own sharding does, DeepSpeed has nothing for it
        given = {half: {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        assert derive(zero_optimization={"stage": 0}, **given)["data_types"] == {}


def test_auto_falls_back_to_deepspeeds_default_where_there_is_one() -> None:
    derived = derive(
        gradient_accumulation_steps="auto",
        train_micro_batch_size_per_gpu="auto",
        zero_optimization={"stage": 3, "stage3_prefetch_bucket_size": "auto"},
    )
    assert "stage3_prefetch_bucket_size" not in derived["zero_optimization"]


def test_auto_that_nothing_can_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'optimizer\.params\.lr is "auto"'):
        derive(optimizer={"type": "AdamW", "params": {"lr": "auto", "eps": "auto"}})


@pytest.mark.parametrize("stage", [1, 2, True, "3"])
def test_zero_stages_other_than_0_and_3_are_refused(stage: Any) -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization.stage is .*: use 3 .* or 0"):
        derive(zero_optimization={"stage": stage})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, "chunks take the place of micro-batches"),
        ({"gradient_accumulation_steps": 2}, "chunks take the place of micro-batches"),
        ({"sequence_parallel_size": 2}, "set infinipipe.parallel.sp instead"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "only the optimizer is offloaded",
        ),
        ({"zero_optimization": {"stage": 3, "reduce_scatter": False}}, "reduce-scattered"),
        ({"zero_optimization": True}, "it must be an object"),
        ({"optimizer": {"params": {}}}, "optimizer is"),
        ({"train_batch_size": 0}, "train_batch_size is 0"),
        ({"train_batch_size": "auto"}, "train_batch_size is 'auto'"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        derive(**changes)


def test_a_wrong_world_size_is_refused_when_deriving() -> None:
    with pytest.raises(ConfigError, match="pp 2 x sp 2 x dp 1 = 4 ranks, but 6 were started"):
        derive(world_size=6)


def test_sequences_per_step_is_the_users_train_batch_size() -> None:
    assert sequences_per_step({"train_batch_size": 12}) == 12
    with pytest.raises(ConfigError, match="train_batch_size is missing; give the"):
        sequences_per_step({})


def test_the_model_config_comes_from_an_object_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_MODEL))
    specs = [
        ModelSettings(config=TINY_MODEL).load_hf_config(),
        ModelSettings(config_path=str(tmp_path / "config.json")).load_hf_config(),
        ModelSettings(config_path=str(tmp_path)).load_hf_config(),
        ModelSettings(path=str(tmp_path)).load_hf_config(),
    ]
    assert specs == [TINY_MODEL] * 4
    assert ModelSettings(config=TINY_MODEL).load_spec().num_layers == 4


def test_a_run_without_a_model_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model: give infinipipe.model.path"):
        ModelSettings().load_spec()
    with pytest.raises(ConfigError, match="does not exist"):
        ModelSettings(path=str(tmp_path)).load_spec()


def test_compiled_layers_and_ligers_kernels_exclude_each_other() -> None:
    assert InfiniPipeConfig.from_section({"model": {"compile": True}}).model.compile
    with pytest.raises(ConfigError, match="compile and kernels liger exclude each other"):
        InfiniPipeConfig.from_section({"model": {"compile": True, "kernels": "liger"}})
