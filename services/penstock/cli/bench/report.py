"""Results of a load, as figures and as tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.markup import escape
from rich.table import Table

from penstock.cli.bench.config import BenchConfig
from penstock.cli.bench.load_loop import Run
from penstock.cli.bench.target import Sample

SHARES = (0.5, 0.9, 0.95, 0.99)
TITLES = {
    "ttft": "time to first token",
    "itl": "between deltas",
    "tpot": "a token after the first",
    "total": "whole request",
}


def percentile(ordered: list[float], share: float) -> float:
    """Return the smallest value with at least `share` of all values at or below it; `ordered` is sorted, not empty."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Return mean, percentiles and maximum in milliseconds; None when there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    shares = {f"p{share * 100:g}": percentile(ordered, share) for share in SHARES}
    found = {"mean": math.fsum(ordered) / len(ordered), **shares, "max": ordered[-1]}
    return {name: round(value * 1e3, 3) for name, value in found.items()}


def meets(sample: Sample, config: BenchConfig) -> bool:
    """True when a request ended well and within every objective that is set."""
    if sample.failure:
        return False
    measured = (
        (sample.ttft, config.slo_ttft_seconds),
        (sample.tpot, config.slo_tpot_seconds),
        (sample.total, config.slo_total_seconds),
    )
    return all(value is None or bound is None or value <= bound for value, bound in measured)


def has_objectives(config: BenchConfig) -> bool:
    """True when any objective is set, so that goodput may differ from throughput."""
    return any(
        bound is not None for bound in (config.slo_ttft_seconds, config.slo_tpot_seconds, config.slo_total_seconds)
    )


def summary(run: Run, config: BenchConfig) -> dict[str, Any]:
    """Return all figures. Rates are over the time from the first request to the end of the last."""
    good = [sample for sample in run.samples if not sample.failure]
    within = [sample for sample in good if meets(sample, config)]
    seconds = max(run.ended - run.started, 1e-9)
    result: dict[str, Any] = {
        **({} if config.rate is None else {"rate": config.rate}),
        "seconds": round(seconds, 3),
        "requests": len(run.samples),
        "succeeded": len(good),
        "failures": dict(Counter(sample.failure for sample in run.samples if sample.failure).most_common()),
        # The first failure of each kind.
        "failure_messages": {one.failure: one.message for one in reversed(run.samples) if one.failure and one.message},
        "requests_per_second": round(len(good) / seconds, 3),
        "prompt_tokens_per_second": round(sum(sample.prompt_tokens for sample in good) / seconds, 1),
        "output_tokens": sum(sample.output_tokens for sample in good),
        "output_tokens_per_second": round(sum(sample.output_tokens for sample in good) / seconds, 1),
        "milliseconds": {
            "ttft": distribution(sample.ttft for sample in good),
            "itl": distribution(gap for sample in good for gap in sample.gaps),
            "tpot": distribution(sample.tpot for sample in good if sample.tpot is not None),
            "total": distribution(sample.total for sample in good),
        },
    }
    if has_objectives(config):
        result["goodput"] = {
            "requests_per_second": round(len(within) / seconds, 3),
            "output_tokens_per_second": round(sum(sample.output_tokens for sample in within) / seconds, 1),
            "share": round(len(within) / len(run.samples), 4) if run.samples else 0.0,
        }
    return result


def share_served(result: dict[str, Any]) -> float:
    """Return the share of a run's requests that ended well and, where objectives are set, within them."""
    if "goodput" in result:
        return float(result["goodput"]["share"])
    return result["succeeded"] / result["requests"] if result["requests"] else 0.0


def greatest_rate_served(runs: list[dict[str, Any]], share: float) -> float | None:
    """Return the greatest rate that, like all smaller ones, served `share` of the requests; None without one."""
    found = None
    for run in sorted(runs, key=lambda run: float(run["rate"])):
        if share_served(run) < share:
            break
        found = float(run["rate"])
    return found


def sweep_tables(result: dict[str, Any], share: float) -> list[Table]:
    """Make tables of the runs of several rates for people."""
    served = Table("rate", "served", "goodput/s", "tok/s", "first token p50", "p99", "a token p50", "p99", "failed")
    for run in result["runs"]:
        times = run["milliseconds"]
        served.add_row(
            f"{run['rate']:g}",
            f"{share_served(run):.1%}",
            f"{run.get('goodput', run)['requests_per_second']:g}",
            f"{run['output_tokens_per_second']:g}",
            *(_time(times[name], at) for name in ("ttft", "tpot") for at in ("p50", "p99")),
            escape(", ".join(f"{count} × {status}" for status, count in run["failures"].items())),
        )
    rate = result["greatest_rate_served"]
    verdict = Table("", "", show_header=False)
    verdict.add_row(f"greatest rate with {share:.4g} served", "none" if rate is None else f"{rate:g} requests/s")
    return [served, verdict]


def _time(found: dict[str, float] | None, at: str) -> str:
    return "" if found is None else f"{found[at]:.1f} ms"


def tables(result: dict[str, Any]) -> list[Table]:
    """Make tables for people."""
    overview = Table("", "", show_header=False)
    overview.add_row("requests", f"{result['succeeded']} of {result['requests']} in {result['seconds']:.1f} s")
    overview.add_row("throughput", _rates(result) + f", prompts {result['prompt_tokens_per_second']:g} tok/s")
    if "goodput" in result:
        goodput = result["goodput"]
        overview.add_row("goodput", f"{_rates(goodput)}, {goodput['share']:.1%} of the requests")
    for status, count in result["failures"].items():
        message = result["failure_messages"].get(status)
        overview.add_row("failed", escape(f"{count} × {status}" + (f": {message}" if message else "")))
    times = Table("ms", "mean", *(f"p{share * 100:g}" for share in SHARES), "max")
    for name, title in TITLES.items():
        found = result["milliseconds"][name]
        if found is not None:
            times.add_row(title, *(f"{value:.1f}" for value in found.values()))
    return [overview, times] if times.row_count else [overview]


def _rates(result: dict[str, Any]) -> str:
    return f"{result['requests_per_second']:g} requests/s, {result['output_tokens_per_second']:g} tok/s"
