"""Bytes that the loss needs while it runs, told to the planner without loading torch.

Both backends of `ops.cross_entropy` overwrite a block's logits with their gradient, so a logit
costs one element of the model's dtype. Below four bytes an element, torch's backend widens a few
rows at a time, the Triton kernel none; the weight's gradient on a CPU is summed from such rows too.
"""

from __future__ import annotations

from ds_infinipipe.planner.specs import ModelSpec

__all__ = ["SCRATCH_ELEMENTS", "head_bytes", "logits_bytes"]

SCRATCH_ELEMENTS = 2**20
"""Most elements that are widened to float32 at a time, at least one row of logits."""


def logits_bytes(model: ModelSpec, block_tokens: int) -> int:
    """What a block of logits takes: itself, and below four bytes an element the float32 scratch."""
    logits = block_tokens * model.vocab_size
    if model.dtype_bytes >= 4:
        return logits * model.dtype_bytes
    scratch = min(logits, max(SCRATCH_ELEMENTS, model.vocab_size))
    return logits * model.dtype_bytes + 4 * (scratch + block_tokens * model.hidden_size)


def head_bytes(model: ModelSpec, tokens: int, block_tokens: int) -> int:
    """The head at work on the tokens of a rank.

    The logits of one block, the final norm's tensors, and the weight's gradient in float32, which
    is not the one that the states count.
    """
    hidden, is_half = model.dtype_bytes * model.hidden_size, model.dtype_bytes < 4
    logits = logits_bytes(model, min(block_tokens, tokens))
    weight = model.embedding_params * max(4, model.dtype_bytes)
    norm = 3 * hidden + (4 * model.hidden_size if is_half else 0)
    # the plain norm's backward is in float32: its input's copy and five gradients
    norm_backward = 24 * model.hidden_size if is_half and not model.fused_kernels else 0
    return max(logits + tokens * norm, tokens * norm_backward) + weight
