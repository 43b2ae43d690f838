"""Peak memory of attention's forward and backward on a CPU over the length of the context.

OMP_NUM_THREADS=1 python benchmarks/attention_memory.py

Each row runs in a process of its own: `tensors` is what a counting allocator sees on top of the
inputs, `resident` how far the process's resident set grew, buffers inside kernels included.
"""

from __future__ import annotations

import json
import resource
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from ds_infinipipe.ops.attention import Segments, varlen_attention
from ds_infinipipe.runtime.stage.meter import MemoryMeter

RESULT = Path(__file__).parent / "results" / "attention_memory.json"
NEW_TOKENS, HEADS, KV_HEADS, HEAD_DIM = 1024, 4, 2, 64
CONTEXTS = (8192, 16384, 32768)
WINDOW = 4096


@dataclass(frozen=True)
class Row:
    """Bytes on top of Q, K, V of one slice behind `context_tokens`; `window` None is full."""

    impl: str
    context_tokens: int
    window: int | None
    input_bytes: int
    tensor_bytes: int
    resident_bytes: int


def measure(impl: str, context: int, window: int | None) -> Row:
    """One forward and backward in float32; run it in a fresh process."""
    torch.manual_seed(0)
    num_keys = context + NEW_TOKENS
    shapes = ((NEW_TOKENS, HEADS), (num_keys, KV_HEADS), (num_keys, KV_HEADS))
    q, k, v = (torch.randn(*shape, HEAD_DIM, requires_grad=True) for shape in shapes)
    gradient = torch.randn_like(q)
    _attend(impl, [t[:8].detach().requires_grad_() for t in (q, k, v)], gradient[:8], None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with MemoryMeter() as meter:
        _attend(impl, [q, k, v], gradient, window)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    inputs = sum(t.nbytes for t in (q, k, v))
    return Row(impl, context, window, inputs, meter.use.dynamic_bytes, grown * 1024)


def _attend(impl: str, qkv: list[torch.Tensor], gradient: torch.Tensor, window: int | None) -> None:
    segments = Segments((0, len(qkv[0])), (0, len(qkv[1])))
    out = varlen_attention(*qkv, segments, HEAD_DIM**-0.5, impl=impl, window=window)
    out.backward(gradient)


def main() -> None:
    """Print the table and write it."""
    cases = [(impl, c, None) for impl in ("cpu_flash", "sdpa") for c in CONTEXTS]
    cases += [("cpu_flash", c, WINDOW) for c in CONTEXTS]
    rows = []
    print("attention  context  window   inputs MB  tensors MB  resident MB")
    for case in cases:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            row = pool.submit(measure, *case).result()
        rows.append(row)
        sizes = (row.input_bytes, row.tensor_bytes, row.resident_bytes)
        print(
            f"{row.impl:9} {row.context_tokens:8} {row.window or '-':>7} "
            + " ".join(f"{size / 1e6:11.1f}" for size in sizes),
            flush=True,
        )
    setting = {"new_tokens": NEW_TOKENS, "heads": HEADS, "kv_heads": KV_HEADS}
    setting |= {"head_dim": HEAD_DIM, "dtype": "float32", "torch": torch.__version__}
    result = {"setting": setting, "rows": [asdict(row) for row in rows]}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
