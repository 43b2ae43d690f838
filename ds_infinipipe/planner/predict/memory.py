"""Bytes of stages and chunks on one rank: what the executor allocates (Eq. 5-10, corrected).

Every rank of a stage holds padded_tokens / sp tokens of a chunk. What is alive when, by the
operations of the chunk, of which B, or I and W, is its backward:

    tensors                                         F   to B/I   B   I   to W   W   of each
    model states, gathered parameters               x     x      x   x     x    x   stage
    what a layer saves; its input if recomputed     +     x      -   -     .    .   layer
    rotary tables; gradient of the last hidden      +     x      -   -     .    .   chunk
    K/V arena of a cut sequence (1)                 +     x      -   -     .    .   layer
    dK and dV of the slices before the tail (1)     .     .      +   +     .    .   layer
    inputs, output gradients of projections         .     .      .   +     x    -   layer
    logits and their gradient, a block (2)          o     .      .   .     .    .   chunk
    a layer while it is recomputed                  o     .      o   o     .    .   one layer
    gradients of the activations                    .     .      o   o     .    .   one layer
    gradients of the weights, until reduced         .     .      o   .     .    o   one layer
    operands rounded to FP8                         o     .      o   .     .    .   one layer

    + made, and stays   x there   - there, gone at its end   o only while it runs   . not there

1. Of the whole sequence, apart from the activations: the arena is made in F of the first slice, dK
   and dV in B or I of the tail; both are gone at the end of B or I of the first slice.
2. On the last stage. Deviation: the paper keeps a chunk's logits from F to B; here the loss runs
   forward and backward inside F over blocks of tokens, and the gradient of the last hidden state is
   kept instead.

The methods give the rows: `static_bytes`; `saved_bytes` or `input_bytes`; `output_bytes`;
`arena_bytes`; `kv_grad_bytes`; `stash_bytes`; and what is there only during F, B, I and W the four
transients. What is in transfer comes on top, see plan/transfers.py; ledger.py puts it all together.
"""

from __future__ import annotations

from ds_infinipipe.planner.facts.models import local_heads, local_kv_heads
from ds_infinipipe.planner.facts.setup import Setup
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.layer_bytes import (
    fp8_forward_bytes,
    fp8_input_gradient_bytes,
    fp8_ungraphed_bytes,
    head_bytes,
    saved_tensors,
    stashed_token_bytes,
)
from ds_infinipipe.planner.predict.state_bytes import (
    gathered_bytes,
    reduce_bucket_elements,
    state_bytes,
)

__all__ = ["MemoryModel"]


