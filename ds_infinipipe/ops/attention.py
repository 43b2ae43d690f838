"""Causal attention over packed segments whose keys may be longer than their queries.

A segment's last query sees all of its keys (bottom-right alignment): with more keys than queries,
the first keys are the context left by earlier slices of the sequence. With a sliding window of w a
query sees at most w keys: its own and the w - 1 before it.

Shapes: T query tokens, S key tokens, H heads, K key/value heads (H is a multiple of K), D head
dimension.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_infinipipe.errors import ConfigError, ScheduleError
from ds_infinipipe.ops.cpu_flash import cpu_flash_attention

__all__ = ["Segments", "check_alignment", "resolve_attention", "varlen_attention"]

# of what is not torch's core, its function
_KERNELS = {
    "flash_attn": ("flash_attn", "flash_attn_varlen_func"),
    "torch_varlen": ("torch.nn.attention.varlen", "varlen_attn"),
}
logger = logging.getLogger(__name__)

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Segments:
    """Where segments begin and end: segment i has queries [cu_q[i], cu_q[i + 1]), keys alike.

    The int32 tensors that kernels want are made once per device. Raises ScheduleError when the
    boundaries do not describe segments, or when a segment has fewer keys than queries.
    """

    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]
    _tensors: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if len(self.cu_q) != len(self.cu_k) or self.cu_q[:1] != (0,) or self.cu_k[:1] != (0,):
            raise ScheduleError(f"queries {self.cu_q} and keys {self.cu_k} are not segments")
        for i, (num_q, num_k) in enumerate(zip(self._lengths_q, self._lengths_k, strict=True)):
            if not 0 < num_q <= num_k:
                raise ScheduleError(
                    f"segment {i} has {num_q} queries and {num_k} keys; every query needs its key, "
                    "and no segment may be empty"
                )

    @cached_property
    def _lengths_q(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in itertools.pairwise(self.cu_q))

    @cached_property
    def _lengths_k(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in itertools.pairwise(self.cu_k))

    @property
    def max_q(self) -> int:
        return max(self._lengths_q)

    @property
    def max_k(self) -> int:
        return max(self._lengths_k)

    @property
    def num_q(self) -> int:
        """Query tokens of all segments."""
        return self.cu_q[-1]

    @property
    def num_k(self) -> int:
        """Key tokens of all segments."""
        return self.cu_k[-1]

    def ranges(self) -> tuple[tuple[slice, slice], ...]:
        """(query range, key range) of each segment."""
        return tuple(
            (slice(*q), slice(*k))
            for q, k in zip(
                itertools.pairwise(self.cu_q), itertools.pairwise(self.cu_k), strict=True
            )
        )

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`cu_q` and `cu_k` as int32 tensors on `device`."""
        if device not in self._tensors:
            self._tensors[device] = (
                torch.tensor(self.cu_q, dtype=torch.int32, device=device),
                torch.tensor(self.cu_k, dtype=torch.int32, device=device),
            )
        return self._tensors[device]


Attention = Callable[[Tensor, Tensor, Tensor, Segments, float, int | None], Tensor]


def varlen_attention(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    segments: Segments,
    scale: float,
    *,
    impl: str = "auto",
    window: int | None = None,
) -> Tensor:
    """Attention of each segment's queries to its own keys; returns [T, H, D].

    `impl` is "auto" or one of IMPLEMENTATIONS, `window` the most keys a query sees (None: all up to
    its own). Raises ConfigError when the implementation cannot run for this device and dtype,
    ScheduleError when the tensors are not as long as the segments.
    """
    if q_THD.shape[0] != segments.num_q or k_SKD.shape[0] != segments.num_k:
        raise ScheduleError(
            f"attention got {q_THD.shape[0]} queries and {k_SKD.shape[0]} keys for segments of "
            f"{segments.num_q} and {segments.num_k}"
        )
    name = resolve_attention(impl, q_THD.device, q_THD.dtype)
    if window is not None and window >= segments.max_k:
        window = None
    return IMPLEMENTATIONS[name](q_THD, k_SKD, v_SKD, segments, scale, window)


def resolve_attention(impl: str, device: torch.device, dtype: torch.dtype) -> str:
    """The implementation that runs for `impl` here; "auto" takes the first that can.

    Raises ConfigError for an unknown name and for one that cannot run.
    """
    return _resolve(impl, device.type, dtype)


@cache
def _resolve(impl: str, device_type: str, dtype: torch.dtype) -> str:
    if impl == "auto":
        obstacles = {n: _obstacle(n, device_type, dtype) for n in _LADDER}
        name = next(n for n, obstacle in obstacles.items() if obstacle is None)
        logger.info("attention on %s in %s: %s", device_type, dtype, name)
        for better, obstacle in itertools.takewhile(lambda o: o[0] != name, obstacles.items()):
            # on a GPU it may be what the user meant to have
            level = logging.INFO if device_type == "cuda" else logging.DEBUG
            logger.log(level, "attention by %s is left out: %s", better, obstacle)
        return name
    if impl not in IMPLEMENTATIONS:
        raise ConfigError(
            f"attention implementation {impl!r} is not known: use auto or one of "
            f"{', '.join(IMPLEMENTATIONS)}"
        )
    obstacle = _obstacle(impl, device_type, dtype)
    if obstacle is not None:
        raise ConfigError(
            f"attention implementation {impl!r} cannot run on {device_type} in {dtype}: "
            f"{obstacle}; use auto"
        )
    logger.debug("attention on %s in %s: %s (asked for)", device_type, dtype, impl)
    return impl


