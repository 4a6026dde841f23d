"""Calls, readings, pairs and decisions of benchmarks/guard.py. Nothing is timed here."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.__main__ import parser_of
from benchmarks._guard_benches import (
    MODES,
    NAMES,
    WHOLE_RUN,
    Bench,
    Setting,
    benches,
    decode_step_times,
    engine_overhead_times,
    gateway_request_times,
    start_times,
    wire_times,
    workload_times,
)
from benchmarks._guard_ratios import Cell, interval, ratios
from benchmarks._guard_report import conclusion
from benchmarks._guard_rounds import Guard, Limits
from benchmarks._guard_trees import Tree
from benchmarks._report import Table
from benchmarks._wire_report import markdown

SETTING = Setting(Path("model"), 2)


def chosen(name: str) -> Bench:
    return next(one for one in benches("quick") if one.name.startswith(name))


# Ratios and verdicts


def test_turns_are_paired_in_their_order() -> None:
    assert ratios([2.0, 3.0], [1.0, 4.0]) == [2.0, 0.75]


@pytest.mark.parametrize(("new", "base"), [([1.0], [1.0, 1.0]), ([], []), ([1.0, 0.0], [1.0, 1.0])])
def test_turns_that_make_no_pairs_are_refused(new: list[float], base: list[float]) -> None:
    with pytest.raises(ValueError, match="turn"):
        ratios(new, base)


@pytest.mark.parametrize(("count", "skipped"), [(2, 0), (5, 0), (8, 0), (9, 1), (11, 2), (20, 5)])
def test_the_interval_leaves_out_as_many_as_the_sign_test_allows(count: int, skipped: int) -> None:
    low, high = interval([float(number) for number in range(count)])
    assert (low, high) == (skipped, count - 1 - skipped)
    # The chance that the median of all pairs lies outside: too many heads, or too few, of `count` coins.
    outside = 2 * sum(math.comb(count, heads) for heads in range(skipped + 1)) / 2**count
    assert outside <= 0.07 or skipped == 0


@pytest.mark.parametrize(
    ("rounds", "verdict"),
    [
        ([[1.0, 1.001], [1.002, 0.999]], "ok"),
        ([[1.05, 1.051], [1.052, 1.049]], "slower"),
        ([[0.95, 0.951], [0.952, 0.949]], "faster"),
        ([[1.0, 1.1], [0.9, 1.0]], "noisy"),
        ([[1.05, 1.2], [0.98, 1.05]], "slower, noisy"),
        ([[1.05]], "slower, noisy"),
        ([[1.0]], "noisy"),
    ],
)
def test_a_verdict_is_by_the_median_of_all_pairs_and_says_when_they_are_apart(
    rounds: list[list[float]], verdict: str
) -> None:
    assert Cell("one", rounds).verdict(0.02) == verdict


def test_the_bound_is_still_allowed() -> None:
    assert not Cell("one", [[1.02] * 5]).is_slower(0.02)
    assert Cell("one", [[1.0201] * 5]).is_slower(0.02)


def test_one_outlier_of_many_pairs_makes_no_noise() -> None:
    assert not Cell("one", [[1.0] * 11 + [3.0]]).is_noisy(0.02)
    assert Cell("one", [[1.0] * 4 + [3.0]]).is_noisy(0.02)


def test_a_single_pair_has_no_noise_that_json_could_write() -> None:
    assert Cell("one", [[1.0]]).facts(0.02) == {
        "cell": "one",
        "ratio": 1.0,
        "min": 1.0,
        "max": 1.0,
        "noise": None,
        "verdict": "noisy",
        "rounds": [[1.0]],
    }


@pytest.mark.parametrize(
    ("cells", "failures", "status", "says"),
    [
        ([Cell("a", [[1.0] * 5])], {}, 0, "none of 1 cells is slower"),
        ([Cell("a", [[1.0] * 5]), Cell("b", [[1.05] * 5])], {}, 1, "SLOWER by more than 2.0%: b +5.0%"),
        ([Cell("a", [[1.05]])], {}, 1, "a +5.0% (noisy)"),
        ([Cell("a", [[1.0] * 5])], {"wire": "why"}, 1, "wire FAILED"),
        ([], {}, 1, "none of 0"),
    ],
)
def test_the_exit_status_says_whether_all_is_well(
    cells: list[Cell], failures: dict[str, str], status: int, says: str
) -> None:
    line, found = conclusion(cells, failures, {}, 0.02)
    assert found == status
    assert says in line


def test_what_was_left_out_is_named_and_no_failure() -> None:
    line, status = conclusion([Cell("a", [[1.0] * 5])], {}, {"decode_steps": "needs C++ kernels"}, 0.02)
    assert (status, "decode_steps left out: needs C++ kernels" in line) == (0, True)


# The scripts' flags, and their answers


def test_flags_are_those_that_the_benchmarks_have(tmp_path: Path) -> None:
    for bench in {one.script: one for one in benches("full")}.values():
        flags = {flag for flag in bench.flags(SETTING, 2, tmp_path / "out.json") if flag.startswith("--")}
        parser = parser_of(bench.script)
        assert not flags - parser._option_string_actions.keys()


@pytest.mark.parametrize("mode", MODES)
def test_every_benchmark_can_be_chosen(mode: str) -> None:
    assert {bench.name.split()[0] for bench in benches(mode)} == set(NAMES)


def test_a_full_run_has_five_rounds_of_everything() -> None:
    assert all(bench.effort.rounds >= 5 for bench in benches("full"))


def test_a_cell_comes_as_often_as_there_are_cycles() -> None:
    flags = chosen("decode_steps").flags(SETTING, 3, Path("out.json"))
    assert flags[flags.index("--batch") + 1] == "1,8,32,1,8,32,1,8,32"
    flags = chosen("wire 64").flags(SETTING, 2, Path("out.json"))
    assert flags[flags.index("--streams") + 1 : flags.index("--rounds")] == ["64", "256", "64", "256"]


@pytest.mark.parametrize("bench", benches("full"), ids=lambda bench: bench.name)
def test_the_trees_take_turns_in_going_first(bench: Bench) -> None:
    for turn in range(bench.turns):
        again = turn + bench.period
        if again < bench.turns:
            assert bench.starts_with_base(0, turn) != bench.starts_with_base(0, again)
        assert bench.starts_with_base(0, turn) != bench.starts_with_base(1, turn)


def test_rows_that_the_scripts_print_end_a_turn(capsys: pytest.CaptureFixture[str]) -> None:
    Table(["quantization", "batch", "step_ms"], None).row("none", 8, 31.2)
    lines = capsys.readouterr().out.splitlines()
    assert [bool(chosen("decode_steps").turn_ends.search(line)) for line in lines] == [False, False, True]
    lines = markdown([wire_row("uncoalesced", 64, 1.0)]).splitlines()
    assert [bool(chosen("wire").turn_ends.search(line)) for line in lines] == [False, False, True]
    lines = ["12:00:00 loading penstock", "12:00:09 round 1 W1 penstock: 25.3 tok/s, first 280 ms"]
    assert [bool(chosen("W1").turn_ends.search(line)) for line in lines] == [False, True]
    assert not WHOLE_RUN.search("anything")


def test_decode_steps_are_read_by_batch_in_the_order_of_their_turns() -> None:
    cells = [{"batch": batch, "step_ms": ms} for batch, ms in ((1, 30.0), (8, 40.0), (1, 31.0), (8, 41.0))]
    assert decode_step_times({"cells": cells}) == {"decode step of 1": [30.0, 31.0], "decode step of 8": [40.0, 41.0]}


def test_a_start_of_a_tokenizer_has_a_bound_of_its_own() -> None:
    """Whatever the base takes: Gemma 3's took 49 seconds for as long as nobody compared it with anything."""
    bench = chosen("starts")
    times = start_times({"cells": [{"name": "made", "rest": 2.5, "weights": 1.0}]})
    assert times == {"start of a tokenizer, made": [2.5]}
    trees = [Tree(name, ROOT, "") for name in ("base", "tree")]
    guard = Guard(trees[0], trees[1], SETTING, [bench], {}, Limits(0.02, 1.0), Progress())
    guard._take(bench, times, {"start of a tokenizer, made": [1.9]})
    with pytest.raises(ValueError, match="at most 2 s are allowed"):
        guard._take(bench, times, times)


