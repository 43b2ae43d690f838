"""What all checks share: the device, sizes, timing, and a row of the final table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

__all__ = ["Budget", "Row", "Sizes", "make_sizes", "seconds", "table"]


@dataclass(frozen=True)
class Row:
    """One figure. `is_met` is None where no target is set or none could be judged."""

    check: str
    name: str
    value: float | None
    unit: str
    target: str = ""
    is_met: bool | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Sizes:
    """How big the checks are: real on a GPU, a few kilobytes in a dry run on a CPU."""

    is_dry: bool
    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int, int]
    """Query heads, key/value heads, head dimension of the attention check."""
    attention_grid: tuple[tuple[int, int], ...]
    """(new tokens, context) pairs."""
    loss_rows: int
    vocab_sizes: tuple[int, ...]
    model: dict[str, Any] = field(default_factory=dict)
    layer_model: dict[str, Any] = field(default_factory=dict)
    slice_tokens: int = 8192
    train_tokens: tuple[int, ...] = ()
    longest_tokens: int = 0
    peak_flops: float = 1e12
    repeats: int = 5


class Budget:
    """Wall-clock seconds for all checks together; a check that would start late is left out."""

    def __init__(self, seconds_in_all: float) -> None:
        self._ends = time.monotonic() + seconds_in_all

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()


def make_sizes(is_dry: bool, peak_flops: float | None) -> Sizes:
    """Raises SystemExit without a CUDA device, unless it is a dry run."""
    if is_dry:
        return Sizes(
            is_dry=True,
            device=torch.device("cpu"),
            dtype=torch.float32,
            heads=(4, 2, 16),
            attention_grid=((16, 0), (16, 48), (33, 31)),
            loss_rows=65,
            vocab_sizes=(515,),
            model=_model(64, 2, 160, 4, 2, 512),
            layer_model=_model(64, 1, 160, 4, 2, 512),
            slice_tokens=64,
            train_tokens=(64, 200),
            longest_tokens=256,
            peak_flops=peak_flops or 1e11,
            repeats=2,
        )
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device; run with --dry-run to try the script on a CPU")
    return Sizes(
        is_dry=False,
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        heads=(32, 8, 128),
        attention_grid=(
            (2048, 0),
            (8192, 0),
            (8192, 8192),
            (8192, 57344),
            (16384, 0),
            (16384, 114688),
        ),
        loss_rows=4096,
        vocab_sizes=(32000, 128256, 256000),
        model=_model(2048, 24, 5632, 16, 8, 32000),
        layer_model=_model(4096, 1, 14336, 32, 8, 32000),
        slice_tokens=8192,
        train_tokens=(8192, 32768, 98304),
        longest_tokens=262144,
        peak_flops=peak_flops or _peak_flops(torch.cuda.get_device_name(0)),
        repeats=7,
    )


def seconds(function: Callable[[], Any], sizes: Sizes, repeats: int | None = None) -> float:
    """Median seconds of a call after one to warm up, by the device's own clock."""
    function()
    times = []
    for _ in range(repeats or sizes.repeats):
        if sizes.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def table(rows: list[Row]) -> str:
    """The rows as aligned text; targets missed stand out."""
    marks = {True: "ok", False: "MISSED", None: ""}
    cells = [("check", "what", "value", "target", "", "note")]
    cells += [
        (
            row.check,
            row.name,
            "-" if row.value is None else f"{row.value:.4g} {row.unit}",
            row.target,
            marks[row.is_met],
            row.note,
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(5)]
    return "\n".join(
        "  ".join([*(line[i].ljust(widths[i]) for i in range(5)), line[5]]).rstrip()
        for line in cells
    )


def _model(
    hidden: int, layers: int, ffn: int, heads: int, kv_heads: int, vocab: int
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    }


def _peak_flops(device_name: str) -> float:
    """Dense bf16 peak of the device, for utilisation; unknown ones count as an A100."""
    known = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12}
    return next((peak for name, peak in known.items() if name in device_name), 312e12)
