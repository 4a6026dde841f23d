"""Markdown tables and a plot of what benchmarks/workloads.py wrote.

    python -m benchmarks report FILE.json [--plot FILE.png]

The last row of the first table compares Penstock with the best other engine of each column: the median over rounds of
the ratio of the two in the same round, above 1 where Penstock is ahead. Where errors were measured, a table compares at
like error instead: each other engine with the fastest of Penstock's formats with an error of at most LIKE times its
own. `--plot` then draws speeds and bits over the error, too, beside the file that it names.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks._arguments import refuse
from benchmarks._report import Report
from benchmarks.cells import HEADLINES, PROCESSOR_TIMES, Headline
from benchmarks.engines import engine_of

OURS = ("penstock", "penstock-grpc")
# Errors are alike up to this factor.
LIKE = 1.1
Rows = dict[tuple[str, str], dict[str, Any]]


def rows_of(result: dict[str, Any]) -> Rows:
    """Return the rows by (workload, engine)."""
    return {(row["workload"], row["engine"]): row for row in result["rows"]}


def engines_of(result: dict[str, Any]) -> list[str]:
    """Return the engines in the order of their rows."""
    return list(dict.fromkeys(row["engine"] for row in result["rows"]))


def columns_of(result: dict[str, Any], known: tuple[Headline, ...] = HEADLINES) -> list[Headline]:
    """The `known` figures that were measured."""
    measured = {(row["workload"], figure) for row in result["rows"] for figure in row["median"]}
    return [one for one in known if (one.workload, one.figure) in measured]


def is_ours(label: str) -> bool:
    """True for Penstock, whatever its format."""
    return engine_of(label) in OURS


def error_of(result: dict[str, Any], label: str) -> float | None:
    """Return an engine's error on the prose; None: it was not measured."""
    error = result["engines"].get(label, {}).get("error")
    return None if error is None else float(error)


def like_error(result: dict[str, Any], peer: str) -> list[str]:
    """Return Penstock's formats with an error of at most LIKE times that of another engine."""
    theirs = error_of(result, peer)
    found = []
    for label in engines_of(result):
        ours = error_of(result, label)
        if is_ours(label) and ours is not None and theirs is not None and ours <= LIKE * theirs:
            found.append(label)
    return found


def best_of_ours(result: dict[str, Any], rows: Rows, peer: str, column: Headline) -> tuple[float, str] | None:
    """Return the greatest ratio to another engine at like error, and by what; None: nothing compares."""
    if (column.workload, peer) not in rows:
        return None
    found = [
        (ratio(rows, ours, peer, column), ours) for ours in like_error(result, peer) if (column.workload, ours) in rows
    ]
    return max(found, default=None)


def best_peer(rows: Rows, engines: list[str], column: Headline) -> str | None:
    """The engine that is not ours with the best median; None when there is none."""
    peers = [name for name in engines if not is_ours(name) and (column.workload, name) in rows]

    def median(name: str) -> float:
        return float(rows[column.workload, name]["median"][column.figure])

    if not peers:
        return None
    return min(peers, key=median) if column.smaller_is_better else max(peers, key=median)


def ratio(rows: Rows, ours: str, peer: str, column: Headline) -> float:
    """Median over rounds; above 1 ours is better."""
    pairs = zip(rows[column.workload, ours]["rounds"], rows[column.workload, peer]["rounds"], strict=False)
    return statistics.median(column.ratio(a[column.figure], b[column.figure]) for a, b in pairs)


def markdown(result: dict[str, Any]) -> str:
    """Speed with ratios, shares of the roofline, loading and memory, and what the run was."""
    parts = [_about(result)]
    if result["rows"]:
        parts += [_speeds(result)]
        parts += [_at_like_error(result, columns_of(result))]
        parts += _processor_times(result)
    if any("roofline_share" in row for row in result["rows"]):
        parts += ["Share of the machine's limit (ideal time over measured):", _shares(result)]
    if result["rows"]:
        parts += ["Inter-token ms (median), peak RSS of a workload (GB):", _memory(result), _loading(result)]
    parts += [f"`{name}` took no part: {why}." for name, why in result["failures"].items()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(result: dict[str, Any]) -> str:
    where, what = result["environment"], result["settings"]
    text = (
        f"{what['model']}{_weights(what)}, {what['dtype']}, {what['threads']} threads, "
        f"{what['rounds']} rounds in turns{_adapters(what)}; "
        f"commit {where['commit']}, {where['time']}, {where['cores']} cores of an {where['cpu']}, "
        f"load average {where['load_average']:.1f} at the start."
    )
    if result["machine"]:
        bandwidth = max(one["bandwidth"] for one in result["machine"])
        peaks = {name: max(one["peaks"][name] for one in result["machine"]) for name in result["machine"][0]["peaks"]}
        shown = ", ".join(f"{name} {peak / 1e9:.0f} GOP/s" for name, peak in peaks.items())
        text += f" Limits measured in the run: {bandwidth / 1e9:.1f} GB/s; {shown}."
    return text


def _weights(settings: dict[str, Any]) -> str:
    if tokens := settings.get("error_tokens"):
        return f" (errors beside transformers in float32, {tokens} tokens of prose)"
    return ", random weights"


def _adapters(settings: dict[str, Any]) -> str:
    # Files from before there were any lack the fields.
    if not settings.get("adapters"):
        return ""
    ranks = " and ".join(map(str, settings["adapter_ranks"]))
    return f", requests over {settings['adapters']} LoRA adapters of rank {ranks}"


def _table(header: list[str], lines: list[list[str]]) -> str:
    shown = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in shown)


