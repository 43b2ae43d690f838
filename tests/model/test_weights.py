"""Loading Hugging Face checkpoints and starting from names and a seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_reference import reference_model, tiny_config
from safetensors.torch import save_file
from torch import Tensor

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.hf import load_hf_config
from ds_infinipipe.model.layers import build_stage_layers
from ds_infinipipe.model.weights import check_weights, init_parameter, load_weights

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3),
    "model.layers.0.mlp.up_proj.weight": torch.ones(5, 3),
    "model.norm.weight": torch.full((3,), 2.0),
}
SHAPES = {name: tuple(t.shape) for name, t in TENSORS.items()}


def _sharded(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint with one tensor per file and an index."""
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"model-{i + 1:05d}-of-{len(tensors):05d}.safetensors"
        save_file({name: tensor}, folder / weight_map[name])
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _single(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("save", [_single, _sharded])
def test_wanted_tensors_are_read(tmp_path: Path, save) -> None:  # type: ignore[no-untyped-def]
    folder = save(tmp_path, TENSORS)
    wanted = {"model.norm.weight": (3,), "model.embed_tokens.weight": torch.Size([4, 3])}
    got = dict(load_weights(folder, wanted))
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], TENSORS[name]) for name in wanted)


def test_the_dtype_is_that_of_the_file(tmp_path: Path) -> None:
    folder = _single(tmp_path, {"w": torch.ones(2, dtype=torch.bfloat16)})
    assert dict(load_weights(folder, {"w": (2,)}))["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("save", [_single, _sharded])
def test_all_wrong_tensors_are_listed_before_any_is_read(tmp_path: Path, save) -> None:  # type: ignore[no-untyped-def]
    folder = save(tmp_path, TENSORS)
    wanted = {**SHAPES, "model.norm.weight": (4,), "model.layers.1.mlp.up_proj.weight": (5, 3)}
    with pytest.raises(ConfigError) as caught:
        load_weights(folder, wanted)  # not one tensor taken from the iterator
    message = str(caught.value)
    assert "2 of 4 tensors are wrong" in message
    assert "model.layers.1.mlp.up_proj.weight is missing" in message
    assert "model.norm.weight has shape (3,), the model (4,)" in message


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    folder = _single(tmp_path, TENSORS)
    with pytest.raises(ConfigError, match=r"layer\.09 is missing and 5 more"):
        check_weights(folder, {f"layer.{i:02d}": (1,) for i in range(15)})


@pytest.mark.parametrize(
    ("tensors", "wanted", "repair"),
    [
        (TENSORS, {**SHAPES, "lm_head.weight": (4, 3)}, "set tie_word_embeddings to true"),
        ({"norm.weight": torch.ones(3)}, {"model.norm.weight": (3,)}, "saved without its head"),
        ({"w": torch.ones(2, dtype=torch.int8)}, {"w": (2,)}, "w is I8, not one of F64"),
    ],
)
def test_the_repair_is_named(
    tmp_path: Path, tensors: dict[str, Tensor], wanted: dict, repair: str
) -> None:
    with pytest.raises(ConfigError, match=repair):
        check_weights(_single(tmp_path, tensors), wanted)


def test_a_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"holds pytorch_model\.bin.*save_pretrained"):
        load_weights(tmp_path, SHAPES)


def test_an_empty_and_an_absent_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        load_weights(tmp_path, SHAPES)
    with pytest.raises(ConfigError, match="there is no checkpoint folder"):
        load_weights(tmp_path / "nowhere", SHAPES)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = _sharded(tmp_path, TENSORS)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks the files model-00002-of-00003"):
        load_weights(folder, SHAPES)


def test_an_index_that_is_wrong_about_a_file_is_noticed(tmp_path: Path) -> None:
    folder = _sharded(tmp_path, TENSORS)
    save_file({"other": torch.ones(1)}, folder / "model-00003-of-00003.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is in the index but not in"):
        load_weights(folder, SHAPES)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=f"{name} is (damaged|not JSON)"):
        load_weights(tmp_path, SHAPES)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_transformers_fits_our_layers(tmp_path: Path, tied: bool) -> None:
    values = tiny_config("qwen2", tie_word_embeddings=tied)
    model = reference_model(values, seed=3, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    config = load_hf_config(tmp_path)
    layers = build_stage_layers(config, 0, 3, is_first=True, is_last=True)
    named = [(x.hf_name(name), p) for x in layers for name, p in x.named_parameters()]
    loaded = dict(load_weights(tmp_path, {name: p.shape for name, p in named}))
    for name, _ in named:
        assert torch.equal(loaded[name], dict(model.named_parameters())[name])


def _init(name: str, *shape: int, seed: int = 0, **kwargs) -> Tensor:  # type: ignore[no-untyped-def]
    tensor = torch.full(shape, float("nan"), dtype=kwargs.pop("dtype", torch.float32))
    init_parameter(name, tensor, seed, 0.02, **kwargs)
    return tensor


def test_initial_weights_have_the_statistics_of_transformers() -> None:
    weight = _init("model.layers.0.mlp.up_proj.weight", 400, 500)
    assert abs(weight.mean().item()) < 4 * 0.02 / 200_000**0.5
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert torch.equal(_init("model.layers.0.self_attn.q_proj.bias", 5), torch.zeros(5))
    for norm in ("model.norm", "model.layers.1.input_layernorm", "model.layers.0.self_attn.q_norm"):
        assert torch.equal(_init(f"{norm}.weight", 5), torch.ones(5))


def test_initial_weights_depend_on_name_and_seed_only() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    torch.manual_seed(1)
    first = _init(name, 7, 5)
    torch.manual_seed(2)
    assert torch.equal(_init(name, 7, 5), first)
    assert not torch.equal(_init(name, 7, 5, seed=1), first)
    assert not torch.equal(_init("model.layers.1.mlp.up_proj.weight", 7, 5), first)


def test_every_dtype_starts_from_the_same_values() -> None:
    first = _init("lm_head.weight", 7, 5)
    assert torch.equal(_init("lm_head.weight", 7, 5, dtype=torch.float64), first.double())
    assert torch.equal(_init("lm_head.weight", 7, 5, dtype=torch.bfloat16), first.bfloat16())


def test_the_padding_tokens_embedding_starts_at_zero() -> None:
    embedding = _init("model.embed_tokens.weight", 7, 5, zero_row=3)
    assert not embedding[3].any() and embedding[[0, 1, 2, 4, 5, 6]].all()
    assert _init("lm_head.weight", 7, 5, zero_row=3).all()


def test_initial_values_stay_the_same_between_releases() -> None:
    got = _init("lm_head.weight", 1, 3)
    torch.testing.assert_close(
        got, torch.tensor([[-0.01013235, 0.02187823, 0.04746852]]), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({"weight_map": {"w": 5}}, "w is in 5, which is no file name"),
        ({"weight_map": {"w": None}}, "w is in None"),
        ({"weight_map": ["w"]}, "weight_map is no object"),
        ({}, "weight_map is no object"),
        ([], "must hold one JSON object"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, index: object, expected: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"the index .*index.json .*{expected}"):
        check_weights(tmp_path, SHAPES)


def test_a_folder_without_weights_is_told_apart_from_one_with_pickles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it holds no weights at all: download the model again"):
        check_weights(tmp_path, SHAPES)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"it holds pytorch_model\.bin, which is not read"):
        check_weights(tmp_path, SHAPES)
