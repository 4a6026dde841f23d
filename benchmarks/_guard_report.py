"""The table of `guard` and its last line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks._guard_ratios import Cell
from benchmarks._report import Table


def show(cells: Sequence[Cell], bound: float, out: Path | None) -> None:
    """A line for each cell; on stderr where stdout is for JSON."""
    table = Table(("time, tree over base", "ratio", "smallest–largest", "±", "pairs, rounds", "verdict"), out)
    for cell in cells:
        pairs = cell.pairs
        noise = f"{cell.noise:.1%}" if math.isfinite(cell.noise) else "?"
        spread = f"{min(pairs):.3f}–{max(pairs):.3f}"
        count = f"{len(pairs)}, {len(cell.rounds)}"
        table.row(cell.name, f"{cell.median:.3f}", spread, noise, count, cell.verdict(bound))


def conclusion(
    cells: Sequence[Cell], failures: Mapping[str, str], left_out: Mapping[str, str], bound: float
) -> tuple[str, int]:
    """The last line, and the exit status: 1 when a cell is slower, a benchmark failed, or nothing was measured."""
    said = [f"{name} left out: {reason}" for name, reason in left_out.items()]
    said += [f"{name} FAILED, the reason is above" for name in failures]
    slower = [cell for cell in cells if cell.is_slower(bound)]
    noisy = sum(cell.is_noisy(bound) for cell in cells)
    if noisy:
        said.append(f"{noisy} of {len(cells)} cells are noisy")
    if slower:
        named = (f"{one.name} {one.median - 1:+.1%}{' (noisy)' if one.is_noisy(bound) else ''}" for one in slower)
        said.append(f"SLOWER by more than {bound:.1%}: {', '.join(named)}")
    else:
        said.append(f"none of {len(cells)} cells is slower by more than {bound:.1%}")
    return "; ".join(said), int(bool(slower or failures or not cells))
