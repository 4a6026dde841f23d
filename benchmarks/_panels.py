"""Pictures of benchmarks by matplotlib: panels side by side, the same file for the same figures."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks._arguments import refuse

_PANEL_WIDTH, _HEIGHT = 3.25, 3.6


def check_plot(path: Path | None) -> None:
    """End the program where `--plot` cannot be written."""
    if path is not None and (path.suffix not in (".svg", ".png") or find_spec("matplotlib") is None):
        refuse(f"--plot {path}: needs a name ending in .svg or .png, and matplotlib (the extra plot)")


class Panels:
    """A row of panels."""

    def __init__(self, name: str, count: int) -> None:
        """Make `count` empty ones. `name`: that of the benchmark."""
        import matplotlib as mpl
        from matplotlib.figure import Figure

        mpl.rcParams["svg.hashsalt"] = name.replace("_", "-")
        self._figure = Figure(figsize=(_PANEL_WIDTH * count, _HEIGHT), layout="constrained")
        self.axes: list[Any] = list(self._figure.subplots(1, count))

    def save(self, path: Path) -> None:
        """Write the picture."""
        self._figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
