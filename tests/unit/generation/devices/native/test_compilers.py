"""Compilers run several at a time, and tell how far they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from penstock.common.errors import StartupError
from penstock.generation.devices.native.compilers import run_compilers


def test_progress_counts_every_command_that_ended(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    commands = [[sys.executable, "-S", "-c", "pass"]] * 3
    run_compilers(commands, tmp_path, lambda done, of: told.append((done, of)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_command_that_fails_is_not_counted(tmp_path: Path) -> None:
    told: list[int] = []
    with pytest.raises(StartupError, match="could not be compiled"):
        run_compilers([[sys.executable, "-S", "-c", "exit(1)"]], tmp_path, lambda done, _: told.append(done))
    assert told == [0]
