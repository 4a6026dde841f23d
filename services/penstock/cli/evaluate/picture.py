"""Picture of the formats' error: how large it is, and what it costs in memory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.common.errors import StartupError

ENDINGS = (".png", ".svg", ".pdf")


def check_picture(path: str) -> None:
    """Check before anything is read that a picture can be drawn to `path`. Raises StartupError."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise StartupError(f"--plot {path}: expected a name ending in {', '.join(ENDINGS)}", flag="--plot")
    if find_spec("matplotlib") is None:
        raise StartupError("--plot needs matplotlib: pip install 'penstock[plot]'", flag="--plot")


def draw_errors(rows: list[dict[str, Any]], title: str, path: str) -> None:
    """Draw the rows of a report into a file. Raises StartupError when it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(title)
    error, agreement, memory = figure.subplots(1, 3)
    names = [row["format"] for row in rows]
    error.barh(names, [row["mean"] for row in rows], color="tab:blue")
    error.set(xlabel="mean |difference of a log-probability|", title="error", xlim=(0, None))
    agreement.barh(names, [row["agreement"] for row in rows], color="tab:green")
    agreement.set(xlabel="share of places", title="same likeliest token", xlim=(0, 1))
    for axes in (error, agreement):
        axes.invert_yaxis()
    sized = [row for row in rows if row.get("weight_bytes")]
    memory.plot([row["weight_bytes"] / 2**20 for row in sized], [row["mean"] for row in sized], "o")
    for row in sized:
        memory.annotate(row["format"], (row["weight_bytes"] / 2**20, row["mean"]), fontsize=8)
    memory.set(xlabel="weights, MiB", ylabel="error", title="error and memory", xlim=(0, None), ylim=(0, None))
    try:
        figure.savefig(Path(path).expanduser())
    except OSError as failure:
        raise StartupError(f"--plot {path}: {failure.strerror}", flag="--plot") from failure
