"""Areas of attention with and without sliding windows, counted key by key."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import setup_of

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS, model_from_hf
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.area import CAUSAL, AttentionArea, chunk_sizes
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.lean.packing import SortedBatch, cut_batch
from ds_infinipipe.planner.search.paper.chunking import slice_mesh

CLUSTER = BUILTIN_CLUSTERS["a800-80g-4x8"]
MODEL = replace(BUILTIN_MODELS["llama-7b"], num_layers=8)
WINDOWED = replace(MODEL, sliding_window=4096, window_layers=8)


def _pairs(tokens: int, window: int) -> int:
    return sum(min(t + 1, window) for t in range(tokens))


@pytest.mark.parametrize("window", [1, 3, 10, 64])
@pytest.mark.parametrize("tokens", [0, 1, 2, 9, 10, 11, 50])
def test_an_area_is_twice_the_pairs_but_for_the_diagonal(tokens: int, window: int) -> None:
    area = AttentionArea(window, 1, 1).before(tokens)
    assert area == 2 * _pairs(tokens, window) - min(tokens, window)
    assert CAUSAL.before(tokens) == tokens**2 == AttentionArea(64, 1, 1).before(tokens)


def test_arrays_and_numbers_have_the_same_areas() -> None:
    for area in (CAUSAL, AttentionArea(7, 1, 1), AttentionArea(7, 3, 5)):
        positions = np.arange(40)
        expected = [area.before(int(x)) for x in positions]
        assert area.before(positions).tolist() == expected
        assert area.before(positions.astype(float)).tolist() == expected


def test_slices_of_a_sequence_have_its_area_together() -> None:
    area = AttentionArea(7, 3, 5)
    slices = [Slice(0, 0, 5, False), Slice(0, 5, 9, False), Slice(0, 14, 26, True)]
    assert sum(area.of_chunk(Chunk((s,))) for s in slices) == area.before(40)
    tokens, areas = chunk_sizes([Chunk((Slice(0, 0, 9, True),), 3)], area)
    assert (tokens[0], areas[0]) == (12, area.before(9) + 9)


@given(
    tokens=st.integers(1, 10**6),
    window=st.integers(0, 10**5),
    layers=st.integers(0, 8),
    quadratic=st.floats(1e-12, 1e-6),
)
def test_a_place_has_the_work_it_was_asked_for(
    tokens: int, window: int, layers: int, quadratic: float
) -> None:
    area = AttentionArea(window, layers, 8)
    work = quadratic * area.before(tokens) + 1e-3 * tokens
    assert area.place(work, quadratic, 1e-3) == pytest.approx(tokens, rel=1e-4, abs=0.01)


@pytest.mark.parametrize("window_layers", [0, 3, 8])
def test_slices_of_both_meshes_have_equal_work_under_a_window(window_layers: int) -> None:
    model = replace(MODEL, sliding_window=2048, window_layers=window_layers)
    cost = CostModel(setup_of(model, make_layout(model, 4, 8), CLUSTER))
    length, (a, b) = 131072, cost.mesh_coefficients
    batch = SortedBatch.of([length], cost)
    mesh = cut_batch(batch, cost, float(batch.whole_s[0]) / 8, length, 8, 1)
    lean = [*(mesh.start + mesh.length)]
    for ends in (slice_mesh(length, len(lean), cost), lean):
        starts = [0, *ends[:-1]]
        work = [
            a * (cost.area.before(int(e)) - cost.area.before(int(s))) + b * (e - s)
            for s, e in zip(starts, ends, strict=True)
        ]
        assert len(ends) > 4
        assert max(work) / min(work) < 1.01


def test_a_window_makes_long_sequences_cheaper_than_causal_attention() -> None:
    lengths = [65536, 3000, 20000]
    layout = make_layout(MODEL, 4, 8)
    causal, windowed = (
        plan_batch(lengths, setup_of(model, layout, CLUSTER)) for model in (MODEL, WINDOWED)
    )
    assert windowed.predicted.step_time_s < 0.9 * causal.predicted.step_time_s


def test_arenas_keep_all_keys_whatever_the_window() -> None:
    """As the runtime does: attention picks what it sees."""
    layout = make_layout(MODEL, 4, 8)
    causal, windowed = (MemoryModel(setup_of(model, layout)) for model in (MODEL, WINDOWED))
    assert windowed.arena_bytes(65536) == causal.arena_bytes(65536)
    assert windowed.kv_grad_bytes(60000) == causal.kv_grad_bytes(60000)


def _config(kind: str, **fields: object) -> dict[str, object]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return {
        "model_type": kind,
        **sizes,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "vocab_size": 97,
        **fields,
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (_config("llama", sliding_window=16), (0, 0)),
        (_config("mistral", sliding_window=16), (16, 4)),
        (_config("mistral", sliding_window=None), (0, 0)),
        (_config("mistral"), (4096, 4)),
        (_config("qwen2", sliding_window=16), (0, 0)),
        (
            _config("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1),
            (16, 3),
        ),
        (_config("qwen3", sliding_window=16, use_sliding_window=True), (0, 0)),
        (
            _config(
                "qwen3",
                sliding_window=16,
                use_sliding_window=True,
                layer_types=["full_attention", "sliding_attention"] * 2,
            ),
            (16, 2),
        ),
    ],
)
def test_windows_are_read_as_transformers_does(
    config: dict[str, object], expected: tuple[int, int]
) -> None:
    spec = model_from_hf(config)
    assert (spec.sliding_window, spec.window_layers) == expected


def test_a_window_of_no_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="sliding_window = 0"):
        model_from_hf(_config("mistral", sliding_window=0))
