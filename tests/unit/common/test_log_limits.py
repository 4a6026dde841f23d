"""One fault writes a bounded number of lines and bytes, whoever causes it how often; others are written beside it."""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from penstock.common.config import ServerConfig
from penstock.common.log_limits import MOST_EXCEPTION_CHARS, LineBounds, LineLimit
from penstock.common.logging import configure_logging, get_logger


class Dropped(Exception):
    """A line was left out."""


class Log:
    """Lines that a limit lets through, at a time that the test sets."""

    def __init__(self, **bounds: Any) -> None:
        self.now = 0.0
        self.lines: list[dict[str, Any]] = []
        self._limit = LineLimit(LineBounds(**bounds), self._write_left_out, Dropped, lambda: self.now)

    def _write_left_out(self, fields: dict[str, Any]) -> None:
        self.write("left out", "warning", **fields)

    def write(self, event: str, level: str = "error", **fields: Any) -> None:
        """Write a line."""
        try:
            self.lines.append(dict(self._limit(None, level, {"event": event, "level": level, **fields})))
        except Dropped:
            return

    @property
    def events(self) -> list[str]:
        """Events of the lines."""
        return [line["event"] for line in self.lines]


def test_lines_of_a_kind_are_bounded_and_others_are_not() -> None:
    log = Log(lines=3)
    for number in range(100):
        log.write("a", request_id=number)
        if number % 40 == 0:
            log.write("b")
            log.write("a", "warning")
            log.write("a", component="other")
    assert log.events.count("b") == 3
    assert [line for line in log.lines if line["event"] == "a" and line["level"] == "error"] == [
        {"event": "a", "level": "error", "request_id": 0},
        {"event": "a", "level": "error", "component": "other"},
        {"event": "a", "level": "error", "request_id": 1},
        {"event": "a", "level": "error", "request_id": 2, "further": "left out for 60 s (--log-lines)"},
        {"event": "a", "level": "error", "component": "other"},
        {"event": "a", "level": "error", "component": "other", "further": "left out for 60 s (--log-lines)"},
    ]


def test_what_was_left_out_is_told_with_the_next_line_of_any_kind() -> None:
    log = Log(lines=2, seconds=10.0)
    for _ in range(7):
        log.write("a", component="c")
    log.now = 9.0
    log.write("b", "info")
    assert log.events == ["a", "a", "b"]
    log.now = 11.0
    log.write("b", "info")
    assert log.lines[3:] == [
        {"event": "left out", "level": "warning", "of": "c", "of_level": "error", "of_event": "a", "lines": 5},
        {"event": "b", "level": "info"},
    ]
    # Not twice; and the kind has its lines again.
    log.now = 30.0
    log.write("a", component="c")
    assert log.events[5:] == ["a"]


def test_what_was_left_out_is_told_with_the_next_line_of_its_kind() -> None:
    log = Log(lines=1, seconds=10.0)
    for second in (0, 1, 2, 10, 11, 20):
        log.now = second
        log.write("a")
    assert log.events == ["a", "left out", "a", "left out", "a"]
    assert [line["lines"] for line in log.lines if "lines" in line] == [2, 1]


def test_a_level_below_warnings_has_more_lines_and_debug_has_no_bound() -> None:
    log = Log(lines=2)
    for _ in range(100):
        log.write("a", "info")
        log.write("a", "debug")
    assert [sum(line["level"] == level for line in log.lines) for level in ("info", "debug")] == [20, 100]


def test_zero_is_no_bound() -> None:
    log = Log(lines=0)
    for _ in range(100):
        log.write("a")
    assert len(log.lines) == 100


def raised(kind: type[Exception], causes: int = 0) -> Exception:
    """An exception with so many causes; from another place where it has none."""
    error: Exception | None = None
    try:
        if not causes:
            raise kind("no cause")
        for _ in range(causes):
            try:
                raise kind("a cause") from error
            except kind as caught:
                error = caught
        raise kind("the last") from error
    except kind as caught:
        return caught


