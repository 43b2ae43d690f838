"""Reading a model's sizes from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.models import load_model, model_from_hf

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


def test_sizes_are_taken_and_absent_ones_derived() -> None:
    spec = model_from_hf(TINY)
    assert (spec.num_kv_heads, spec.head_dim, spec.tied_embeddings) == (2, 8, False)
    spec = model_from_hf({**TINY, "num_key_value_heads": None, "head_dim": None})
    assert (spec.num_kv_heads, spec.head_dim) == (4, 8)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "32000", None, True, 2**31, [4]])
def test_a_size_is_a_positive_integer(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"gives {name} = .*; it must be an integer of at least"):
        model_from_hf({**TINY, name: value})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        ({"num_key_value_heads": 1.0}, "num_key_value_heads = 1.0"),
        ({"head_dim": -8}, "head_dim = -8"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"hidden_size": 33}, "hidden_size = 33, no multiple of num_attention_heads = 4"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'; it must be true or false"),
        ({"model_type": ["llama"]}, "model type .* is not supported"),
    ],
)
def test_other_fields_are_checked_too(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        model_from_hf({**TINY, **changes})


def test_what_is_missing_is_listed() -> None:
    with pytest.raises(ConfigError, match="lacks intermediate_size, vocab_size; give a complete"):
        model_from_hf({k: TINY[k] for k in TINY if k not in ("vocab_size", "intermediate_size")})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "model file .*config.json is not JSON"),
        ("[]", "must hold one JSON object"),
        ("[" * 5000 + "]" * 5000, "nested deeper than 100 levels"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_model(str(tmp_path))


def test_a_name_that_is_no_model_is_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model '' is neither a file nor a built-in name"):
        load_model("")
    with pytest.raises(ConfigError, match=r"model folder .* holds no config"):
        load_model(str(tmp_path))


def test_a_byte_order_mark_is_no_part_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(TINY).encode())
    assert load_model(str(tmp_path)).num_layers == 4
