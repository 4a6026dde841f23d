"""Logs are structured, and contain nothing that users sent."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import structlog
from penstock.common.logging import configure_logging, get_logger


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with warnings.catch_warnings():
        yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def fail(text: str) -> None:
    raise ValueError(text)


def log_failure(capsys: pytest.CaptureFixture[str], *, debug: bool) -> dict[str, str]:
    configure_logging("router", log_format="json", debug=debug)
    try:
        fail("the user's prompt")
    except ValueError as error:
        get_logger("test").error("call failed", exc_info=error, request_id="r-1")
    return dict(json.loads(capsys.readouterr().err))


def test_a_line_is_json_with_service_component_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", log_format="json")
    get_logger("penstock.test").info("ready", calls=3)
    line = json.loads(capsys.readouterr().err)
    assert (line["service"], line["component"], line["event"], line["calls"]) == ("router", "penstock.test", "ready", 3)
    assert line["level"] == "info"
    assert line["timestamp"].endswith("Z")


def test_an_exception_is_its_type_and_frames_without_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    line = log_failure(capsys, debug=False)
    assert "ValueError" in line["exception"]
    assert "fail" in line["exception"]
    assert "prompt" not in json.dumps(line)


@pytest.mark.parametrize(("level", "lines"), [("info", 1), ("warning", 0)])
def test_a_warning_of_a_library_is_a_line_of_the_log_without_its_text(
    capsys: pytest.CaptureFixture[str], level: str, lines: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging("generation", log_format="json", level=level)
        warnings.warn("the user's prompt", RuntimeWarning, stacklevel=1)
    written = capsys.readouterr().err.splitlines()
    assert len(written) == lines
    for line in map(json.loads, written):
        assert (line["level"], line["category"]) == ("info", "RuntimeWarning")
        assert "test_logging.py:" in line["where"]
        assert "prompt" not in json.dumps(line)


def test_debug_shows_the_text_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the user's prompt" in log_failure(capsys, debug=True)["exception"]


def test_causes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", log_format="json")
    try:
        try:
            fail("inner")
        except ValueError as error:
            raise RuntimeError("outer") from error
    except RuntimeError as error:
        get_logger("test").error("x", exc_info=error)
    assert json.loads(capsys.readouterr().err)["exception"].count(" <- ") == 1


def test_less_severe_lines_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", log_format="json", level="warning")
    get_logger("test").info("quiet")
    get_logger("test").warning("loud")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["loud"]


def test_libraries_log_through_ours_without_their_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", log_format="json")
    logging.getLogger("some.library").warning("cannot read %s", "the user's prompt")
    line = json.loads(capsys.readouterr().err)
    assert line["event"] == "cannot read %s"
    assert line["component"] == "some.library"


@pytest.mark.parametrize(("name", "lines"), [("grpc._cython.cygrpc", 0), ("another", 1)])
def test_a_call_that_its_caller_left_is_no_error_of_grpcs_core(
    name: str, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("router", log_format="json")
    try:
        raise asyncio.CancelledError
    except asyncio.CancelledError:
        logging.getLogger(name).exception("Exception not handled in servicer method [/a/b]")
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_a_logger_made_before_configuration_follows_it(capsys: pytest.CaptureFixture[str]) -> None:
    early = get_logger("early")
    configure_logging("tokenizer", log_format="json")
    early.info("hello")
    assert json.loads(capsys.readouterr().err)["service"] == "tokenizer"


def test_what_nobody_catches_is_a_line_of_the_log() -> None:
    code = """
import logging, sys, threading, warnings
from penstock.common.logging import configure_logging, log_crashes
configure_logging("router", log_format="json")
log_crashes()
library = logging.getLogger("transformers")
library.addHandler(logging.StreamHandler())
library.propagate = False
logging.getLogger("transformers.models").warning("a library's words")
logging.getLogger("uvicorn.error").error("another's, %s", "of a user")
warnings.warn("old", stacklevel=1)
def fail(): raise ValueError("a secret prompt")
thread = threading.Thread(target=fail)
thread.start(); thread.join()
class Odd:
    def __del__(self): fail()
Odd()
fail()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    events = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert events == [
        "a library's words",
        "another's, %s",
        "a library warns",
        "an error ended a thread",
        "an error could not be raised",
        "an error ends the process",
    ]
    assert "secret" not in done.stderr
    assert done.returncode == 1
