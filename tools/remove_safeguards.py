"""Removes the safeguards of `tools/safeguards.py` one by one, in a copy of this tree: the test of each must fail.

    python tools/remove_safeguards.py [--only WORDS] [--out FILE]

First all of these tests run on the unchanged copy, and must pass. If a test passes without its safeguard, nothing holds
that safeguard. The copy includes uncommitted changes, and lies below the cache; the tree itself is never changed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
from penstock.common.environment import cache_folder, current_environment

from tools.safeguards import SAFEGUARDS, Safeguard

# Folders that the copy's Python searches first, before installed packages.
_ROOMS = ("services", "clients/python", ".", "tests")
# A summary of pytest has a line for each test that failed, cut at the width of the terminal.
_FAILED = re.compile(r"^FAILED .*? - (.*)$", re.MULTILINE)
_COUNT = re.compile(r"\b(\d+) failed\b")
# An error of grpc tells itself in several lines.
_DETAILS = re.compile(r"^E\s+details = \"(.*)\"$", re.MULTILINE)
_COLUMNS = "400"
_LONGEST_REASON = 100
# Folders of the machine, which say nothing elsewhere.
_PATH = re.compile(r"(?<![\w.])/[\w./-]{8,}")
_HEAD = "| safeguard | file | test | fails by | seconds |\n|---|---|---|---|---|\n"


def refuse(message: str) -> NoReturn:
    """End the process with one line."""
    print(f"remove_safeguards: {message}", file=sys.stderr)
    sys.exit(2)


def git(*arguments: str) -> str:
    """Return git's output in this repository."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def without(safeguard: Safeguard, source: str) -> str:
    """Return the text of its file without a safeguard. Raises ValueError unless what is removed occurs once."""
    found = source.count(safeguard.text)
    if found != 1:
        raise ValueError(f"{safeguard.name}: its text occurs {found} times in {safeguard.file}")
    changed = source.replace(safeguard.text, safeguard.instead)
    compile(changed, safeguard.file, "exec")
    return changed


@dataclass(frozen=True)
class Run:
    """A run of pytest: how many tests failed, the first one's reason, and all that it wrote."""

    code: int
    failed: int
    reason: str
    seconds: float
    output: str


class Copy:
    """Copy of the tree in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = os.pathsep.join(str(folder / room) for room in _ROOMS)
        self._environment = {**current_environment(), "PYTHONPATH": path, "COLUMNS": _COLUMNS}

    def check(self) -> None:
        """End the process when another tree's code would run for it."""
        done = subprocess.run(
            [sys.executable, "-c", "import penstock; print(penstock.__file__)"],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        if not Path(done.stdout.strip() or "/").is_relative_to(self._folder.resolve()):
            refuse(f"the copy runs the package of {done.stdout.strip() or done.stderr.strip()}")

    @contextlib.contextmanager
    def lacking(self, safeguard: Safeguard) -> Iterator[None]:
        """Remove a safeguard for the block. Raises ValueError as `without`."""
        path = self._folder / safeguard.file
        source = path.read_text(encoding="utf-8")
        try:
            self._write(path, without(safeguard, source))
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source, encoding="utf-8")
        # Compiled code is identified by its source's size and time in seconds, and both may be unchanged.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def test(self, tests: Sequence[str], timeout: float) -> Run:
        """Run tests, each for at most `timeout` s."""
        options = ["-q", "-rf", "--tb=short", "-p", "no:cacheprovider", f"--timeout={timeout:g}"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        begin = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            # One that a removed safeguard keeps from its end, after its tests.
            output, _ = process.communicate(timeout=timeout * (len(tests) + 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = process.communicate()[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        count = _COUNT.search(output)
        failed = int(count.group(1)) if count else 0
        return Run(process.returncode, failed, _reason(output), time.monotonic() - begin, output)


def _reason(output: str) -> str:
    """Return why the first test failed; '' when none did."""
    reason, details = _FAILED.search(output), _DETAILS.search(output)
    if reason is None:
        return ""
    told = reason.group(1)
    return f"AioRpcError: {details.group(1)}" if "AioRpcError" in told and details else told


@contextlib.contextmanager
def copied(cache: Path) -> Iterator[Copy]:
    """Copy what git knows or would add, as it is now, into a folder below `cache` for the block."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="safeguards-", dir=cache) as made:
        folder = Path(made)
        for name in filter(None, git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        yield Copy(folder)


def row(safeguard: Safeguard, run: Run) -> str:
    """Return a line of the table."""
    file = safeguard.file.removeprefix("services/penstock/")
    test = safeguard.test.removeprefix("tests/")
    reason = _PATH.sub("…", run.reason).replace("|", "\\|")
    if len(reason) > _LONGEST_REASON:
        reason = reason[:_LONGEST_REASON].rstrip() + "…"
    told = f"`{reason}`" if run.failed else "**it passes**"
    return f"| {safeguard.name} | `{file}` | `{test}` | {told} | {run.seconds:.0f} |\n"


def main() -> int:
    """Run the command line; return 1 when a test passed without its safeguard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those with these words in their name")
    parser.add_argument("--out", type=Path, help="page to write the table to")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one test (180)")
    parser.add_argument("--cache", type=Path, default=Path(cache_folder()), help="folder for the copy")
    arguments = parser.parse_args()
    chosen = [one for one in SAFEGUARDS if arguments.only in one.name]
    if not chosen:
        refuse(f"no safeguard is named {arguments.only!r}")
    for one in chosen:
        try:
            without(one, (ROOT / one.file).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError) as error:
            refuse(str(error))
    with copied(arguments.cache) as copy:
        copy.check()
        whole = copy.test(list(dict.fromkeys(one.test for one in chosen)), arguments.timeout)
        if whole.code:
            print(whole.output)
            refuse("with all safeguards these tests must pass")
        print(f"with all safeguards their tests pass ({whole.seconds:.0f} s)\n\n{_HEAD}", end="", flush=True)
        rows = []
        unheld = 0
        for one in chosen:
            with copy.lacking(one):
                run = copy.test([one.test], arguments.timeout)
            if run.code not in (0, 1):
                print(run.output)
                refuse(f"{one.name}: pytest ended by {run.code}")
            unheld += not run.failed
            rows.append(row(one, run))
            print(rows[-1], end="", flush=True)
    words = f"{len(chosen)} safeguards removed one by one, {len(chosen) - unheld} of their tests failed"
    print(f"\n{words}")
    if arguments.out is not None:
        commit = git("rev-parse", "--short=7", "HEAD").strip() + ("+" if git("status", "--porcelain") else "")
        about = f"Written by `make safeguards` on {datetime.now(UTC):%Y-%m-%d} at {commit}: {words}."
        arguments.out.write_text(f"# Safeguards\n\n{about}\n\n{_HEAD}{''.join(rows)}", encoding="utf-8")
    return int(unheld > 0)


if __name__ == "__main__":
    sys.exit(main())