def test_workloads_speeds_become_times() -> None:
    rounds = [{"ttft_s": 0.3, "decode_tok_s": 20.0, "output_tok_s": 18.0}] * 2
    rows = [{"workload": name, "rounds": rounds} for name in ("W1", "W5")]
    assert workload_times({"failures": {}, "rows": rows}) == {
        "W1 first token": [0.3, 0.3],
        "W1 further tokens": [0.05, 0.05],
        "W5": [1 / 18, 1 / 18],
    }
    with pytest.raises(ValueError, match="penstock: out of memory"):
        workload_times({"failures": {"penstock": "out of memory"}, "rows": []})


def test_engine_steps_are_read_by_sequences_context_and_stop_strings() -> None:
    cell = {"sequences": 32, "context": 128, "step_ms_p50": 0.17}
    cells = [{**cell, "stop_strings": False}, {**cell, "stop_strings": True}]
    found = engine_overhead_times({"cells": cells})
    assert found == {"engine step of 32 × 128": [0.17], "engine step of 32 × 128, stop strings": [0.17]}


def wire_row(mode: str, streams: int, tokens_per_second: float, failed: int = 0) -> dict[str, Any]:
    times = {f"{name}_ms": 1.0 for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p90", "itl_p99")}
    spent = {"router": 8.0, "tokenizer": 3.0, "backend": 3.0, "client": 2.0}
    row = {"variant": "now", "mode": mode, "window": 1, "streams": streams, "merged_share": 0.0, "failed": failed}
    return {
        **row,
        **times,
        "tokens_per_second": tokens_per_second,
        "cpu_us_per_token": spent,
        "rss_mb": {"router": 1.0},
    }


def test_requests_of_the_gateway_are_read_by_part() -> None:
    row = {"cell": "chat whole 16", "cpu_us": {"gateway": 800.0, "router": 900.0}, "calls": {"gateway": 1, "router": 2}}
    assert gateway_request_times({"rows": [row, row]}) == {
        "gateway, chat whole 16, CPU": [800.0, 800.0],
        "gateway, chat whole 16, calls": [1, 1],
        "router, chat whole 16, CPU": [900.0, 900.0],
        "router, chat whole 16, calls": [2, 2],
    }


def test_a_turn_of_the_gateway_s_requests_ends_with_its_row() -> None:
    bench = chosen("gateway")
    lines = ["| request | gateway µs |", "| --- | --- |", "| chat whole 16 | 812 |", "| completion streamed 16 | 9 |"]
    assert [bool(bench.turn_ends.search(line)) for line in lines] == [False, False, True, True]
    assert (bench.turns, bench.is_ours) == (12, True)


def test_wire_is_read_by_load_and_streams_with_its_processor_time() -> None:
    rows = [wire_row("uncoalesced", 64, 1000.0), wire_row("coalesced", 64, 4000.0), wire_row("uncoalesced", 64, 500.0)]
    assert wire_times({"rows": rows}) == {
        "wire uncoalesced 64": [0.001, 0.002],
        "wire uncoalesced 64, CPU": [11.0, 11.0],
        "wire coalesced 64": [0.00025],
        "wire coalesced 64, CPU": [11.0],
    }
    with pytest.raises(ValueError, match="2 streams failed"):
        wire_times({"rows": [wire_row("coalesced", 8, 1.0, failed=2)]})