def _obstacle(name: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Why an implementation cannot run, or None."""
    if name in ("flash_attn", "torch_varlen"):
        if device_type != "cuda" or dtype not in _HALF:
            return "it needs a CUDA device and float16 or bfloat16"
        return _missing(*_KERNELS[name])
    if name == "cpu_flash" and device_type != "cpu":
        return "it needs tensors on the CPU"
    return None


@cache
def _missing(module: str, function: str) -> str | None:
    """Why a module's function cannot be had, or None.

    Built for another torch a package is there and cannot be imported; of another version it has
    other names.
    """
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    try:
        found = hasattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the package raises while it loads its libraries
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"{module} is installed but cannot be imported ({reason})"
    return None if found else f"{module} is installed but has no {function}"


def check_alignment(
    device: torch.device, dtype: torch.dtype, impl: str = "auto", *, windowed: bool = False
) -> None:
    """Make sure that two queries over three keys see two and three keys; call it at start-up.

    A kernel with top-left alignment would let them see one and two. If `windowed`, a window of two
    keys is tried as well. Raises ConfigError.
    """
    q = torch.zeros(2, 1, 16, device=device, dtype=dtype)
    k = torch.zeros(3, 1, 16, device=device, dtype=dtype)
    v = torch.tensor([3.0, 9.0, 6.0], device=device, dtype=dtype)[:, None, None].expand_as(k)
    segments = Segments((0, 2), (0, 3))
    for window, want in ((None, [6.0, 6.0]), (2, [6.0, 7.5]))[: 1 + windowed]:
        out = varlen_attention(q, k, v.contiguous(), segments, 1.0, impl=impl, window=window)
        got = out[:, 0, 0].tolist()
        if max(abs(a - b) for a, b in zip(got, want, strict=True)) > 0.1:
            fault = "aligns the mask with the first key" if window is None else "has another window"
            raise ConfigError(
                f"attention {resolve_attention(impl, device, dtype)!r} on {device} gives {got} "
                f"where bottom-right causal attention gives {want}: it {fault}; choose another "
                "implementation"
            )


def _flash_attn(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None = None
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    cu_q, cu_k = segments.on(q.device)
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": True,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if window is not None:
        options["window_size"] = (window - 1, 0)
    out: Tensor = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, segments.max_q, segments.max_k, **options
    )
    return out


def _torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None = None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_q, cu_k = segments.on(q.device)
    left = -1 if window is None else window - 1
    options: dict[str, Any] = {"scale": scale, "window_size": (left, 0)}
    # torch 2.13 refuses K < H without this flag, 2.11 does not know it and takes K < H as it is
    if q.shape[1] != k.shape[1] and _varlen_knows_gqa():
        options["enable_gqa"] = True
    out = varlen_attn(q, k, v, cu_q, cu_k, segments.max_q, segments.max_k, **options)
    assert isinstance(out, Tensor)  # a pair only when log-sum-exps are asked for
    return out


@cache
def _varlen_knows_gqa() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None = None
) -> Tensor:
    """Segment by segment; with context or a window it builds a mask of its queries x keys."""
    outs = []
    for rq, rk in segments.ranges():
        num_keys = _length(rk)
        needs_mask = _length(rq) < num_keys or (window is not None and window < num_keys)
        out = F.scaled_dot_product_attention(
            q[rq].transpose(0, 1)[None],
            k[rk].transpose(0, 1)[None],
            v[rk].transpose(0, 1)[None],
            attn_mask=_visible(rq, rk, q.device, window) if needs_mask else None,
            is_causal=not needs_mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def _naive(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None = None
) -> Tensor:
    """The definition, with all scores in memory: the oracle of the tests."""
    groups = q.shape[1] // k.shape[1]
    outs = []
    for rq, rk in segments.ranges():
        keys, values = (t[rk].repeat_interleave(groups, dim=1) for t in (k, v))
        scores = torch.einsum("thd,shd->hts", q[rq], keys) * scale
        scores = scores.masked_fill(~_visible(rq, rk, q.device, window), float("-inf"))
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        weights = scores.to(exact).softmax(dim=-1).to(q.dtype)
        outs.append(torch.einsum("hts,shd->thd", weights, values))
    return torch.cat(outs)


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _visible(
    rows_q: slice, rows_k: slice, device: torch.device, window: int | None = None
) -> Tensor:
    """Which keys (columns) each query (row) of a segment sees."""
    num_q, num_k = _length(rows_q), _length(rows_k)
    seen = torch.ones(num_q, num_k, dtype=torch.bool, device=device).tril(num_k - num_q)
    return seen if window is None else seen.triu(num_k - num_q - window + 1)


def _cpu_flash(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None = None
) -> Tensor:
    return cpu_flash_attention(q, k, v, segments.ranges(), scale, window)


IMPLEMENTATIONS: Mapping[str, Attention] = {
    "flash_attn": _flash_attn,
    "torch_varlen": _torch_varlen,
    "sdpa": _sdpa,
    "cpu_flash": _cpu_flash,
    "naive": _naive,
}
_LADDER = ("flash_attn", "torch_varlen", "cpu_flash", "sdpa")