def test_exceptions_of_other_types_or_places_and_other_reasons_are_other_kinds() -> None:
    log = Log(lines=1)
    for _ in range(10):
        log.write("failed", exc_info=raised(KeyError))
        log.write("failed", exc_info=raised(ValueError))
        log.write("failed", exc_info=raised(ValueError, 1))
        log.write("failed", reason="A")
        log.write("failed", reason="B")
    assert len(log.lines) == 5


def test_the_kinds_of_an_event_are_bounded_together_and_none_is_silent() -> None:
    log = Log(lines=2)
    reasons = [f"reason {number}" for number in range(30)]
    for reason in reasons:
        for _ in range(100):
            log.write("request", "info", reason=reason)
    log.write("another", "info", reason=reasons[0])
    lines = [line["reason"] for line in log.lines if line["event"] == "request"]
    # Eight have ten times the limit, the others the limit itself.
    assert [lines.count(reason) for reason in reasons] == [20] * 8 + [2] * 22
    assert log.events.count("another") == 1
    log.now = 61.0
    for _ in range(100):
        log.write("request", "info", reason=reasons[20])
    assert sum(line.get("reason") == reasons[20] for line in log.lines) == 2 + 20


def test_so_many_kinds_are_told_apart_and_no_more() -> None:
    log = Log(lines=1)
    for number in range(5000):
        log.write(str(number))
    assert len(log.lines) == 1024 + 1


# Through the whole of a process's logging.


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with warnings.catch_warnings():
        yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def deep(depth: int, text: str) -> None:
    """Raise from far below."""
    if depth:
        deep(depth - 1, text)
    raise ValueError(text)


@pytest.mark.parametrize("debug", [False, True])
def test_a_hundred_faults_write_a_bounded_number_of_lines_and_bytes(
    capsys: pytest.CaptureFixture[str], debug: bool
) -> None:
    configure_logging("gateway", log_format="json", debug=debug, bounds=LineBounds(lines=5))
    log = get_logger("penstock.gateway")
    log.info("listening")
    for number in range(100):
        try:
            deep(500, "the user's prompt" * 100_000)
        except ValueError:
            log.exception("a request failed", request_id=number)
        # A library's, which has put the message together by itself.
        logging.getLogger("uvicorn.error").error(f"Exception in application {number} " + "x" * 100_000)
        logging.getLogger("asyncio").error("of another %s", number)
    log.info("stopped")
    written = capsys.readouterr().err
    lines = [json.loads(line) for line in written.splitlines()]
    assert [line["event"] for line in lines].count("a request failed") == 5
    assert [line["component"] for line in lines].count("uvicorn.error") == 5
    assert [line["component"] for line in lines].count("asyncio") == 5
    assert (lines[0]["event"], lines[-1]["event"]) == ("listening", "stopped")
    assert len(written) < 5 * (MOST_EXCEPTION_CHARS + 2000)
    assert not [line for line in lines if "_place" in line]
    assert debug or "prompt" not in written


def test_warnings_of_python_are_bounded_by_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging("tokenizer", log_format="json", bounds=LineBounds(lines=2))
        for number in range(100):
            warnings.warn(f"one {number}", RuntimeWarning, stacklevel=1)
        warnings.warn("another", RuntimeWarning, stacklevel=1)
    places = [json.loads(line)["where"] for line in capsys.readouterr().err.splitlines()]
    assert [places.count(place) for place in dict.fromkeys(places)] == [20, 1]


def test_causes_without_end_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", log_format="json")
    get_logger("test").error("failed", exc_info=raised(ValueError, 100))
    line = capsys.readouterr().err
    assert json.loads(line)["exception"].count("ValueError at") == 8
    assert len(line) < MOST_EXCEPTION_CHARS + 500


async def test_errors_of_a_loop_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", log_format="json", bounds=LineBounds(lines=3))
    loop = asyncio.get_running_loop()
    for _ in range(50):
        loop.call_exception_handler({"message": "a task failed", "exception": ValueError("the user's prompt")})
    written = capsys.readouterr().err.splitlines()
    assert len(written) == 3
    assert "prompt" not in "".join(written)


def test_the_bounds_are_options() -> None:
    assert ServerConfig(log_lines=7, log_seconds=5.0).log_bounds == LineBounds(7, 5.0)
