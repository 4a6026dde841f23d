"""What benchmarks/guard.py pairs, reads, decides and leaves behind. Nothing is timed here."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from rich.progress import Progress  # noqa: E402

from benchmarks._guard_benches import (  # noqa: E402
    MODES,
    NAMES,
    WHOLE_RUN,
    Bench,
    Effort,
    Setting,
    benches,
    decode_step_times,
    engine_overhead,
    engine_overhead_times,
    wire_times,
    workload_times,
)
from benchmarks._guard_plant import plant  # noqa: E402
from benchmarks._guard_ratios import Cell, interval, ratios  # noqa: E402
from benchmarks._guard_report import conclusion  # noqa: E402
from benchmarks._guard_rounds import Guard, Limits  # noqa: E402
from benchmarks._guard_trees import Tree, checked_out, choose_kernels, find_commit, instruction_set  # noqa: E402
from benchmarks._guard_turns import HeldProcess, TurnFailed  # noqa: E402
from benchmarks._report import Table  # noqa: E402
from benchmarks._wire_report import markdown  # noqa: E402

GUARD = ROOT / "benchmarks" / "guard.py"
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


# What the scripts are asked, and their answers


def test_flags_are_those_that_the_scripts_have(tmp_path: Path) -> None:
    for bench in {one.script: one for one in benches("full")}.values():
        flags = {flag for flag in bench.flags(SETTING, 2, tmp_path / "out.json") if flag.startswith("--")}
        script = ROOT / "benchmarks" / bench.script
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "services"), str(ROOT)))}
        told = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, env=environment)
        assert told.returncode == 0, told.stderr
        assert not {flag for flag in flags if not re.search(rf"{flag}\b", told.stdout)}


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


# Turns of a process


def held(code: str, turn_ends: str = "^turn ") -> HeldProcess:
    command = [sys.executable, "-u", "-c", textwrap.dedent(code)]
    return HeldProcess(command, dict(os.environ), Path.cwd(), re.compile(turn_ends))


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


TALLY = """
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({pids!r}).write_text(f"{{__import__('os').getpid()}} {{child.pid}}")
for number in range(3):
    print("turn", number)
    pathlib.Path({file!r}).write_text(str(number))