def _speeds(result: dict[str, Any]) -> str:
    rows, engines, columns = rows_of(result), engines_of(result), columns_of(result)
    has_errors = any(error_of(result, engine) is not None for engine in engines)
    best = {column: None if has_errors else best_peer(rows, engines, column) for column in columns}

    def cell(engine: str, column: Headline) -> str:
        row = rows.get((column.workload, engine))
        if row is None:
            return "–"
        text = column.show(row["median"][column.figure])
        return f"**{text}**" if best[column] == engine else text

    def about(engine: str) -> list[str]:
        return _accuracy(result, engine) if has_errors else []

    lines = [[engine, *about(engine), *(cell(engine, column) for column in columns)] for engine in engines]
    titles = [column.title for column in columns]
    if has_errors:
        return _table(["", "error", "same token", "bits a weight", *titles], lines)
    for ours in filter(is_ours, engines):
        compared = [
            f"{ratio(rows, ours, peer, column):.2f}" if peer and (column.workload, ours) in rows else "–"
            for column, peer in best.items()
        ]
        lines.append([f"{ours} / best other", *compared])
    return _table(["", *titles], lines)


def _accuracy(result: dict[str, Any], engine: str) -> list[str]:
    facts = result["engines"].get(engine, {})
    error, agreement = facts.get("error"), facts.get("agreement")
    bits = bits_of(result, engine)
    return [
        "–" if error is None else f"{error:.3f}",
        "–" if agreement is None else f"{agreement:.1%}",
        "–" if bits is None else f"{bits:.1f}",
    ]


def bits_of(result: dict[str, Any], engine: str) -> float | None:
    """Return the bits of a weight in memory, a table beside a tied head included; None: not known."""
    size, parameters = result["engines"].get(engine, {}).get("weights_bytes"), result["settings"].get("parameters")
    return 8.0 * size / parameters if size and parameters else None


def _at_like_error(result: dict[str, Any], columns: list[Headline]) -> str:
    rows = rows_of(result)

    def cell(peer: str, column: Headline) -> str:
        found = best_of_ours(result, rows, peer, column)
        return "–" if found is None else f"{found[0]:.2f} ({found[1].partition(':')[2] or found[1]})"

    lines = [
        [peer, *(cell(peer, column) for column in columns)]
        for peer in engines_of(result)
        if not is_ours(peer) and like_error(result, peer)
    ]
    if not lines:
        return ""
    title = f"Penstock's fastest format with an error of at most {LIKE} times the other's, over the other:"
    return title + "\n\n" + _table(["", *(column.title for column in columns)], lines)


def _processor_times(result: dict[str, Any]) -> list[str]:
    """Return the parts about processor time, which compare on a busy machine, too. Older files have none of it."""
    rows, columns = rows_of(result), columns_of(result, PROCESSOR_TIMES)
    if not columns:
        return []

    def cell(engine: str, column: Headline) -> str:
        row = rows.get((column.workload, engine))
        return column.show(row["median"][column.figure]) if row else "–"

    lines = [[engine, *(cell(engine, column) for column in columns)] for engine in engines_of(result)]
    title = "Processor time of all threads of a workload, those that spin while they wait, too:"
    return [title, _table(["", *(column.title for column in columns)], lines), _at_like_error(result, columns)]


def _shares(result: dict[str, Any]) -> str:
    rows, columns = rows_of(result), columns_of(result)

    def cell(engine: str, column: Headline) -> str:
        row = rows.get((column.workload, engine))
        return f"{row['roofline_share'][column.roofline]:.0%}" if row and "roofline_share" in row else "–"

    lines = [[engine, *(cell(engine, column) for column in columns)] for engine in engines_of(result)]
    titles = [f"{column.workload} {column.roofline}" for column in columns]
    return _table(["", *titles], lines)


