"""Curves over the rates of a sweep: times, and served requests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.bench.config import BenchConfig
from penstock.cli.bench.report import TITLES, share_served
from penstock.common.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Check before the load that a plot can be drawn to `path`. Raises StartupError."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise StartupError(f"--plot {path}: expected a name ending in {', '.join(ENDINGS)}", flag="--plot")
    if find_spec("matplotlib") is None:
        raise StartupError("--plot needs matplotlib: pip install 'penstock[plot]'", flag="--plot")


def draw(result: dict[str, Any], config: BenchConfig) -> None:
    """Draw the runs of a sweep into the file of --plot. Raises StartupError when it cannot be written."""
    from matplotlib.figure import Figure

    runs = sorted(result["runs"], key=lambda run: float(run["rate"]))
    figure = Figure(figsize=(13, 4), layout="constrained")
    times_first, times_each, served = figure.subplots(1, 3)
    _times(times_first, runs, "ttft", config.slo_ttft_seconds)
    _times(times_each, runs, "tpot", config.slo_tpot_seconds)
    rates = [run["rate"] for run in runs]
    served.plot(rates, rates, ":", color="grey", label="asked")
    served.plot(rates, [run["requests_per_second"] for run in runs], "o-", label="ended well")
    if "goodput" in runs[0]:
        served.plot(rates, [run["goodput"]["requests_per_second"] for run in runs], "s-", label="within objectives")
    for run in runs:
        served.annotate(f"{share_served(run):.0%}", (run["rate"], run["requests_per_second"]), fontsize=8)
    if result["greatest_rate_served"] is not None:
        served.axvline(result["greatest_rate_served"], color="green", linewidth=0.8, label="greatest rate served")
    served.set(xlabel="requests/s asked", ylabel="requests/s", title="served", ylim=(0, None))
    served.legend()
    try:
        figure.savefig(Path(str(config.plot)).expanduser())
    except OSError as error:
        raise StartupError(f"--plot {config.plot}: {error.strerror}", flag="--plot") from error


def _times(axes: Axes, runs: list[dict[str, Any]], name: str, objective: float | None) -> None:
    for at in ("p50", "p90", "p99"):
        found = [(run["rate"], run["milliseconds"][name][at]) for run in runs if run["milliseconds"][name]]
        axes.plot([rate for rate, _ in found], [value for _, value in found], "o-", label=at)
    if objective is not None:
        axes.axhline(objective * 1e3, color="red", linewidth=0.8, label="objective")
    axes.set(xlabel="requests/s asked", ylabel="ms", title=TITLES[name], ylim=(0, None))
    axes.legend()
