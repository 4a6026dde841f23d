"""`penstock build-kernels` that is ended before it is done, or fails: nothing goes on, and nothing is left."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from penstock.generation.devices.native.build import find_compiler

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or find_compiler() is None,
    reason="needs /proc, x86-64 and g++",
)
# Whoever reads /proc without a pause takes a core from the process that it waits for.
PAUSE_SECONDS = 0.05


def compilers(folder: Path) -> list[str]:
    """Programs that write below `folder` now."""
    return [words[0] for words in _commands() if any(str(folder) in word for word in words)]


def _commands() -> Iterator[list[str]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            # It ended meanwhile.
            continue


def build_kernels(cache: Path, **variables: str) -> subprocess.Popen[str]:
    # The parent of the tests may ignore SIGINT, as shells do for their background jobs.
    return subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "penstock.cli.main", "build-kernels"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **variables},
        start_new_session=True,
    )


@needs_compiler
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("number", "to_group", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGINT, False, 130), (signal.SIGTERM, False, 143)],
)
def test_a_build_can_be_cancelled(tmp_path: Path, number: int, to_group: bool, code: int) -> None:
    with build_kernels(tmp_path) as process:
        while not any(program.endswith("cc1plus") for program in compilers(tmp_path)):
            assert process.poll() is None
            time.sleep(PAUSE_SECONDS)
        (os.killpg if to_group else os.kill)(process.pid, number)
        _, problems = process.communicate()
    assert (process.returncode, problems) == (code, "")
    while compilers(tmp_path):
        time.sleep(PAUSE_SECONDS)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith("tmp")]


@needs_compiler
def test_an_error_of_a_compiler_is_reported_while_others_run(tmp_path: Path) -> None:
    """One does not understand its source, and the others never end by themselves."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    broken = '*operators_1.cpp*) echo "operators_1.cpp:1: error: broken" >&2; exit 1;;'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in --version) echo 1.0; exit;; {broken} esac\nsleep 600\n')
    compiler.chmod(0o755)
    with build_kernels(tmp_path, PATH=f"{compiler.parent}:{os.environ['PATH']}") as process:
        _, problems = process.communicate()
    assert process.returncode == 2
    assert "error: broken" in problems
    while compilers(tmp_path):
        time.sleep(PAUSE_SECONDS)
