"""What a rank of `ranks.run_ranks` does in the place of a program that a launcher starts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["exit_code"]


def exit_code(program: Callable[[], object], stderr: Path) -> int:
    """That of Python with `program` as its main module, which writes to the end of `stderr`."""
    with open(stderr, "a", buffering=1) as stream, contextlib.redirect_stderr(stream):
        try:
            code = program()
        except Exception:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            return 1
    return code if isinstance(code, int) else 0
