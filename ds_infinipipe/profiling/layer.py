"""Measure one decoder layer as the executor runs it: whole, packed, and as a slice over context."""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.context import ChunkContext
from ds_infinipipe.model.hf import load_hf_config, make_rotary, sliding_window
from ds_infinipipe.model.layers import DecoderLayer
from ds_infinipipe.model.liger import resolve_kernels, use_kernels
from ds_infinipipe.ops.kv_arena import SequenceArena
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.area import CAUSAL, AttentionArea
from ds_infinipipe.planner.predict.fit import ProfileRow
from ds_infinipipe.runtime.ranks.clock import HostClock, StepClock, make_clock

__all__ = ["profile_layer"]

logger = logging.getLogger(__name__)

_LEAST_ROUNDS = 3
_MOST_ROUNDS = 15
_LEAST_TOKENS = 64
_MOST_TOKENS = 32768
_SLICES = ((0, False), (1, False), (3, False), (7, True))
"""Tokens before a slice, in slices of its size, and whether it is the last of its sequence."""


def profile_layer(
    model_config: Mapping[str, Any] | str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    budget_s: float = 60.0,
    attention: str = "auto",
    kernels: str = "auto",
    seed: int = 0,
) -> list[ProfileRow]:
    """Median forward and backward seconds of one layer over a grid of shapes, within `budget_s`.

    `model_config` is a Hugging Face config or where one is; `kernels` as in `infinipipe.model`.
    Shapes double from 64 tokens as long as the time and the device's memory allow, each whole, as a
    pack of four, and as a slice over 0, 1, 3 and 7 times as many tokens: the last as the tail of
    its sequence, the others with gradients of their keys and values that a later slice has left.
    They are measured in turn, in another order each round, so that a change of the machine's speed
    falls on all. Raises ConfigError for a config that cannot be built and when the time is not
    enough for three rounds of four sizes.
    """
    bench = _Bench.build(model_config, device, dtype, attention, kernels)
    now = _seconds_of(device)
    started = now()
    chunks, round_s = _grid(bench, budget_s)
    times: dict[int, list[tuple[float, float]]] = {i: [] for i in range(len(chunks))}
    order, rng = list(times), random.Random(seed)
    for rounds in range(_MOST_ROUNDS):
        spent_s = now() - started
        if rounds >= _LEAST_ROUNDS and spent_s + round_s > budget_s:
            break
        rng.shuffle(order)
        for index in order:
            times[index].append(bench.measure(chunks[index]))
    return [
        ProfileRow.of(
            chunk,
            statistics.median(forward_s for forward_s, _ in times[i]),
            statistics.median(backward_s for _, backward_s in times[i]),
            bench.area,
        )
        for i, chunk in enumerate(chunks)
    ]


def _grid(bench: _Bench, budget_s: float) -> tuple[list[Chunk], float]:
    """Shapes whose rounds fit the time, and the seconds of a round; runs each once or twice."""
    chunks: list[Chunk] = []
    round_s, tokens = 0.0, _LEAST_TOKENS
    while tokens <= _MOST_TOKENS:
        shapes = list(_shapes(tokens))
        try:
            bench.measure(shapes[-1])  # the first run of a shape compiles and allocates
            more_s = sum(_wall(bench, chunk) for chunk in shapes)
        except torch.OutOfMemoryError:
            logger.warning("shapes of %d tokens and more do not fit the device", tokens)
            break
        chunks += shapes
        round_s += more_s
        tokens *= 2
        # the next size takes up to four times as long; the grid itself runs about twice
        if (round_s + 4 * more_s) * (_LEAST_ROUNDS + 2) > budget_s:
            break
    if tokens <= 8 * _LEAST_TOKENS:
        raise ConfigError(
            f"{budget_s:g} s are not enough to measure a layer at {8 * _LEAST_TOKENS} tokens, or "
            "it does not fit the device: give more time, or take a smaller model"
        )
    return chunks, round_s


