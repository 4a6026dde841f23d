"""Processes, checkouts and remains of benchmarks/guard.py. Nothing is timed here."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
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
from rich.progress import Progress

from benchmarks._guard_benches import Effort, Setting, engine_overhead
from benchmarks._guard_plant import plant
from benchmarks._guard_rounds import Guard, Limits
from benchmarks._guard_trees import Tree, checked_out, choose_kernels, find_commit, instruction_set
from benchmarks._guard_turns import HeldProcess, TurnFailed

GUARD = (str(ROOT / "benchmarks" / "__main__.py"), "guard")
SETTING = Setting(Path("model"), 2)


# Turns of a process


def held(code: str, turn_ends: str = "^turn ") -> HeldProcess:
    command = [sys.executable, "-u", "-c", textwrap.dedent(code)]
    return HeldProcess(command, dict(os.environ), Path.cwd(), re.compile(turn_ends))


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


TALLY = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({pids!r}).write_text(f"{{__import__('os').getpid()}} {{child.pid}}")
for number in range(3):
    print("turn", number)
    pathlib.Path({file!r}).write_text(str(number))
    # Does nothing more by itself, however late it is held.
    while not pathlib.Path({file!r} + f"-go-on-{{number}}").exists():
        time.sleep(0.005)
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
        for number in range(2):
            wait_for(lambda: all(one.status() == psutil.STATUS_STOPPED for one in family))
            Path(f"{file}-go-on-{number}").touch()
            process.turn()
        Path(f"{file}-go-on-2").touch()
        process.finish()
        assert file.read_text() == "end"
        assert not any(is_alive(one) for one in family)
    finally:
        process.stop()


def test_a_held_process_can_be_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    process = held(TALLY.format(pids=str(pids), file=str(tmp_path / "file")))
    process.turn()
    family = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    process.stop()
    wait_for(lambda: not any(is_alive(one) for one in family))


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
    """Make a tree with an engine_overhead.py that says `milliseconds`, an expression, and writes its name into a list
    beside."""
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
        # Files that its benchmarks leave are removed, too.
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


def test_a_removal_that_is_cut_off_is_done_again(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = shutil.rmtree, 0

    def cut_off(folder: Path, **settings: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            # Broken so far that git does not take the remains for a worktree.
            (folder / ".git").unlink()
            raise SystemExit(143)
        whole(folder, **settings)

    monkeypatch.setattr(shutil, "rmtree", cut_off)
    with pytest.raises(SystemExit), checked_out(repository, find_commit(repository, "HEAD"), tmp_path):
        pass
    assert is_clean(repository, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(repository: Path, tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
        import signal, sys, time
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from benchmarks._guard_trees import checked_out
        from benchmarks._processes import stop_on_sigterm
        stop_on_sigterm()
        # Tests that a shell runs in the background are started with it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
    ended = subprocess.run([sys.executable, *GUARD, "--", name], capture_output=True, text=True)
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
    """Make a tree with a `build-kernels` that says this, or fails where it is empty."""
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
