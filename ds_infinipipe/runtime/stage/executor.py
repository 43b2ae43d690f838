"""Run chunks through the layers of one stage, forward and backward, layer by layer.

Each layer is an autograd segment of its own: detached input in, output kept, and backward calls
autograd once per segment. So gathers, recomputation, reductions and releases stand exactly where
the instruction puts them, and a recomputed layer keeps nothing but its input. A split backward
runs the segments without the projections' weights, whose gradients follow without any autograd.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ds_infinipipe.model.context import ChunkContext
from ds_infinipipe.model.layers import DecoderLayer, EmbeddingLayer
from ds_infinipipe.model.projection import EarlyGradient, WeightWork, add_gradient
from ds_infinipipe.model.protocol import Decoder, Embedding, Head
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.runtime.ranks.clock import Wait, WaitTimes
from ds_infinipipe.runtime.shards.sharding import Sharding

__all__ = ["ChunkInput", "StageExecutor"]


@dataclass
class ChunkInput:
    """What a stage needs of a chunk: tokens of this sequence-parallel rank, or activations.

    `ids_T` on the first stage, `hidden_1TE` on the others; `labels_T`, and
    `weights_T` if tokens have weights, on the last.
    """

    context: ChunkContext
    ids_T: torch.Tensor | None = None
    hidden_1TE: torch.Tensor | None = None
    labels_T: torch.Tensor | None = None
    weights_T: torch.Tensor | None = None


@dataclass
class _Segment:
    """One layer's pass: its input, and where its backward starts unless it will be recomputed.

    The output itself is not kept: the next layer's input shares its storage, and a stage's output
    is free as soon as it is sent.
    """

    layer: int
    source: torch.Tensor
    root: GradientEdge | None


@dataclass
class _InFlight:
    context: ChunkContext
    segments: list[_Segment] = field(default_factory=list)
    hidden_gradient: torch.Tensor | None = None

    def take_gradient(self, received: torch.Tensor | None) -> torch.Tensor | None:
        """Gradient of the stage's output: what was received, or the head's on the last stage."""
        gradient = received if self.hidden_gradient is None else self.hidden_gradient
        self.hidden_gradient = None
        return gradient


@dataclass
class _LayerWork:
    """What the weight gradients of one layer need: its weights' work, or the embedding's."""

    layer: int
    weights: list[WeightWork | EarlyGradient]
    ids_T: torch.Tensor | None = None
    output_gradient: torch.Tensor | None = None


class StageExecutor:
    """The layers of one stage and the chunks that are between their forward and backward."""

    def __init__(
        self, layers: Sequence[torch.nn.Module], sharding: Sharding, waits: WaitTimes
    ) -> None:
        self._layers = list(layers)
        self._sharding = sharding
        self._waits = waits
        self._in_flight: dict[int, _InFlight] = {}
        self._left: dict[int, deque[_LayerWork]] = {}
        self.loss_block_tokens = 1024
        self.loss_scale = 0.0
        self._losses: list[torch.Tensor] = []
        self.recomputed_layers = 0

    @property
    def loss_sum(self) -> float:
        """This rank's part of the step's loss so far; waits for the device."""
        return float(torch.stack(self._losses).sum()) if self._losses else 0.0

    @property
    def chunks_in_flight(self) -> tuple[int, ...]:
        """Chunks whose backward has not run."""
        return tuple(self._in_flight)

    @property
    def chunks_without_weights(self) -> tuple[int, ...]:
        """Chunks whose input has its gradient, but whose weights have not."""
        return tuple(self._left)

    def begin_step(self, loss_scale: float, loss_block_tokens: int) -> None:
        """`loss_scale` is what each label's loss is multiplied by: 1 / valid tokens of the step."""
        self._sharding.begin_step()
        self.loss_scale = loss_scale
        self.loss_block_tokens = loss_block_tokens
        self._losses = []
        self.recomputed_layers = 0

    def entry_layer(self, op: Op) -> int | None:
        """The layer that an instruction gathers first; None for those that gather nothing.

        The head is done when its forward is, so a backward starts below it.
        """
        if op is Op.FORWARD:
            return 0
        if op.makes_gradient:
            return len(self._layers) - 1 - isinstance(self._layers[-1], Head)
        return None

    def forward(
        self,
        chunk: int,
        given: ChunkInput,
        recompute: int,
        following: int | None = None,
        is_final: bool = False,
    ) -> torch.Tensor | None:
        """Run a chunk; the first `recompute` decoder layers keep only their input.

        `following` is the layer the stage needs next, which is gathered meanwhile; `is_final` the
        step's last forward, after which the head has its gradient. Returns the stage's output
        `[1, T, E]`, or None on the last stage, where the loss and its gradient are computed at
        once.
        """
        record = self._in_flight[chunk] = _InFlight(given.context)
        hidden = given.hidden_1TE
        decoders = 0
        for index, layer in enumerate(self._layers):
            upcoming = index + 1 if index + 1 < len(self._layers) else following
            self._fetch(index, upcoming)
            if isinstance(layer, Embedding):
                assert given.ids_T is not None
                hidden = self._embed(record, index, given.ids_T)
            elif isinstance(layer, Head):
                assert hidden is not None
                record.hidden_gradient = self._head(index, hidden, given)
                if is_final:
                    self._settle(index)
                hidden = None
            else:
                assert hidden is not None
                hidden = self._decode(record, index, hidden, keep=decoders >= recompute)
                decoders += 1
            self._release(index, upcoming)
        return hidden

    @torch.no_grad()
    def evaluate(self, given: ChunkInput) -> torch.Tensor:
        """Run a chunk without backward: the stage's output, or each token's loss `[T]` at the end.

        Nothing is kept; the arena of a cut sequence is the caller's to clear.
        """
        hidden = given.hidden_1TE
        for index, layer in enumerate(self._layers):
            self._fetch(index, index + 1 if index + 1 < len(self._layers) else None)
            if isinstance(layer, Embedding):
                hidden = layer(given.ids_T)
            elif isinstance(layer, Head):
                assert hidden is not None and given.labels_T is not None
                hidden = layer.token_losses(hidden, given.labels_T, self.loss_block_tokens)
                if given.weights_T is not None:
                    hidden = hidden * given.weights_T
            else:
                hidden = layer(hidden, given.context)
            self._sharding.release(index)
        assert hidden is not None
        return hidden

    def backward(
        self,
        chunk: int,
        output_gradient: torch.Tensor | None,
        following: int | None = None,
        is_final: bool = False,
    ) -> torch.Tensor | None:
        """Backpropagate a chunk; returns the gradient of the stage's input, None on the first.

        `following` as in `forward`; `is_final` is the last instruction of the step that makes
        gradients of weights.
        """
        record = self._in_flight.pop(chunk)
        gradient = record.take_gradient(output_gradient)
        while record.segments:
            segment = record.segments.pop()
            upcoming = record.segments[-1].layer if record.segments else following
            self._fetch(segment.layer, upcoming)
            gradient = self._backward_segment(record.context, segment, gradient)
            self._reduce(segment.layer)
            if is_final:
                self._settle(segment.layer)
            self._release(segment.layer, upcoming)
        self._flush()
        return gradient

    def backward_input(
        self, chunk: int, output_gradient: torch.Tensor | None, following: int | None = None
    ) -> torch.Tensor | None:
        """Like `backward`, but what the weights' gradients need is kept for `backward_weight`.

        Norms have their gradients now, which are set aside until those of the projections come.
        """
        record = self._in_flight.pop(chunk)
        gradient = record.take_gradient(output_gradient)
        left = self._left[chunk] = deque()
        while record.segments:
            segment = record.segments.pop()
            layer = self._layers[segment.layer]
            if isinstance(layer, EmbeddingLayer):
                left.append(_LayerWork(segment.layer, [], segment.source, gradient))
                return None
            below = record.segments[-1].layer if record.segments else None
            is_embedding = below is not None and isinstance(self._layers[below], EmbeddingLayer)
            upcoming = following if below is None or is_embedding else below
            self._fetch(segment.layer, upcoming)
            # layers of the user's own make all their gradients now
            leaving: AbstractContextManager[list[WeightWork | EarlyGradient]] = nullcontext([])
            if isinstance(layer, DecoderLayer):
                leaving = layer.leaving_weights(self._sharding.takes_gradients)
            with leaving as work:
                gradient = self._backward_segment(record.context, segment, gradient)
            left.append(_LayerWork(segment.layer, work))
            self._release(segment.layer, upcoming)
        return gradient

    def backward_weight(self, chunk: int, is_final: bool = False) -> None:
        """The rest of a split backward, from the last layer to the first; gathers nothing."""
        left = self._left.pop(chunk)
        while left:
            layer_work = left.popleft()
            for work in layer_work.weights:
                work.take()
            layer = self._layers[layer_work.layer]
            if isinstance(layer, EmbeddingLayer):
                assert layer_work.ids_T is not None and layer_work.output_gradient is not None
                weight = layer.embed_tokens.weight
                if weight.requires_grad:
                    ids_T, output_gradient = layer_work.ids_T, layer_work.output_gradient
                    add_gradient(weight, layer.weight_gradient(ids_T, output_gradient))
            self._reduce(layer_work.layer)
            if is_final:
                self._settle(layer_work.layer)
        self._flush()

    def abandon(self) -> None:
        """Drop everything in flight after an error."""
        self._in_flight.clear()
        self._losses.clear()
        self._left.clear()

    def _fetch(self, index: int, following: int | None) -> None:
        with self._waits.during(Wait.GATHERS):
            self._sharding.fetch(index)
        if following is not None:
            self._sharding.prefetch(following)

    def _reduce(self, index: int) -> None:
        with self._waits.during(Wait.REDUCTIONS):
            self._sharding.reduce(index)

    def _settle(self, index: int) -> None:
        with self._waits.during(Wait.REDUCTIONS):
            self._sharding.settle(index)

    def _flush(self) -> None:
        with self._waits.during(Wait.REDUCTIONS):
            self._sharding.flush()

    def _release(self, index: int, following: int | None) -> None:
        if following != index:
            self._sharding.release(index)

    def _embed(self, record: _InFlight, index: int, ids_T: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._layers[index](ids_T)
        record.segments.append(_Segment(index, ids_T, get_gradient_edge(output)))
        return output.detach()

    def _decode(
        self, record: _InFlight, index: int, hidden: torch.Tensor, *, keep: bool
    ) -> torch.Tensor:
        source = hidden.detach()
        output: torch.Tensor
        if not keep:
            with torch.no_grad():
                output = self._layers[index](source, record.context)
            record.segments.append(_Segment(index, source, None))
            return output
        output = self._layers[index](source.requires_grad_(), record.context)
        record.segments.append(_Segment(index, source, get_gradient_edge(output)))
        return output.detach()

    def _head(self, index: int, hidden: torch.Tensor, given: ChunkInput) -> torch.Tensor:
        source = hidden.detach().requires_grad_()
        head = self._layers[index]
        assert isinstance(head, Head) and given.labels_T is not None
        loss = head.loss(
            source, given.labels_T, self.loss_scale, self.loss_block_tokens, given.weights_T
        )
        self._losses.append(loss.detach().double())
        (loss * self._sharding.loss_multiplier).backward()
        self._reduce(index)
        self._flush()
        assert source.grad is not None
        return source.grad

    def _backward_segment(
        self, context: ChunkContext, segment: _Segment, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        root = segment.root or self._recompute(context, segment)
        segment.root = None
        torch.autograd.backward(root, gradient)
        return segment.source.grad

    def _recompute(self, context: ChunkContext, segment: _Segment) -> GradientEdge:
        assert isinstance(self._layers[segment.layer], Decoder)
        self.recomputed_layers += 1
        output = self._layers[segment.layer](segment.source.requires_grad_(), context)
        return get_gradient_edge(output)
