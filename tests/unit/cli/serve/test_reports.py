"""Reports of a child to its parent: progress is few messages, and the last before a stall is the truth."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from penstock.cli.serve import reports
from penstock.cli.serve.reports import Report, Reporter
from penstock.common.progress import DOWNLOAD, LOAD_WEIGHTS, StageProgress


class Parent:
    """The other end of a reporter."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self.reporter = Reporter(self._write_end)

    def close(self) -> None:
        """Close both ends."""
        os.close(self._read_end)
        os.close(self._write_end)

    def take(self) -> list[StageProgress]:
        """All that was reported since."""
        try:
            data = os.read(self._read_end, 1 << 20)
        except BlockingIOError:
            return []
        found = [Report.decode(line).progress for line in data.splitlines()]
        assert all(found)
        return [progress for progress in found if progress is not None]


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parent]:
    """No time passes between two reports."""
    monkeypatch.setattr(reports, "PROGRESS_SECONDS", 1e9)
    parent = Parent()
    yield parent
    parent.close()


def at(done: int, stage: str = DOWNLOAD, *, total: int = 1000, ended: bool = False) -> StageProgress:
    return StageProgress(stage, "owner/name", done, total, ended=ended)


def test_many_small_steps_are_few_reports_and_the_last_is_near_the_truth(parent: Parent) -> None:
    for done in range(500):
        parent.reporter.progress(at(done))
    found = parent.take()
    assert found[0] == at(0)
    assert len(found) == 100
    assert found[-1].done >= 495


def test_a_large_step_right_after_another_is_reported(parent: Parent) -> None:
    parent.reporter.progress(at(0))
    parent.reporter.progress(at(400))
    assert parent.take() == [at(0), at(400)]


def test_begin_end_and_bytes_without_a_total_are_always_reported(parent: Parent) -> None:
    sent = [at(0), at(1, ended=True), at(0), at(0, LOAD_WEIGHTS), at(0), at(1, total=0), at(2, total=0)]
    for progress in sent:
        parent.reporter.progress(progress)
    assert parent.take() == sent


def test_time_is_a_reason_to_report(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    parent.reporter.progress(at(0))
    monkeypatch.setattr(reports, "PROGRESS_SECONDS", 0.0)
    parent.reporter.progress(at(1))
    assert parent.take() == [at(0), at(1)]
