"""Tensors of a decoder layer and of the loss, told to the planner without loading torch.

What outlives the operation that makes it stands in `saved_tensors`. FP8 projections work on copies
of a byte an element of both operands; of one at a time a few rows are in float32 (ops/fp8.py), and
nothing of it outlives the product. A layer's other tensors are counted by MemoryModel, so each FP8
figure is of the moment of a product, for T tokens of a rank. Both backends of `ops.cross_entropy`
overwrite a block's logits with their gradient, so a logit costs one element of the model's dtype.
Below four bytes an element, torch's backend widens a few rows at a time, the Triton kernel none;
the weight's gradient on a CPU is summed from such rows too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_infinipipe.planner.facts.models import local_heads, local_kv_heads
from ds_infinipipe.planner.facts.setup import Setup

__all__ = [
    "FP8_SCRATCH_ELEMENTS",
    "LOSS_SCRATCH_ELEMENTS",
    "SavedTensor",
    "fp8_forward_bytes",
    "fp8_input_gradient_bytes",
    "fp8_product_bytes",
    "fp8_ungraphed_bytes",
    "head_bytes",
    "logits_bytes",
    "saved_tensors",
    "stashed_token_bytes",
]

FP8_SCRATCH_ELEMENTS = 2**24
"""Most elements of an operand in float32 at a time: 64 MiB, as many small kernels take long."""
LOSS_SCRATCH_ELEMENTS = 2**20
"""Most elements that are widened to float32 at a time, at least one row of logits."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a decoder layer keeps from its forward to its backward."""

    name: str
    width: int
    """Elements per token, summed over the sp ranks."""
    element_bytes: int
    is_kv: bool = False
    """K or V: those of a cut sequence are in the arena instead."""
    is_late: bool = False
    """Made after attention, so gone when attention's backward runs."""

    @property
    def token_bytes(self) -> int:
        return self.width * self.element_bytes


def saved_tensors(setup: Setup) -> tuple[SavedTensor, ...]:
    """What one decoder layer keeps when it is not recomputed.

    With fused kernels: e (7 D + 2 D_kv + 3 F) bytes per token, the paper's M_token / L. Plain
    Hugging Face layers also keep the normalised norm inputs, silu(gate), the statistics of norms
    and attention, and, below four bytes an element, a float32 copy of either norm input (instead
    of the second one itself). Head-sharded tensors are as wide as the padded or replicated heads.
    Without an all-to-all (sp 1) the attention output is o_proj's input; the paper's figure counts
    two tensors, so fused kernels do too.
    """
    model, sp, size = setup.model, setup.layout.sp, setup.execution.dtype_bytes
    hidden, ffn = model.hidden_size, model.ffn_size
    query = sp * local_heads(model, sp) * model.head_dim
    kv = sp * local_kv_heads(model, sp) * model.head_dim
    is_half, is_plain = size < 4, not setup.execution.fused_kernels
    tensors = [
        SavedTensor("layer input", hidden, size),
        SavedTensor("norm1 output", hidden, size),
        SavedTensor("query", query, size),
        SavedTensor("key", kv, size, is_kv=True),
        SavedTensor("value", kv, size, is_kv=True),
        SavedTensor("attention output", query, size),
        SavedTensor("o_proj input", model.query_size, size),
        SavedTensor("norm2 input", hidden, size, is_late=True),
        SavedTensor("norm2 output", hidden, size, is_late=True),
        SavedTensor("gate", ffn, size, is_late=True),
        SavedTensor("up", ffn, size, is_late=True),
        SavedTensor("product", ffn, size, is_late=True),
    ]
    if is_plain:
        unkept = {"o_proj input"} if sp == 1 else set()
        unkept |= {"norm2 input"} if is_half else set()
        tensors = [t for t in tensors if t.name not in unkept]
        tensors += [
            SavedTensor("norm1 normalised", hidden, size),
            SavedTensor("norm2 normalised", hidden, size, is_late=True),
            SavedTensor("silu(gate)", ffn, size, is_late=True),
            SavedTensor("norm statistics", 2, 4),
            SavedTensor("log-sum-exp", sp * local_heads(model, sp), 4),
        ]
    if is_plain and is_half:
        tensors += [
            SavedTensor("norm1 input in float32", hidden, 4),
            SavedTensor("norm2 input in float32", hidden, 4, is_late=True),
        ]
    return tuple(tensors) + _head_norm_tensors(setup)


