"""docs/learn/scheduling.md is true: its tables are the scheduler's steps."""

from __future__ import annotations

import re
from itertools import pairwise

from factories.engine.fake_engine import engine_config, make_engine, request
from factories.source_tree import ROOT

_ROW = re.compile(r"^\| ([ABC]) \| (\d+) \| (\d+) \| (\d+) \| ([\d ]+) \|$", re.MULTILINE)


def tables() -> list[list[tuple[str, ...]]]:
    """The page's tables, row by row."""
    page = (ROOT / "docs" / "learn" / "scheduling.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", page, flags=re.MULTILINE)
    return [rows for part in parts if (rows := _ROW.findall(part))]


def test_the_tables_are_what_is_scheduled() -> None:
    engine, runner = make_engine(engine_config(num_blocks=32, block_size=4, max_batch_tokens=16))
    engine.add(request(range(6), request_id="A"))
    engine.step()
    engine.add(request(range(100, 124), request_id="B", arrival_time=1.0))
    engine.add(request([*range(100, 108), 1, 2], request_id="C", arrival_time=2.0))

    steps = []
    for _ in range(2):
        scheduled = []
        engine.step()
        for entry in runner.steps[-1].scheduled:
            ids = entry.sequence.token_ids
            name = "A" if ids[0] == 0 else "B" if ids[8] == 108 else "C"
            blocks = " ".join(map(str, entry.sequence.block_table))
            scheduled.append((name, str(entry.start), str(entry.num_tokens), str(len(entry.sample)), blocks))
        steps.append(scheduled)
    assert [sorted(step) for step in steps] == [sorted(table) for table in tables()]


def test_c_has_its_first_token_before_b() -> None:
    first, second = tables()
    draws = [{row[0]: int(row[3]) for row in table} for table in (first, second)]
    assert (draws[0]["B"], draws[0]["C"]) == (0, 1)
    assert all(earlier["A"] == later["A"] == 1 for earlier, later in pairwise(draws))
