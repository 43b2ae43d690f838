"""The command line: exit codes, messages, and that light verbs stay light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_infinipipe.cli import main
from ds_infinipipe.cli.parts.overrides import apply_overrides
from ds_infinipipe.cli.parts.sources import load_lengths
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.plan.plan import Plan

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    file = tmp_path / "lengths.txt"
    file.write_text("".join(f"{n}\n" for n in (3000, 120, 800, 45, 260, 1024, 77, 510)))
    return str(file)


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    return str(file)


def plan_arguments(lengths: str, model: str, *more: str) -> list[str]:
    fixed = ["--cluster", "cpu-local", "--pp", "2", "--sp", "2"]
    return ["plan", "--lengths", lengths, "--model", model, *fixed, *more]


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one paragraph on stderr."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return code, text


def test_plan_prints_a_summary_and_writes_a_plan_that_reads_back(
    tmp_path: Path, lengths: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main(plan_arguments(lengths, model, "--json", str(out))) == 0
    printed = capsys.readouterr().out
    for word in ("chunks", "pipelines", "digest", "GiB"):
        assert word in printed
    plan = Plan.from_json(out.read_text())
    assert sorted(plan.lengths) == [45, 77, 120, 260, 510, 800, 1024, 3000]
    stated = json.loads(out.read_text())
    assert set(stated) >= {
        "version", "digest", "setup", "chunks", "pipelines", "streams", "predicted", "solver",
    }  # fmt: skip


def test_the_summary_says_whose_activations_are_counted_and_kernels_changes_them(
    tmp_path: Path, lengths: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    peaks = {}
    for kernels in ("plain", "fused"):
        out = tmp_path / f"{kernels}.json"
        assert main(plan_arguments(lengths, model, "--kernels", kernels, "--json", str(out))) == 0
        assert f"activations of {kernels}" in capsys.readouterr().out
        peaks[kernels] = max(Plan.from_json(out.read_text()).predicted.peak_bytes)
    assert peaks["fused"] < peaks["plain"]
    assert main(plan_arguments(lengths, model)) == 0  # a config.json is what training here runs
    assert "activations of plain Hugging Face layers" in capsys.readouterr().out


def test_the_summary_names_idle_devices(
    lengths: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    some = ["--cluster", "a800-80g-1x8"]
    assert main(plan_arguments(lengths, model, *some)) == 0
    assert "4 of 8 of a800-80g-1x8: 4 stay idle" in capsys.readouterr().out
    assert main(plan_arguments(lengths, model, *some, "--dp", "2")) == 0
    assert "stay idle" not in capsys.readouterr().out


def test_planning_options_reach_the_plan(tmp_path: Path, lengths: str, model: str) -> None:
    out = tmp_path / "plan.json"
    more = ["--memory-gib", "1.5", "--alignment", "4", "--recompute", "full", "--solver", "greedy"]
    more += ["--max-slices", "2", "--zero-stage", "0", "--json", str(out)]
    assert main(plan_arguments(lengths, model, *more)) == 0
    plan = Plan.from_json(out.read_text())
    assert plan.setup.limit_bytes == 3 * 2**29
    assert plan.setup.alignment == 4
    assert plan.setup.execution.zero_stage == 0
    assert plan.solver.k <= 2
    assert all(layers == 2 for p in plan.pipelines for stage in p.recompute for layers in stage)


@pytest.mark.parametrize(
    ("policy", "tokens"),
    [("truncate", 5836 - 2000 - 24), ("split", 5836), ("drop", 5836 - 3000 - 1024)],
)
def test_the_over_length_policy_is_applied_and_reported(
    tmp_path: Path,
    lengths: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
    policy: str,
    tokens: int,
) -> None:
    out = tmp_path / "plan.json"
    more = ["--context", "1000", "--over-length", policy, "--json", str(out)]
    assert main(plan_arguments(lengths, model, *more)) == 0
    assert sum(Plan.from_json(out.read_text()).lengths) == tokens
    assert f"2 sequences are longer than 1000 tokens, policy '{policy}'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("5\n0\n", "lengths.txt, line 2: length 0 is not usable"),
        ("5\n-7\n", "line 2: length -7 is not usable"),
        ("five\n", "line 1: 'five' is not an integer"),
        ("", "holds no length"),
    ],
)
def test_a_bad_lengths_file_is_exit_code_2(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], content: str, expected: str
) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(content)
    code, text = fails(capsys, *plan_arguments(str(file), model))
    assert code == 2
    assert expected in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--sp", "3"], "sp 3 cannot share 4 attention heads"),
        (["--pp", "5"], "pp 5 is more than the 4 layers"),
        (["--pp", "0"], "pp is 0"),
        (["--context", "1000"], "2 of 8 sequences are longer than the context of 1000"),
        (["--context", "1"], "--context 1"),
        (["--cluster", "moon"], "cluster 'moon' is neither a file nor a built-in name"),
        (["--model", "gpt-9"], "model 'gpt-9' is neither a file nor a built-in name"),
        (["--recompute", "some"], 'planner.recompute is "some": must be \'adaptive\''),
        (["--mode", "magic"], 'infinipipe.planner.mode is "magic"'),
        (["--memory-gib", "-3"], "planner.memory_limit_gib is -3.0"),
        (["--alignment", "0"], "planner.alignment is 0"),
        (["--json", "absent/plan.json"], "the folder does not exist"),
        (["--lengths", "absent.txt"], "absent.txt does not exist"),
        (["--lengths", "github-b:many"], "write LAW:COUNT or LAW:COUNT:SEED"),
        (["--cluster", "a800-80g-4x8", "--model", "llama-13b", "--pp", "8", "--sp", "8"],
         "64 ranks, but cluster a800-80g-4x8 has 32 devices"),
    ],
)  # fmt: skip
def test_bad_planning_input_is_exit_code_2(
    lengths: str, model: str, capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    code, text = fails(capsys, *plan_arguments(lengths, model, *more))
    assert (code, expected in text) == (2, True), text


def test_a_batch_that_cannot_fit_is_exit_code_3(
    lengths: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = fails(capsys, *plan_arguments(lengths, model, "--memory-gib", "0.001"))
    assert code == 3
    assert text.startswith("infinipipe plan: ")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["plan"], ["plan", "--wings", "2"], ["train"], ["schema", "x"]]
)
def test_wrong_usage_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, text = fails(capsys, *arguments)
    assert code == 2
    assert "usage: infinipipe" in text


def test_debug_shows_the_traceback(lengths: str, model: str) -> None:
    with pytest.raises(ConfigError):
        main(["--debug", *plan_arguments(lengths, model, "--sp", "3")])


def test_schema_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert "planner" in json.loads(capsys.readouterr().out)["properties"]


def test_planning_never_loads_torch(lengths: str, model: str) -> None:
    arguments = plan_arguments(lengths, model)
    code = (
        "import sys; from ds_infinipipe.cli import main;"
        f"code = main({arguments!r});"
        "heavy = [m for m in ('torch', 'deepspeed', 'transformers', 'hydra') if m in sys.modules];"
        "print('loaded', heavy); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_the_module_and_the_console_script_are_the_same_program() -> None:
    script = Path(sys.executable).parent / "infinipipe"
    outputs = [
        subprocess.run([*command, "--help"], capture_output=True, text=True).stdout
        for command in ([sys.executable, "-m", "ds_infinipipe"], [str(script)])
    ]
    assert outputs[0] == outputs[1]
    assert "usage: infinipipe" in outputs[0]


@pytest.mark.parametrize(
    ("config", "more", "expected"),
    [
        (None, [], "absent.json cannot be read"),
        ({}, [], "no model: give infinipipe.model.path"),
        ({"infinipipe": {"planer": {}}}, [], "did you mean 'planner'?"),
        ({"infinipipe": {"model": {"config": TINY}}}, [], "train_batch_size is missing"),
        ({"infinipipe": {"model": {"config": TINY}}}, ["--steps", "0"], "training.steps is 0"),
        ({"infinipipe": {"model": {"config": TINY}}}, ["steps"], "'steps' is not an override"),
        (
            {
                "train_batch_size": 4,
                "infinipipe": {"model": {"config": TINY}, "parallel": {"pp": 2, "sp": 2}},
            },
            [],
            "pp 2 x sp 2 x dp 1 = 4 ranks, but 1 were started",
        ),
        (
            {"infinipipe": {"model": {"config": TINY}, "cluster": "moon"}},
            [],
            "cluster 'moon' is neither a file nor a built-in name",
        ),
        (
            {"infinipipe": {"model": {"config": {**TINY, "model_type": "gpt2"}}}},
            [],
            "model type 'gpt2' is not supported",
        ),
    ],
)
def test_bad_training_input_is_exit_code_2_before_torch_is_loaded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, object] | None,
    more: list[str],
    expected: str,
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored afterwards, whatever the verb sets
        monkeypatch.delenv(name)
    file = tmp_path / "absent.json"
    if config is not None:
        file = tmp_path / "run.json"
        file.write_text(json.dumps(config))
    code, text = fails(capsys, "train", "--deepspeed_config", str(file), *more)
    assert (code, expected in text) == (2, True), text


def test_the_launchers_local_rank_is_accepted_before_and_after_the_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    file = str(tmp_path / "absent.json")
    for arguments in (
        ["--local_rank=3", "train", "--deepspeed_config", file],
        ["train", "--local_rank", "3", "--deepspeed_config", file],
    ):
        code, text = fails(capsys, *arguments)
        assert code == 2
        assert text.startswith("infinipipe train (rank 3): ")


def test_overrides_are_json_where_they_parse() -> None:
    config = {"a": {"b": 1}}
    changed = apply_overrides(
        config, ["a.b=2", "a.c=full", "d.e=[1,2]", "f=true", "g=x=y", 'h="3"', "i=null"]
    )
    assert changed == {
        "a": {"b": 2, "c": "full"}, "d": {"e": [1, 2]}, "f": True, "g": "x=y", "h": "3", "i": None,
    }  # fmt: skip
    assert config == {"a": {"b": 1}}


@pytest.mark.parametrize("override", ["a", "=3", "a..b=3", "a.b.c=1"])
def test_overrides_that_make_no_sense_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"override|is not an object"):
        apply_overrides({"a": {"b": 1}}, [override])


def test_synthetic_lengths_are_drawn_by_name() -> None:
    lengths = load_lengths("github-b:50:3", 4096)
    assert len(lengths) == 50
    assert lengths.max() <= 4096
    assert (lengths == load_lengths("github-b:50:3", 4096)).all()
    assert (lengths != load_lengths("github-b:50", 4096)).any()
