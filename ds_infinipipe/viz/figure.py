"""Matplotlib figures without its global state; matplotlib is loaded when one is drawn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_infinipipe.errors import ConfigError

__all__ = ["new_figure", "require_matplotlib", "save_figure"]

_DPI = 100


def require_matplotlib(option: str) -> None:
    """ConfigError where the option's picture could not be drawn: found before the work."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option}: PNG pictures need matplotlib: pip install 'ds-infinipipe[viz]'"
        )


def new_figure(width_px: int, height_px: int) -> Any:
    """An empty matplotlib Figure of that size; ConfigError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "PNG pictures need matplotlib: pip install 'ds-infinipipe[viz]', "
            "or write an .html file, which needs nothing"
        ) from error
    figure = Figure(figsize=(width_px / _DPI, height_px / _DPI), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path | str) -> None:
    """Write the figure as PNG; ConfigError where the file cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=_DPI)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