def _memory(result: dict[str, Any]) -> str:
    rows = rows_of(result)
    workloads = list(dict.fromkeys(row["workload"] for row in result["rows"]))

    def cell(engine: str, workload: str) -> str:
        row = rows.get((workload, engine))
        if row is None:
            return "–"
        return f"{row['median']['itl_s'] * 1e3:.1f}, {row['median']['peak_rss_bytes'] / 1e9:.2f}"

    lines = [[engine, *(cell(engine, workload) for workload in workloads)] for engine in engines_of(result)]
    return _table(["", *workloads], lines)


def _loading(result: dict[str, Any]) -> str:
    lines = [
        [
            name,
            facts["version"],
            f"{facts['load_seconds']:.1f}",
            f"{facts['load_seconds'] - facts['read_seconds']:.1f}",
            f"{facts['load_peak_rss_bytes'] / 1e9:.2f}",
            f"{facts['loaded_rss_bytes'] / 1e9:.2f}",
        ]
        for name, facts in result["engines"].items()
    ]
    header = ["", "version", "load s", "beyond reading the file", "peak RSS while loading, GB", "RSS loaded, GB"]
    return _table(header, lines) if lines else ""


def plot(result: dict[str, Any], path: Path) -> None:
    """One panel for each headline figure: a bar for every engine, a dot for every round. Raises ImportError."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows, engines, columns = rows_of(result), engines_of(result), columns_of(result)
    figure, panels = pyplot.subplots(1, len(columns), figsize=(2.6 * len(columns), 3.6), squeeze=False)
    for panel, column in zip(panels[0], columns, strict=True):
        shown = [name for name in engines if (column.workload, name) in rows]
        for place, name in enumerate(shown):
            row = rows[column.workload, name]
            scale = 1e3 if column.figure.endswith("_s") and column.smaller_is_better else 1.0
            colour = "tab:blue" if is_ours(name) else "silver"
            panel.bar(place, scale * row["median"][column.figure], color=colour)
            dots = [scale * one[column.figure] for one in row["rounds"]]
            panel.plot([place] * len(dots), dots, "k.", markersize=3)
        panel.set_title(column.title, fontsize=9)
        panel.set_xticks(range(len(shown)), shown, rotation=60, ha="right", fontsize=8)
    figure.suptitle(f"{result['settings']['model']} {result['settings']['dtype']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    if any(error_of(result, name) is not None for name in engines):
        plot_errors(result, path.with_stem(f"{path.stem}-errors"))


def plot_errors(result: dict[str, Any], path: Path) -> None:
    """Draw bits a weight, and each headline speed, over the error: a point for each engine. Raises ImportError."""
    from matplotlib.figure import Figure

    rows, engines, columns = rows_of(result), engines_of(result), columns_of(result)
    known = [(name, error) for name in engines if (error := error_of(result, name)) is not None]
    series: list[tuple[str, dict[str, float]]] = [
        ("bits a weight", {name: bits for name, _ in known if (bits := bits_of(result, name)) is not None})
    ]
    for column in columns:
        scale = 1e3 if column.smaller_is_better else 1.0
        measured = {name: rows[column.workload, name] for name, _ in known if (column.workload, name) in rows}
        series.append((column.title, {name: scale * row["median"][column.figure] for name, row in measured.items()}))
    figure = Figure(figsize=(4.4 * len(series), 4.2), layout="constrained")
    for panel, (title, values) in zip(figure.subplots(1, len(series), squeeze=False)[0], series, strict=True):
        for name, error in known:
            if name in values:
                panel.plot(error, values[name], "o", color="tab:blue" if is_ours(name) else "gray")
                panel.annotate(name, (error, values[name]), fontsize=7, xytext=(3, 3), textcoords="offset points")
        panel.set(xscale="log", title=title, xlabel="mean |difference of a log-probability|")
        panel.set_ylim(bottom=0)
    figure.suptitle(str(result["settings"]["model"]), fontsize=10)
    figure.savefig(path)


def read(path: Path) -> dict[str, Any]:
    """Read a file that workloads.py wrote. Ends the process when the file is something else."""
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        refuse(f"FILE {path}: {error.strerror}")
    except ValueError:
        refuse(f"FILE {path}: is not JSON")
    if not isinstance(result, dict) or result.get("benchmark") != "workloads":
        refuse(f"FILE {path}: not written by benchmarks/workloads.py --json")
    return result


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("file", type=Path)
    parser.add_argument("--plot", type=Path, help="draw it there (PNG or SVG; needs matplotlib)")


def main(options: argparse.Namespace, _report: Report) -> None:
    """Measure, and report it."""
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        refuse("--plot needs matplotlib: any Python that has it draws the same file")
    result = read(options.file)
    print(markdown(result))
    if options.plot is not None:
        plot(result, options.plot)
