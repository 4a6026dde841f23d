"""Curves of the routers' choice in simulation: time over the number of backends, what is found over that of routers.

    python -m benchmarks router_curves [--plot docs/plots/router-curves.svg] [--backends 1,8,16,32,100,300,1000]

Runs the simulation of many_routers for one router before each number of backends, and for each number of routers before
eight, below the backends' capacity (0.8) and above it (1.3), with and without reports of cached prefixes; and once more
below it with `--adapters`, half of which are nowhere at first. Counts and simulated seconds are the same in every run;
the time of a choice is processor time. --plot draws them, by matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks._arguments import at_least, numbers
from benchmarks._panels import Panels, check_plot
from benchmarks._report import Report
from benchmarks.many_routers import PLACES, Simulation

# Routers share as many backends as in dev/log/router-scale.md.
SHARED_BACKENDS = 8
BELOW, ABOVE = 0.8, 1.3
HEADER = (
    "backends",
    "routers",
    "load",
    "told",
    "found_share",
    "wait_mean_s",
    "busiest_to_mean",
    "light_wait_s",
    "choice_us",
    "adapters",
    "loads",
    "needless_loads",
    "load_wait_s",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--backends", type=numbers, default=[1, 8, 16, 32, 100, 300, 1000])
    parser.add_argument("--routers", type=numbers, default=[1, 2, 4, 8, 20])
    parser.add_argument("--requests", type=at_least(100), default=4000, help="of each run with several routers")
    parser.add_argument(
        "--rounds", type=at_least(1), default=3, help="runs of each number of backends: the least time counts"
    )
    parser.add_argument("--prefixes", type=at_least(1), default=300)
    parser.add_argument("--adapters", type=at_least(1), default=100, help="of the runs with some")
    parser.add_argument("--plot", type=Path, help="file for the picture, .svg or .png")


def measure(
    options: argparse.Namespace, *, backends: int, routers: int, load: float, told: bool, adapters: int = 0
) -> dict[str, Any]:
    """Run one simulation; return its row."""
    # Each place of a crowd is taken once, so that loads differ as they do under way.
    requests = max(options.requests, PLACES * backends)
    settings = argparse.Namespace(
        backends=backends, load=load, requests=requests, prefixes=options.prefixes, adapters=adapters
    )
    return {"backends": backends, "load": load, "adapters": adapters, **Simulation(routers, settings, told=told).run()}


def of_backends(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of backends before one router, with the least time of a choice of all rounds."""
    rows = []
    for count in options.backends:
        rounds = [measure(options, backends=count, routers=1, load=BELOW, told=True) for _ in range(options.rounds)]
        rows.append(min(rounds, key=lambda row: float(row["choice_us"])))
    return rows


def of_routers(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of routers, load, and whether backends tell."""
    return [
        measure(options, backends=SHARED_BACKENDS, routers=routers, load=load, told=told)
        for load in (BELOW, ABOVE)
        for told in (False, True)
        for routers in options.routers
    ]


def of_adapters(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of routers, with adapters."""
    return [
        measure(options, backends=SHARED_BACKENDS, routers=routers, load=BELOW, told=True, adapters=options.adapters)
        for routers in options.routers
    ]


def draw(scale: list[dict[str, Any]], crowd: list[dict[str, Any]], adapted: list[dict[str, Any]], path: Path) -> None:
    """Draw the five panels: choice and found over backends, found, wait and loads of adapters over routers."""
    panels = Panels("router_curves", 5)
    choice, lone, found, wait, loads = panels.axes
    counts = [row["backends"] for row in scale]
    choice.plot(counts, [row["choice_us"] for row in scale], "o-")
    choice.set(xscale="log", title="time of a choice", xlabel="backends, one router", ylabel="µs of processor time")
    choice.set_ylim(bottom=0)
    lone.plot(counts, [row["found_share"] for row in scale], "o-")
    lone.set(xscale="log", title="cached blocks found", xlabel="backends, one router", ylabel="share", ylim=(0, 1))
    for load, colour in ((BELOW, "tab:blue"), (ABOVE, "tab:orange")):
        for told, line in ((True, "o-"), (False, "s--")):
            rows = [row for row in crowd if row["load"] == load and row["told"] == told]
            label = f"load {load}, {'told by backends' if told else 'what it sent alone'}"
            routers = [row["routers"] for row in rows]
            found.plot(routers, [row["found_share"] for row in rows], line, color=colour, label=label)
            wait.plot(routers, [row["light_wait_s"] for row in rows], line, color=colour, label=label)
    found.set(title="cached blocks found", xlabel=f"routers, {SHARED_BACKENDS} backends", ylabel="share", ylim=(0, 1))
    wait.set(title="a light tenant's wait", xlabel=f"routers, {SHARED_BACKENDS} backends", ylabel="s")
    wait.set_ylim(bottom=0)
    found.legend(fontsize=7, loc="lower left")
    routers = [row["routers"] for row in adapted]
    loads.plot(routers, [row["loads"] for row in adapted], "o-", label="all")
    loads.plot(routers, [row["loads"] - row["needless_loads"] for row in adapted], "s--", label="needed")
    loads.set(title="loads of adapters", xlabel=f"routers, {SHARED_BACKENDS} backends", ylabel="loads")
    loads.set_ylim(bottom=0)
    loads.legend(fontsize=7, loc="lower right")
    panels.save(path)


def main(options: argparse.Namespace, report: Report) -> None:
    """Run it."""
    check_plot(options.plot)
    scale, crowd, adapted = of_backends(options), of_routers(options), of_adapters(options)
    table = report.table(HEADER)
    for row in (*scale, *crowd, *adapted):
        table.row(*(row[name] for name in HEADER))
    if options.plot is not None:
        draw(scale, crowd, adapted, options.plot)
    report.save({"settings": report.settings, "backends": scale, "routers": crowd, "adapters": adapted})
