"""Whether Triton's kernels can run; Triton itself is imported when they do, and not before."""

from __future__ import annotations

import importlib.util

__all__ = ["triton_obstacle"]


def triton_obstacle(device_type: str) -> str | None:
    """Why Triton kernels cannot run on such a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'ds-infinipipe[gpu]')"
    import triton

    if device_type != "cuda" and not triton.knobs.runtime.interpret:
        return "it needs a CUDA device"
    return None
