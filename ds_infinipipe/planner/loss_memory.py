"""Bytes that the loss needs while it runs, told to the planner without loading torch.

Both backends of `ops.cross_entropy` overwrite a block's logits with their gradient, so a logit
costs one element of the model's dtype. Below four bytes an element, torch's backend widens a few
rows at a time, the Triton kernel none; the weight's gradient on a CPU is summed from such rows too.
"""

from __future__ import annotations

from ds_infinipipe.planner.specs import ModelSpec

__all__ = ["SCRATCH_ELEMENTS", "logits_bytes"]

SCRATCH_ELEMENTS = 2**20
"""Most elements that are widened to float32 at a time, at least one row of logits."""


def logits_bytes(model: ModelSpec, block_tokens: int) -> int:
    """What a block of logits takes: itself, and below four bytes an element the float32 scratch."""
    logits = block_tokens * model.vocab_size
    if model.dtype_bytes >= 4:
        return logits * model.dtype_bytes
    scratch = min(logits, max(SCRATCH_ELEMENTS, model.vocab_size))
    return logits * model.dtype_bytes + 4 * (scratch + block_tokens * model.hidden_size)