def _shapes(tokens: int) -> Iterator[Chunk]:
    yield Chunk((Slice(0, 0, tokens, True),))
    for factor, is_tail in _SLICES:
        yield Chunk((Slice(0, factor * tokens, tokens, is_tail),))
    quarter = tokens // 4
    yield Chunk(tuple(Slice(i, 0, quarter, True) for i in range(4)))


def _wall(bench: _Bench, chunk: Chunk) -> float:
    now = _seconds_of(bench.device)
    started = now()
    bench.measure(chunk)
    return now() - started


@dataclass
class _Bench:
    """One layer with random weights, and what its contexts are made from."""

    layer: DecoderLayer
    rotary: torch.nn.Module
    hidden_size: int
    kv_shape: tuple[int, int]
    device: torch.device
    dtype: torch.dtype
    attention: str
    area: AttentionArea

    @classmethod
    def build(
        cls,
        source: Mapping[str, Any] | str,
        device: torch.device,
        dtype: torch.dtype,
        attention: str,
        kernels: str,
    ) -> _Bench:
        config = load_hf_config(source)
        use_kernels(config, resolve_kernels(kernels, config, device.type, dtype))
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        layer = DecoderLayer(config, 0).to(device, dtype)
        return cls(
            layer,
            make_rotary(config, device),
            config.hidden_size,
            (config.num_key_value_heads, head_dim),
            device,
            dtype,
            attention,
            _area_of_first_layer(config),
        )

    def measure(self, chunk: Chunk) -> tuple[float, float]:
        """Seconds of one forward that keeps its graph, and of its backward."""
        self.layer.zero_grad(set_to_none=True)
        context = self._context(chunk)
        shape = (1, chunk.padded_tokens, self.hidden_size)
        hidden = torch.randn(shape, device=self.device, dtype=self.dtype, requires_grad=True)
        gradient = torch.randn(shape, device=self.device, dtype=self.dtype)
        clock = _make_clock(self.device)
        start = clock.mark()
        output = self.layer(hidden, context)
        forward_end = clock.mark()
        if context.arena is not None and not chunk.slices[0].is_tail:
            self._leave_gradients(context.arena, chunk.slices[0])
        backward_start = clock.mark()
        torch.autograd.backward(output, gradient)
        end = clock.mark()
        forward_s = clock.seconds(forward_end) - clock.seconds(start)
        return forward_s, clock.seconds(end) - clock.seconds(backward_start)

    def _leave_gradients(self, arena: SequenceArena, piece: Slice) -> None:
        """What the forward and backward of a slice behind this one do to the arena."""
        later = self._rows(arena.num_rows - piece.end)
        arena.write(later, later, 0, piece.end)
        gradient = self._rows(arena.num_rows)
        arena.collect_grads(gradient, gradient, 0, piece.end)

    def _rows(self, count: int) -> torch.Tensor:
        return torch.randn((count, *self.kv_shape), device=self.device, dtype=self.dtype)

    def _context(self, chunk: Chunk) -> ChunkContext:
        arena = None
        if chunk.keeps_kv:
            piece = chunk.slices[0]
            arena = SequenceArena(piece.end if piece.is_tail else piece.end + piece.length)
            rows = self._rows(piece.start)
            arena.write(rows, rows, 0, 0)
        return ChunkContext.from_chunk(
            chunk,
            arena,
            None,
            rotary=self.rotary,
            device=self.device,
            dtype=self.dtype,
            attention_impl=self.attention,
        )


def _area_of_first_layer(config: PreTrainedConfig) -> AttentionArea:
    layer_types = getattr(config, "layer_types", None)
    window = sliding_window(config)
    if window is None or (layer_types and layer_types[0] != "sliding_attention"):
        return CAUSAL
    return AttentionArea(window, 1, 1)


def _make_clock(device: torch.device) -> StepClock:
    return HostClock(time.thread_time) if _has_one_thread(device) else make_clock(device)


def _seconds_of(device: torch.device) -> Callable[[], float]:
    return time.thread_time if _has_one_thread(device) else time.perf_counter


def _has_one_thread(device: torch.device) -> bool:
    """Where one thread computes its CPU time counts: that of other processes is not in it."""
    return device.type == "cpu" and torch.get_num_threads() == 1