class MemoryModel:
    """Bytes per rank for one setup, by the table above. Cheap to make; hand it on."""

    def __init__(self, setup: Setup) -> None:
        """Where the setup keeps parameters gathered, all of a stage are there during the step, not
        those of two layers.
        """
        model, layout, size = setup.model, setup.layout, setup.execution.dtype_bytes
        self.setup = setup
        self.model = model
        self.layout = layout
        self._execution = setup.execution
        self._zero_stage = setup.execution.zero_stage
        late = 3 * model.ffn_size + model.query_size
        self._late_weight_bytes = size * model.hidden_size * late
        joint = min(model.layer_params, reduce_bucket_elements(model))
        self._reduction_bytes = size * (model.layer_params + joint)
        """A layer's gradients, and those of a bucket laid out by rank for the reduce-scatter."""
        self._embedding_gradient_bytes = size * model.embedding_params
        tensors = saved_tensors(setup)
        self._saved_token_bytes = sum(t.token_bytes for t in tensors if not t.is_kv)
        self._late_token_bytes = sum(t.token_bytes for t in tensors if t.is_late)
        self._hidden_token_bytes = size * model.hidden_size
        self._ffn_token_bytes = size * model.ffn_size
        self._stashed_token_bytes = stashed_token_bytes(setup)
        query_width = layout.sp * local_heads(model, layout.sp) * model.head_dim
        self._query_token_bytes = size * query_width
        self._kv_row_elements = 2 * local_kv_heads(model, layout.sp) * model.head_dim
        self._kv_row_bytes = self._kv_row_elements * size
        stages = range(layout.pp)
        self.state_bytes = tuple(state_bytes(setup, p) for p in stages)
        self.static_bytes = tuple(self.state_bytes[p] + gathered_bytes(setup, p) for p in stages)

    def saved_bytes(self, chunk: Chunk) -> int:
        """A: what one layer keeps of the chunk when not recomputed, without the arena's rows."""
        own_kv_rows = chunk.padded_tokens - chunk.split_tokens
        tokens = self._local_tokens(chunk)
        joined = tokens * self._query_token_bytes if self._joins_outputs(chunk) else 0
        return tokens * self._saved_token_bytes + own_kv_rows * self._kv_row_bytes + joined

    def input_bytes(self, chunk: Chunk) -> int:
        """R: what one recomputed layer keeps, its input.

        Deviation: the paper adds 2 (1 - I_k) D_kv per token for a split chunk (Eq. 9); those K/V
        are in the arena, whether the layer is recomputed or not.
        """
        return self._local_tokens(chunk) * self._hidden_token_bytes

    def output_bytes(self, stage: int, chunk: Chunk) -> int:
        """What a stage keeps from F to B besides its layers: the rotary tables.

        On the last stage also the gradient of the last hidden state. Another stage's output is in
        transfer, see transfers.py.
        """
        is_last = stage == self.layout.pp - 1
        return self._table_bytes(chunk) + (self.input_bytes(chunk) if is_last else 0)

    def arena_bytes(self, sequence_len: int) -> int:
        """K and V of a whole cut sequence in one layer, [length, local kv heads, head_dim] each.

        Allocated in the first slice's F and freed at the end of its B.
        """
        return sequence_len * self._kv_row_bytes

    def kv_grad_bytes(self, context_len: int) -> int:
        """dK and dV of the slices before the tail in one layer, in float32 or wider.

        Allocated in the tail's B, layer by layer: `backward_transient` takes off what is not there
        yet. Freed at the end of the first slice's B.
        Deviation: the paper charges M_dkv for every split chunk in the window (Eq. 5, 10); the
        tail's own gradients are never accumulated, and none exist before its backward.
        """
        return context_len * self._kv_row_elements * max(4, self._execution.dtype_bytes)

    def held_bytes(self, stage: int, chunk: Chunk, recompute: int) -> int:
        """What F(chunk) adds to a stage and B(chunk) removes, the arena apart (Eq. 10)."""
        kept = self.layout.stage_layers[stage] - recompute
        layers = kept * self.saved_bytes(chunk) + recompute * self.input_bytes(chunk)
        return layers + self.output_bytes(stage, chunk)

    def forward_transient(self, stage: int, chunk: Chunk, recompute: int) -> int:
        """Bytes that live only during F(chunk): a recomputed layer's activations, the logits.

        These never coincide, so the largest counts. A recomputed layer matters only when it is the
        stage's last: a kept layer above it weighs more. It runs without a graph, so only the
        widest moment of its MLP is there.
        Deviation: the paper ignores the recomputed layer ("other activations can be ignored").
        """
        hidden = self.input_bytes(chunk)
        layer = self._ungraphed_bytes(chunk) if self._is_all(stage, recompute) else 0
        # the stage's output is not yet there
        layer = max(layer, self._fp8_forward_bytes(chunk)) - hidden
        loss = self._loss_bytes(chunk) if stage == self.layout.pp - 1 else 0
        return max(hidden, layer, loss)

    def backward_transient(self, stage: int, chunk: Chunk, recompute: int) -> int:
        """Bytes that live only during B(chunk): a recomputed layer and one layer's gradients.

        A layer is rebuilt on top of all that is kept only where every layer is recomputed: the
        layers above the recomputed ones are gone when those run. Of a tail's dK and dV one layer
        is there in its first layer's backward, all of them in its last layer's, where what the
        other layers kept is gone; so the result can be negative. Under ZeRO-3 the
        gradients of a layer's weights are whole until they are reduced.
        """
        layers, is_all = self.layout.stage_layers[stage], self._is_all(stage, recompute)
        layer = self._gradient_workspace(chunk)
        if is_all:
            layer = max(layer, self._fp8_forward_bytes(chunk)) + self._rebuilt_bytes(chunk)
        if self._zero_stage == 3:
            gone = 0 if is_all else self._rebuilt_bytes(chunk)
            layer = max(layer, self._reduction_bytes - gone)
        if _is_tail(chunk):
            layer -= self._least_absent(chunk, layers, recompute)
        if self._zero_stage == 3 and stage == 0:
            # the embedding's turn is the last: of the chunk only the gradient is left
            left = self.input_bytes(chunk) + self._table_bytes(chunk)
            gone = self.held_bytes(stage, chunk, layers) - left
            layer = max(layer, self._embedding_gradient_bytes - gone)
        return layer

    def stash_bytes(self, stage: int, chunk: Chunk) -> int:
        """What I(chunk) leaves on a stage for W(chunk), which removes it.

        Inputs and output gradients of every layer's projections, recomputed or not, and on the
        first stage the gradient of the embedding's output.
        """
        layers, hidden = self.layout.stage_layers[stage], self.input_bytes(chunk)
        stashed = layers * self._local_tokens(chunk) * self._stashed_token_bytes
        return stashed + (hidden if stage == 0 else 0)

    def input_transient(self, stage: int, chunk: Chunk, recompute: int, closed: int = 0) -> int:
        """Bytes that live only during I(chunk), on top of what F(chunk) added and a tail's dK/dV.

        Layer by layer, from the last one down, what a layer kept gives way to what it stashes, and
        a first slice frees `closed` bytes of arena, dK and dV: the largest is where the first or
        last kept, or the first or last recomputed, layer is at work. Can be negative as
        `backward_transient` can.
        """
        figures = self.input_figures(chunk, closed)
        growth, rebuilt, absent, workspace = figures
        layers = self.layout.stage_layers[stage]
        kept, last = layers - recompute, layers - 1
        at_work = [(0, 0), (kept - 1, 0)] if kept else []
        at_work += [(kept, 1), (last, last - kept + 1)] if recompute else []
        return workspace + max(
            at * growth + rebuilds * rebuilt - (last - at) * absent for at, rebuilds in at_work
        )

    def input_figures(self, chunk: Chunk, closed: int = 0) -> tuple[int, int, int, int]:
        """What `input_transient` is made of: growth, rebuilt, absent and workspace.

        A kept layer grows by the first, a recomputed one by the sum of the first two, of which the
        second is there from its start; of the third each layer still to come has nothing yet; the
        last is what the layer at work has on top.
        """
        tokens, saved = self._local_tokens(chunk), self.saved_bytes(chunk)
        absent = self.kv_grad_bytes(chunk.context_len) if _is_tail(chunk) else 0
        mlp, attention = self._activation_gradients(chunk)
        # inputs and output gradients of the MLP's projections stay, its widest moment keeps product
        stays = tokens * (2 * self._hidden_token_bytes + 3 * self._ffn_token_bytes)
        workspace = max(mlp + tokens * self._ffn_token_bytes, attention + stays)
        return (
            tokens * self._stashed_token_bytes - saved - closed,
            self._rebuilt_bytes(chunk),
            absent,
            workspace,
        )

    def weight_transient(self, stage: int, chunk: Chunk) -> int:
        """Bytes that live only during W(chunk): gradients in reduction."""
        if self._zero_stage == 0:
            return 0
        return max(self._reduction_bytes, self._embedding_gradient_bytes if stage == 0 else 0)

    def token_capacity(self, k: int, limit: int) -> int:
        """Most tokens of a chunk that fit every stage with all layers recomputed; at least 0.

        A window of pp - 1 - stage + k chunks of that size, the dK/dV of k - 1 of them, the
        transients of one, and one transfer each way. An estimate to size chunks by; `Ledger.peaks`
        judges.
        """
        return max(0, min(self._stage_capacity(stage, k, limit) for stage in range(self.layout.pp)))

    def _table_bytes(self, chunk: Chunk) -> int:
        tables = 2 * self.model.head_dim * self._execution.dtype_bytes
        return self._local_tokens(chunk) * tables

    def _local_tokens(self, chunk: Chunk) -> int:
        return -(-chunk.padded_tokens // self.layout.sp)

    def _joins_outputs(self, chunk: Chunk) -> bool:
        """Slice and shorts have an attention each; without an all-to-all their joint is a copy."""
        is_hybrid = chunk.keeps_kv and chunk.padded_tokens > chunk.split_tokens
        return is_hybrid and self.layout.sp == 1 and not self._execution.fused_kernels

    def _is_all(self, stage: int, recompute: int) -> bool:
        return recompute >= self.layout.stage_layers[stage]

    def _rebuilt_bytes(self, chunk: Chunk) -> int:
        """A - R: what one recomputed layer has while it runs, beside its input."""
        return self.saved_bytes(chunk) - self.input_bytes(chunk)

    def _fp8_forward_bytes(self, chunk: Chunk) -> int:
        if not self._execution.fp8:
            return 0
        return fp8_forward_bytes(self.setup, self._local_tokens(chunk))

    def _ungraphed_bytes(self, chunk: Chunk) -> int:
        """Most that a layer has at once without a graph, beside its input.

        In the MLP: residual, norm output, and three of gate, its activation, up and product.
        """
        tokens = self._local_tokens(chunk)
        most = tokens * (2 * self._hidden_token_bytes + 3 * self._ffn_token_bytes)
        return max(most, fp8_ungraphed_bytes(self.setup, tokens)) if self._execution.fp8 else most

    def _loss_bytes(self, chunk: Chunk) -> int:
        return head_bytes(self.setup, self._local_tokens(chunk))

    def _gradient_workspace(self, chunk: Chunk) -> int:
        """Most that one layer's backward has on top of what the layer keeps."""
        return max(self._gradient_workspaces(chunk))

    def _gradient_workspaces(self, chunk: Chunk) -> tuple[int, int]:
        """What one layer's backward has on top of what the layer keeps, in MLP and attention.

        Under ZeRO-3 the gradient of the down projection's weight is there with those of the MLP's
        activations, those of all projections after attention with attention's.
        """
        mlp, attention = self._activation_gradients(chunk)
        down = 0
        if self._execution.fp8:
            down, up = fp8_input_gradient_bytes(self.setup, self._local_tokens(chunk))
            mlp = max(mlp, up)
        if self._zero_stage == 3:
            mlp += self.model.hidden_size * self._ffn_token_bytes
            attention += self._late_weight_bytes
        return max(mlp, down), attention

    def _least_absent(self, chunk: Chunk, layers: int, recompute: int) -> int:
        """Of what a tail has in all layers together, how much is not there at the fullest moment.

        At its first layer the dK and dV of the others are absent; at its last one what the others
        had kept. In between is never the most: kept layers come first and are the bigger ones.
        With some layers recomputed, as if all were.
        """
        kept = self.saved_bytes(chunk) if recompute == 0 else self.input_bytes(chunk)
        return (layers - 1) * min(self.kv_grad_bytes(chunk.context_len), kept)

    def _activation_gradients(self, chunk: Chunk) -> tuple[int, int]:
        """Gradients in the MLP and in attention, less what is gone by then.

        In the MLP those of product, gate and up, the product itself gone; in attention, with all
        that came after it gone, those of residual, output and query, and dK and dV from the kernel
        for all rows the slice attends to. The gradient of the stage's output takes the place of the
        output.
        """
        tokens = self._local_tokens(chunk)
        kv_rows = (chunk.context_len + chunk.padded_tokens) * self._kv_row_bytes
        attention = tokens * (self._hidden_token_bytes + 3 * self._query_token_bytes)
        attention += kv_rows + self._part_bytes(chunk) - tokens * self._late_token_bytes
        return 2 * tokens * self._ffn_token_bytes, attention

    def _part_bytes(self, chunk: Chunk) -> int:
        """Of plain attention: dQ, dK and dV once more, of its largest part at a time.

        Parts are the sequences, and apart from it the context of a slice; see ops/cpu_flash.py.
        """
        if self._execution.fused_kernels:
            return 0
        query_row = self._query_token_bytes // self.layout.sp
        longest, context, cut = chunk.longest_segment, chunk.context_len, chunk.split_tokens
        if self.model.window_layers == self.model.num_layers:
            window = self.model.sliding_window
            longest, context, cut = min(longest, window), min(context, window), min(cut, window)
        own = longest * (query_row + self._kv_row_bytes)
        return max(own, cut * query_row + context * self._kv_row_bytes)

    def _stage_capacity(self, stage: int, k: int, limit: int) -> int:
        """Solves static + loss + tokens * (window + dK/dV + transient) <= limit for tokens."""
        sp, layers = self.layout.sp, self.layout.stage_layers[stage]
        token, tail = Chunk((Slice(0, 0, sp, True),)), Chunk((Slice(0, (k - 1) * sp, sp, True),))
        arena = layers * self.arena_bytes(1) if k > 1 else 0
        window = self.layout.pp - 1 - stage + k
        inputs = self.held_bytes(stage, token, layers) / sp
        gradients = (k - 1) * self.kv_grad_bytes(1)
        # the tail's backward has one layer's dK/dV, the next one all of them but not the tail
        held = window * (inputs + arena) + max(gradients, layers * gradients - inputs)
        moving = 0 if self.layout.pp == 1 else 2 * self.input_bytes(token)
        workspace = max(self._activation_gradients(tail)) + moving
        backward = (self._rebuilt_bytes(token) + workspace) / sp
        loss = 0
        if stage == self.layout.pp - 1:
            block = self._execution.loss_block_tokens * sp
            loss = self._loss_bytes(Chunk((Slice(0, 0, block, True),)))
        weights = self._late_weight_bytes if self._zero_stage == 3 else 0
        free = limit - self.static_bytes[stage] - max(loss, weights)
        return int(free / (held + backward))


def _is_tail(chunk: Chunk) -> bool:
    return chunk.keeps_kv and chunk.slices[0].is_tail