child.kill()
child.wait()
pathlib.Path({file!r}).write_text("end")
"""


def test_a_process_and_its_children_are_held_between_turns(tmp_path: Path) -> None:
    pids, file = tmp_path / "pids", tmp_path / "file"
    process = held(TALLY.format(pids=str(pids), file=str(file)))
    try:
        process.turn()
        family = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        for _ in range(2):
            wait_for(lambda: all(one.status() == psutil.STATUS_STOPPED for one in family))
            process.turn()
        process.finish()
        assert file.read_text() == "end"
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family)
    finally:
        process.stop()


def test_a_held_process_can_be_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    process = held(TALLY.format(pids=str(pids), file=str(tmp_path / "file")))
    process.turn()
    family = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    process.stop()
    wait_for(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family))


def test_a_process_that_names_no_turn_has_one() -> None:
    process = held("print('all')")
    process.turn()
    process.finish()
    process.stop()


def test_a_failure_shows_the_end_of_the_output() -> None:
    process = held("import sys; print('turn 1'); sys.exit('no such flag')")
    process.turn()
    with pytest.raises(TurnFailed, match=r"ended with 1:\n.*turn 1\n.*no such flag"):
        process.finish()
    process.stop()


# Rounds


def stub_tree(folder: Path, name: str, milliseconds: str) -> Tree:
    """A tree whose engine_overhead.py says `milliseconds`, an expression, and writes its name into a list beside."""
    (folder / name / "benchmarks").mkdir(parents=True)
    (folder / name / "benchmarks" / "engine_overhead.py").write_text(
        textwrap.dedent(f"""
            import json, pathlib, sys
            order = pathlib.Path({str(folder / "order")!r})
            order.write_text((order.read_text() if order.exists() else "") + "{name[0]}")
            runs = order.read_text().count("{name[0]}")
            cell = {{"sequences": 1, "context": 8, "stop_strings": False, "step_ms_p50": {milliseconds}}}
            pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps({{"cells": [cell]}}))
        """)
    )
    return Tree(name, folder / name, "abc")


def measured(tmp_path: Path, base: str, tree: str, effort: Effort, seconds: float = math.inf) -> Guard:
    trees = stub_tree(tmp_path, "base", base), stub_tree(tmp_path, "tree", tree)
    guard = Guard(
        *trees, SETTING, [engine_overhead([1], [8], effort)], {}, Limits(0.02, seconds), Progress(disable=True)
    )
    guard.measure()
    return guard


def test_rounds_alternate_and_a_steady_figure_gets_no_more_of_them(tmp_path: Path) -> None:
    guard = measured(tmp_path, "2.0", "2.1", Effort(1, 4, 9))
    assert (tmp_path / "order").read_text() == "bttbbttb"
    assert [cell.rounds for cell in guard.cells] == [[[1.05]] * 4]
    facts = guard.facts(0.02)
    assert facts["cells"][0]["verdict"] == "slower"
    json.dumps(facts)


def test_a_noisy_figure_gets_rounds_up_to_the_limit(tmp_path: Path) -> None:
    guard = measured(tmp_path, "1.0", "1.0 + runs % 2", Effort(1, 3, 6))
    assert len(guard.cells[0].rounds) == 6


def test_no_further_round_begins_that_would_end_too_late(tmp_path: Path) -> None:
    guard = measured(tmp_path, "1.0", "1.0 + runs % 2", Effort(1, 3, 6), seconds=0.0)
    assert len(guard.cells[0].rounds) == 3


def test_a_script_that_fails_is_named_with_its_output(tmp_path: Path) -> None:
    guard = measured(tmp_path, "1.0", "1 / 0", Effort(1, 2, 2))
    assert "ZeroDivisionError" in guard.failures["engine_overhead"]
    assert not guard.cells


def test_figures_that_one_tree_lacks_are_a_failure(tmp_path: Path) -> None:
    guard = measured(tmp_path, "1.0", "0.0", Effort(1, 2, 2))
    assert guard.failures == {"engine_overhead": "a turn took no time"}


# Trees


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One commit with a file of its own and a change on it that is not committed."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "file").write_text("committed")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    (folder / "file").write_text("changed")
    return folder


def is_clean(repository: Path, cache: Path) -> bool:
    return not list((cache / "guard").iterdir()) and len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_commit_is_checked_out_and_removed(repository: Path, tmp_path: Path) -> None:
    commit = find_commit(repository, "HEAD")
    with checked_out(repository, commit, tmp_path) as tree:
        assert (tree.folder / "file").read_text() == "committed"
        # What its benchmarks leave is removed, too.
        (tree.folder / "left").mkdir()
        (tree.folder / "file").write_text("patched")
    assert is_clean(repository, tmp_path)
    with pytest.raises(KeyboardInterrupt), checked_out(repository, commit, tmp_path):
        raise KeyboardInterrupt
    assert is_clean(repository, tmp_path)


def test_what_a_killed_guard_left_is_removed_by_the_next(repository: Path, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    abandoned = tmp_path / "guard" / f"base-123-{ended.pid}"
    git(repository, "worktree", "add", "--detach", str(abandoned))
    in_use = tmp_path / "guard" / f"base-123-{os.getppid()}"
    in_use.mkdir()
    with checked_out(repository, find_commit(repository, "HEAD"), tmp_path):
        assert (abandoned.exists(), in_use.exists()) == (False, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(repository: Path, tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from benchmarks._guard_trees import checked_out
        from benchmarks._processes import stop_on_sigterm
        stop_on_sigterm()
        with checked_out(Path({str(repository)!r}), "HEAD", Path({str(tmp_path)!r})):
            print("ready", flush=True)
            time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert not is_clean(repository, tmp_path)
    process.send_signal(number)
    assert process.wait() != 0
    process.stdout.close()
    assert is_clean(repository, tmp_path)


@pytest.mark.parametrize("name", ["no-such-commit", "--help", "HEAD:Makefile", ""])
def test_a_base_that_is_no_commit_is_one_line(name: str) -> None:
    ended = subprocess.run([sys.executable, GUARD, "--", name], capture_output=True, text=True)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "BASE" in ended.stderr


@pytest.mark.parametrize(
    ("output", "kernels"),
    [
        ("compiling, about a minute ...\navx2 kernels: /cache/one.so\n", "avx2"),
        ("built, but this CPU has no AVX2: /cache/one.so\n", ""),
    ],
)
def test_the_instruction_set_is_what_build_kernels_says(output: str, kernels: str) -> None:
    assert instruction_set(output) == kernels


def tree_that_builds(folder: Path, said: str) -> Tree:
    """A tree whose `build-kernels` says this, or fails where it is empty."""
    package = folder / "services" / "penstock" / "cli"
    package.mkdir(parents=True)
    for part in (package.parent, package):
        (part / "__init__.py").touch()
    (package / "main.py").write_text(f"print({said!r})" if said else "raise SystemExit('no compiler')")
    return Tree(folder.name, folder, "abc")


def test_without_kernels_of_both_trees_both_use_torch(tmp_path: Path) -> None:
    with_kernels = [tree_that_builds(tmp_path / name, "avx512 kernels: here") for name in ("a", "b")]
    assert choose_kernels(with_kernels) is None
    assert {tree.kernels for tree in with_kernels} == {"avx512"}
    assert "PENSTOCK_KERNELS" not in with_kernels[0].variables
    mixed = [with_kernels[0], tree_that_builds(tmp_path / "c", "")]
    reason = choose_kernels(mixed)
    assert reason is not None
    assert "c has no C++ kernels" in reason
    assert "no compiler" in reason
    assert [tree.environment()["PENSTOCK_KERNELS"] for tree in mixed] == ["torch", "torch"]


# The planted slowdown


def test_a_planted_step_waits_for_its_share_and_gives_what_it_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "services").mkdir()
    source = tmp_path / "services" / "model_runner.py"
    source.write_text(
        "import time\n\n\nclass ModelRunner:\n    def execute(self, output):\n"
        "        for _ in range(100):\n            time.perf_counter()\n        return output\n"
    )
    (tmp_path / "services" / "other.py").write_text("class ModelRunnerTest: pass\n")
    assert plant(tmp_path, 5) == source
    # A clock that moves by one whenever it is looked at.
    now = [0.0]

    def perf_counter() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(time, "perf_counter", perf_counter)
    names: dict[str, Any] = {}
    exec(source.read_text(), names)
    assert names["ModelRunner"]().execute("output") == "output"
    # 1 + 100 looks, the three around them, and then until 5 % of 101 are over.
    assert 105 <= now[0] <= 112


def test_a_tree_without_a_model_runner_cannot_be_slowed(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    with pytest.raises(ValueError, match="0 files"):
        plant(tmp_path, 5)