def _head_norm_tensors(setup: Setup) -> tuple[SavedTensor, ...]:
    """Norms of every query and key head (Qwen3), which run before the all-to-all."""
    model, size = setup.model, setup.execution.dtype_bytes
    if not model.has_head_norms:
        return ()
    width = model.query_size + model.kv_size
    if setup.execution.fused_kernels:
        return (SavedTensor("head norm inputs", width, size),)
    return (
        SavedTensor("head norm inputs", width, max(4, size)),
        SavedTensor("head norm normalised", width, size),
        SavedTensor("head norm statistics", model.num_heads + model.num_kv_heads, 4),
    )


def stashed_token_bytes(setup: Setup) -> int:
    """What a layer keeps per token between the two halves of a backward, summed over the sp ranks.

    Inputs of the seven projections: both norms' outputs, the attention output, the product. Their
    output gradients: query, key, value, gate, up, and twice the hidden size, as the gradient of a
    sum is that of both of its parts. Key and value are as wide as the projections, not replicated.
    """
    model = setup.model
    hidden, ffn, query = model.hidden_size, model.ffn_size, model.query_size
    inputs = 2 * hidden + query + ffn
    gradients = query + 2 * model.kv_size + 2 * ffn + 2 * hidden
    return setup.execution.dtype_bytes * (inputs + gradients)


def fp8_product_bytes(rows: int, columns: int, inner: int, dtype_bytes: int) -> int:
    """Of a product [rows, inner] x [inner, columns]: rounded operands, scratch, the result."""
    most = max(1, FP8_SCRATCH_ELEMENTS // inner)
    first, second = (4 * inner * min(most, count) for count in (rows, columns))
    result = dtype_bytes * rows * columns
    return rows * inner + max(first, columns * inner + max(second, result))


def fp8_forward_bytes(setup: Setup, tokens: int) -> int:
    """Of the down projection, when all that the layer keeps is there but for its output.

    Plain layers keep a wider copy of the residual, which is there as well.
    """
    hidden, size = setup.model.hidden_size, setup.execution.dtype_bytes
    product = fp8_product_bytes(tokens, hidden, setup.model.ffn_size, size)
    return product + (0 if setup.execution.fused_kernels else size * tokens * hidden)


def fp8_ungraphed_bytes(setup: Setup, tokens: int) -> int:
    """Most beside the input of a layer without a graph: in its up or its down projection.

    Residual, norm output and activated gate at the former; residual and product at the latter.
    """
    hidden, ffn = setup.model.hidden_size, setup.model.ffn_size
    size = setup.execution.dtype_bytes
    up = size * tokens * (2 * hidden + ffn) + fp8_product_bytes(tokens, ffn, hidden, size)
    down = fp8_product_bytes(tokens, hidden, ffn, size)
    return max(up, size * tokens * (hidden + ffn) + down)


def fp8_input_gradient_bytes(setup: Setup, tokens: int) -> tuple[int, int]:
    """Of the input gradients in the MLP on top of what the layer keeps: down's, then up's.

    At the latter those of gate and up are there, in place of what these were, and the product is
    gone.
    """
    hidden, ffn = setup.model.hidden_size, setup.model.ffn_size
    size = setup.execution.dtype_bytes
    down = fp8_product_bytes(tokens, ffn, hidden, size)
    return down, fp8_product_bytes(tokens, hidden, ffn, size) - size * tokens * ffn


def logits_bytes(setup: Setup, block_tokens: int) -> int:
    """What a block of logits takes: itself, and below four bytes an element the float32 scratch."""
    model, size = setup.model, setup.execution.dtype_bytes
    logits = block_tokens * model.vocab_size
    if size >= 4:
        return logits * size
    scratch = min(logits, max(LOSS_SCRATCH_ELEMENTS, model.vocab_size))
    return logits * size + 4 * (scratch + block_tokens * model.hidden_size)


def head_bytes(setup: Setup, tokens: int) -> int:
    """The head at work on the tokens of a rank.

    The logits of one block, the final norm's tensors, and the weight's gradient in float32, which
    is not the one that the states count.
    """
    model, execution, size = setup.model, setup.execution, setup.execution.dtype_bytes
    is_half = size < 4
    logits = logits_bytes(setup, min(execution.loss_block_tokens, tokens))
    weight = model.embedding_params * max(4, size)
    norm = 3 * size * model.hidden_size + (4 * model.hidden_size if is_half else 0)
    # the plain norm's backward is in float32: its input's copy and five gradients
    norm_backward = 24 * model.hidden_size if is_half and not execution.fused_kernels else 0
    return max(logits + tokens * norm, tokens * norm_backward) + weight
