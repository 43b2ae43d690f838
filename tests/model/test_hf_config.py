"""Which Hugging Face configs are accepted, and what is said about the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hf_reference import tiny_config
from transformers import LlamaConfig

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.hf import load_hf_config, sliding_window
from ds_infinipipe.planner.facts.models import SUPPORTED_MODEL_TYPES, model_from_hf


@pytest.mark.parametrize("kind", SUPPORTED_MODEL_TYPES)
def test_every_supported_model_is_read(kind: str) -> None:
    config = load_hf_config(tiny_config(kind))
    assert config.model_type == kind
    assert (config.hidden_size, config.num_key_value_heads, config.vocab_size) == (32, 2, 50)


def test_a_folder_a_file_its_content_and_a_config_are_the_same(tmp_path: Path) -> None:
    values = tiny_config("llama", hidden_size=64)
    (tmp_path / "config.json").write_text(json.dumps(values))
    given = LlamaConfig(**{k: v for k, v in values.items() if k != "model_type"})
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path), values, given):
        assert load_hf_config(source).hidden_size == 64
    assert given._attn_implementation != "infinipipe"
    assert values["model_type"] == "llama"


def test_rope_settings_of_older_configs_are_understood() -> None:
    old = tiny_config("llama", rope_theta=5e5)
    old["rope_scaling"] = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = load_hf_config(old).rope_parameters
    assert rope["rope_type"] == "llama3" and rope["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gpt2", {}, "'gpt2' is not supported; supported are llama, mistral, "),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ("llama", {"pad_token_id": 50}, "pad_token_id 50 is outside the vocabulary of 50"),
        ("llama", {"num_attention_heads": "many"}, "num_attention_heads = 'many'"),
        ("llama", {"rms_norm_eps": "small"}, "cannot read this llama config"),
        (
            "llama",
            {"hidden_size": 30, "num_attention_heads": 4, "head_dim": 8},
            "hidden_size = 30, no multiple of num_attention_heads = 4: make it one, such as 32$",
        ),
        ("qwen3", {"head_dim": -8}, "head_dim = -8; it must be an integer of at least 1"),
        ("llama", {"head_dim": 0}, "head_dim = 0; it must be"),
        ("llama", {"hidden_act": "sillu"}, "hidden_act is 'sillu', which transformers does not"),
        ("llama", {"dtype": "float33"}, "dtype = 'float33'; it must be a dtype of torch"),
        ("llama", {"dtype": "auto"}, "dtype = 'auto'; it must be a dtype"),
        ("llama", {"torch_dtype": "relu"}, "torch_dtype = 'relu'; it must be a dtype"),
    ],
)
def test_a_model_that_would_not_train_exactly_is_refused(
    kind: str, changes: dict, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        load_hf_config(tiny_config(kind, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "window"),
    [
        ("llama", {}, None),
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, 64),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}, None),
    ],
)
def test_the_sliding_window_is_known(kind: str, changes: dict, window: int | None) -> None:
    assert sliding_window(load_hf_config(tiny_config(kind, **changes))) == window


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
def test_a_dtype_that_torch_has_is_accepted(dtype: str | None) -> None:
    assert load_hf_config(tiny_config("llama", dtype=dtype)).hidden_size == 32


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_the_planner_knows_what_transformers_takes_for_absent_sizes(kind: str) -> None:
    values = tiny_config(kind, num_attention_heads=32)
    del values["num_key_value_heads"], values["head_dim"]
    spec, config = model_from_hf(values), load_hf_config(values)
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == getattr(config, "head_dim", None) or spec.head_dim == 1


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model config at .*config\.json"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize(("text", "reason"), [("{", "is not JSON"), ("[]", "one JSON object")])
def test_a_damaged_config_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_hf_config(tmp_path)


def test_missing_sizes_are_not_filled_in() -> None:
    values = tiny_config("llama")
    del values["intermediate_size"], values["vocab_size"]
    with pytest.raises(ConfigError, match="the model config lacks intermediate_size, vocab_size"):
        load_hf_config(values)
