"""The trace on disk: whatever happens to it, one log line tells, and the engine goes on."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories.engine.fake_engine import FakeRunner, engine_config, request
from penstock.generation.engine import step_trace
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.step_trace import StepTrace
from penstock.generation.engine.trace_file import TraceFile
from structlog.testing import capture_logs


def test_a_file_that_cannot_be_written_is_told_once_and_the_engine_goes_on(tmp_path: Path) -> None:
    config = engine_config()
    with capture_logs() as logs:
        file = TraceFile(str(tmp_path / "no" / "such" / "folder"), 1 << 20)
        file.start()
        engine = Engine(config, FakeRunner(config), None, listeners=[StepTrace(config, file, time.monotonic())])
        engine.add(request([1, 2, 3]))
        while engine.has_work:
            engine.step()
        file.close()
    assert [log["event"] for log in logs] == ["steps are not traced"]
    assert engine.stats.requests_finished == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_is_told_once_and_the_engine_goes_on() -> None:
    config = engine_config()
    with capture_logs() as logs:
        file = TraceFile("/dev/full", 1 << 20)
        file.start()
        engine = Engine(config, FakeRunner(config), None, listeners=[StepTrace(config, file, time.monotonic())])
        engine.add(request([1, 2, 3]))
        while engine.has_work:
            engine.step()
        file.close()
    assert [(log["event"], log["why"]) for log in logs] == [("steps are not traced", os.strerror(errno.ENOSPC))]
    assert engine.stats.requests_finished == 1


def test_of_two_writers_of_a_file_the_second_writes_nothing(tmp_path: Path) -> None:
    first = TraceFile(str(tmp_path / "trace"), 1 << 20)
    first.start()
    with capture_logs() as logs:
        second = TraceFile(str(tmp_path / "trace"), 1 << 20)
        second.start()
    assert (first.is_open, second.is_open, logs[0]["event"]) == (True, False, "steps are not traced")
    first.write({"from": "first"})
    second.write({"from": "second"})
    second.close()
    first.close()
    assert (tmp_path / "trace").read_text() == '{"from":"first"}\n{"end": "stopped"}\n'
    own = TraceFile(str(tmp_path / "trace-%p"), 1 << 20)
    own.start()
    own.close()
    assert (tmp_path / f"trace-{os.getpid()}").exists()


def test_a_line_that_is_no_json_is_told_once_and_ends_the_trace(tmp_path: Path) -> None:
    with capture_logs() as logs:
        file = TraceFile(str(tmp_path / "trace"), 1 << 20)
        file.start()
        file.write({"it": 1})
        file.write({"it": object()})
        file._thread.join(60)
        assert not file.is_open
        file.write({"it": 2})
        file.close()
    assert [(log["event"], log["why"]) for log in logs] == [("steps are not traced", "TypeError")]
    assert (tmp_path / "trace").read_text() == '{"it":1}\n'


def failing_from(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Make a function that raises from its call `number` on."""
    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise KeyError
        return call(*arguments)

    return counted


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("name", ["_number", "_num_fixed_tokens", "row_of", "TraceFile.write"])
def test_a_fault_of_the_trace_ends_the_trace_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    config = engine_config()
    with capture_logs() as logs:
        file = TraceFile(str(tmp_path / "trace"), 1 << 20)
        file.start()
        engine = Engine(config, FakeRunner(config), None, listeners=[StepTrace(config, file, time.monotonic())])
        owner: Any = TraceFile if "." in name else step_trace
        attribute = name.rpartition(".")[2]
        monkeypatch.setattr(owner, attribute, failing_from(getattr(owner, attribute), number))
        engine.add(request([1, 2, 3], num_return_sequences=2))
        engine.add(request([4, 5]))
        while engine.has_work:
            engine.step()
        assert not file.is_open
        file.close()
    assert [(log["event"], log["why"]) for log in logs] == [("steps are not traced", "KeyError")]
    assert engine.stats.requests_finished == 2
    assert (tmp_path / "trace").read_text().endswith('{"end": "failed"}\n')
