"""The trees that `guard` compares: this one and a commit checked out beside it, each run with its own code."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._arguments import refuse

# Folders that a tree's Python searches first, before installed packages.
_ROOMS = ("services", "clients/python", ".")
_KERNELS = re.compile(r"^(\w+) kernels: ", re.MULTILINE)


@dataclass
class Tree:
    """A checkout. `kernels` is the instruction set of its C++ kernels, or `torch`; known once they are built."""

    name: str
    folder: Path
    commit: str
    kernels: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Environment of its processes: its own code first; no choice that a start measures, no hashes that differ by
        chance."""
        path = os.pathsep.join(str(self.folder / room) for room in _ROOMS)
        steady = {"PYTHONHASHSEED": "0", "PENSTOCK_TUNE_SECONDS": "0", "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **steady, "PYTHONPATH": path, **self.variables}

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Its output and exit status."""
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.folder, env=self.environment(), capture_output=True, text=True)

    def script(self, name: str, *flags: str) -> list[str]:
        """Command line of one of its benchmarks, which is run in its folder. Each was a script before they had one
        entry."""
        scripts = self.folder / "benchmarks"
        has_entry = (scripts / "__main__.py").is_file()
        return [sys.executable, *(("-m", "benchmarks", name) if has_entry else (str(scripts / f"{name}.py"),)), *flags]

    def check(self) -> None:
        """End the process when another tree's code would run for it, as where an import is not by path."""
        found = self.python("-c", "import penstock; print(penstock.__file__)")
        if found.returncode or not Path(found.stdout.strip()).resolve().is_relative_to(self.folder.resolve()):
            refuse(f"{self.folder}: runs the package of {found.stdout.strip() or found.stderr.strip()}")


def git(root: Path, *arguments: str) -> str:
    """Output of git in the repository at `root`. Raises subprocess.CalledProcessError."""
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout


def find_commit(root: Path, name: str) -> str:
    """The full name of a commit. Ends the process with one line when there is no such commit."""
    try:
        return git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").strip()
    except (OSError, subprocess.CalledProcessError):
        refuse(f"BASE {name}: no commit of this repository")


@contextlib.contextmanager
def checked_out(root: Path, commit: str, cache: Path, name: str = "base") -> Iterator[Tree]:
    """The commit in a folder of its own below `cache`; folder and git's note of it go, whatever is raised.

    What a guard left that was killed goes, too.
    """
    home = cache / "guard"
    home.mkdir(parents=True, exist_ok=True)
    for abandoned in _abandoned(home):
        _remove(root, abandoned)
    folder = home / f"{name}-{commit[:12]}-{os.getpid()}"
    try:
        git(root, "worktree", "add", "--detach", str(folder), commit)
        yield Tree(name, folder, commit[:7])
    finally:
        try:
            _remove(root, folder)
        except BaseException:  # a signal in the middle of it
            _remove(root, folder)
            raise


def _abandoned(home: Path) -> list[Path]:
    """Folders of processes that have ended."""
    pids = {folder: folder.name.rpartition("-")[2] for folder in home.iterdir()}
    return [folder for folder, pid in pids.items() if pid.isdigit() and not Path(f"/proc/{pid}").exists()]


def _remove(root: Path, folder: Path) -> None:
    # First, as git refuses what is half removed, and not what is gone.
    shutil.rmtree(folder, ignore_errors=True)
    # Not `prune`, which would forget other worktrees on a disk that is not there now.
    with contextlib.suppress(subprocess.CalledProcessError):
        git(root, "worktree", "remove", "--force", "--force", str(folder))


def this_tree(root: Path) -> Tree:
    """The working tree as it is, with what is not committed (`+`)."""
    commit = git(root, "rev-parse", "--short=7", "HEAD").strip()
    return Tree("tree", root, commit + ("+" if git(root, "status", "--porcelain") else ""))


def choose_kernels(trees: list[Tree]) -> str | None:
    """Build each tree's C++ kernels from its own sources, where it has not been done; None when all have them.

    Otherwise all are to use torch's operators, and the reason is returned: a tree with kernels beside one without
    would be no comparison. A minute for each tree on two cores.
    """
    for tree in trees:
        built = tree.python("-m", "penstock.cli.main", "build-kernels")
        tree.kernels = instruction_set(built.stdout + built.stderr) if built.returncode == 0 else ""
        if not tree.kernels:
            said = (built.stderr.strip() or built.stdout.strip() or "no reason given").splitlines()[-1]
            for one in trees:
                one.kernels = "torch"
                one.variables["PENSTOCK_KERNELS"] = "torch"
            return f"{tree.name} has no C++ kernels, so both trees use torch's operators: {said}"
    return None


def instruction_set(output: str) -> str:
    """Return the instruction set of the kernels that this machine runs, from the output of `penstock build-kernels`;
    empty for none."""
    found = _KERNELS.search(output)
    return found.group(1) if found else ""
