"""Progress as people and logs see it: words and figures, few lines without a terminal, one line on one, records."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Iterable

import pytest
from penstock.cli import progress_display as shown
from penstock.cli.console import complain, say
from penstock.cli.progress_display import (
    LINE_SECONDS,
    SHOWN_SECONDS,
    WORDS,
    LiveLine,
    LogLines,
    PlainLines,
    ProgressDisplay,
    ShownStage,
    is_live,
)
from penstock.common import progress as plain
from penstock.common.progress import DOWNLOAD, LOAD_WEIGHTS, TUNE, WAIT, StageProgress
from structlog.testing import capture_logs

GIB = 1 << 30
PATIENCE_SECONDS = 60.0


class Terminal(io.StringIO):
    """A stream that is one."""

    def isatty(self) -> bool:
        return True


def stage(name: str = DOWNLOAD, subject: str = "owner/name") -> ShownStage:
    return ShownStage(name, subject, 0.0)


def at(done: int, total: int = GIB, name: str = DOWNLOAD, *, ended: bool = False) -> StageProgress:
    return StageProgress(name, "owner/name", done, total, ended=ended)


def test_every_stage_has_words() -> None:
    names = {value for name, value in vars(plain).items() if name.isupper() and isinstance(value, str)}
    assert set(WORDS) == names


def test_bytes_speed_and_time_left() -> None:
    one = stage()
    one.note("a", at(0), 0.0)
    assert one.facts(0.0) == "0 %, 0 B of 1 GiB"
    one.note("a", at(GIB // 4), 8.0)
    assert one.facts(8.0) == "25 %, 256 MiB of 1 GiB, 32 MiB/s, 24 s left"
    assert one.doing == "downloading owner/name"
    one.note("a", at(GIB, ended=True), 40.0)
    assert one.is_over
    assert one.ended(40.0) == "downloaded owner/name: 1 GiB in 40.0 s"


def test_the_speed_is_that_of_the_last_seconds_and_a_stall_is_seen() -> None:
    one = stage()
    for second in range(200):
        one.note("a", at(second * 1024), float(second))
    assert one.facts(199.0).endswith("1 KiB/s, 291 h 13 min left")
    # Nothing comes any more: the speed falls.
    assert "15 B/s" in one.facts(199.0 + 1900.0)


def test_a_stage_without_bytes_tells_its_time() -> None:
    one = stage(TUNE, "")
    one.note("", StageProgress(TUNE), 0.0)
    assert (one.doing, one.facts(1.4)) == ("measuring step sizes", "1 s")
    assert one.ended(1.4) == "measured step sizes in 1.4 s"


def test_replicas_are_one_stage_until_the_last_has_ended() -> None:
    one = stage(LOAD_WEIGHTS)
    one.note("generation", at(10, 100, LOAD_WEIGHTS), 0.0)
    one.note("generation 2", at(0, 0, LOAD_WEIGHTS), 0.0)
    # The second has not counted its bytes yet.
    assert one.percent is None
    one.note("generation 2", at(50, 100, LOAD_WEIGHTS), 0.0)
    assert (one.percent, one.doing) == (30.0, "loading the weights of owner/name (2 processes)")
    one.note("generation", at(100, 100, LOAD_WEIGHTS, ended=True), 1.0)
    assert (one.is_over, one.percent) == (False, 75.0)
    one.drop("generation 2")
    assert one.is_over


def test_without_a_terminal_a_line_comes_after_a_second_every_ten_and_at_the_end() -> None:
    lines: list[str] = []
    form, one = PlainLines(lines.append), stage()
    one.note("", at(0), 0.0)
    form.begin(one, 0.0)
    for tick in range(1, 5 * int(LINE_SECONDS)):
        one.note("", at(tick), float(tick))
        form.tick([one], float(tick))
    assert len(lines) == 5
    assert all(line.startswith("downloading owner/name: 0 %") for line in lines)
    form.end(one, 50.0)
    assert lines[-1].startswith("downloaded owner/name: ")


def test_without_a_terminal_a_short_stage_has_no_line() -> None:
    lines: list[str] = []
    form, one = PlainLines(lines.append), stage(TUNE, "")
    form.tick([one], SHOWN_SECONDS * 0.9)
    form.end(one, SHOWN_SECONDS * 0.95)
    assert lines == []
    form.tick([one], SHOWN_SECONDS)
    assert lines == ["measuring step sizes …"]


def test_records_have_fields_at_the_begin_every_ten_seconds_and_at_the_end() -> None:
    form, one = LogLines(), stage()
    with capture_logs() as logs:
        one.note("", at(0), 0.0)
        form.begin(one, 0.0)
        for tick in range(1, 16):
            one.note("", at(tick * 64 << 20), float(tick))
            form.tick([one], float(tick))
        one.note("", at(GIB, ended=True), 16.0)
        form.end(one, 16.0)
    assert [log["state"] for log in logs] == ["begin", "running", "end"]
    assert {log["event"] for log in logs} == {"progress"}
    running = logs[1]
    assert {name: running[name] for name in ("stage", "model", "percent", "bytes", "total_bytes", "seconds")} == {
        "stage": "download",
        "model": "owner/name",
        "percent": 62.5,
        "bytes": 640 << 20,
        "total_bytes": GIB,
        "seconds": 10.0,
    }


@pytest.mark.parametrize(
    ("columns", "words", "has_bar"),
    [
        (120, "downloading owner/name ", True),
        (68, "downloading owner/n… ", True),
        (60, "downloading owner/name ", False),
    ],
)
def test_a_terminals_line_is_drawn_over_and_never_wraps(
    columns: int, words: str, has_bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    form, one = LiveLine(stream), stage()
    one.note("", at(GIB // 2), 0.0)
    form.tick([one], 0.1)
    text = stream.getvalue()
    assert text.startswith("\r\x1b[2K")
    # The cursor is left at the beginning.
    assert text.endswith("\r")
    assert "\n" not in text
    visible = re.sub(r"\x1b\[[\d;]*\w|\r", "", text)
    assert len(visible) <= columns
    assert visible.startswith(words)
    assert ("━" in visible) is has_bar
    assert visible.endswith(" 50 %, 512 MiB of 1 GiB")
    form.end(one, 2.0)
    assert stream.getvalue().endswith("\r\x1b[2Kdownloaded owner/name: 512 MiB in 2.0 s\n")


def test_a_tiny_terminal_has_a_line_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "10")
    stream = Terminal()
    one = stage()
    one.note("", at(GIB // 2), 0.0)
    LiveLine(stream).tick([one], 0.1)
    assert len(re.sub(r"\x1b\[[\d;]*\w|\r", "", stream.getvalue())) <= 10


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for term, live in (("xterm", True), ("dumb", False), ("", False)):
        monkeypatch.setenv("TERM", term)
        assert is_live(Terminal()) is live
        assert not is_live(io.StringIO())


class Ticks:
    """Form that notes what it is asked for."""

    def __init__(self, enough: int = 1) -> None:
        self.stages: list[list[str]] = []
        self.calls: list[str] = []
        self.ticked = threading.Event()
        self._enough = enough

    def begin(self, stage: ShownStage, now: float) -> None:
        self.calls.append(f"begin {stage.stage}")

    def tick(self, stages: Iterable[ShownStage], now: float) -> None:
        self.stages.append([one.stage for one in stages])
        if len(self.stages) >= self._enough:
            self.ticked.set()

    def end(self, stage: ShownStage, now: float) -> None:
        self.calls.append(f"end {stage.stage}")

    def hide(self) -> None:
        self.calls.append("hide")


def test_who_waits_for_a_download_is_not_shown_beside_it() -> None:
    form = Ticks(enough=2)
    display = ProgressDisplay(form)
    display.show(StageProgress(WAIT, "owner/name"), "tokenizer")
    display.show(at(1), "generation")
    assert form.ticked.wait(PATIENCE_SECONDS)
    display.close()
    assert form.stages[-1] == [DOWNLOAD]


def test_a_stage_ends_with_its_last_process_and_nothing_is_shown_after_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    form = Ticks()
    display = ProgressDisplay(form)
    display.show(at(1), "one")
    display.show(at(2), "two")
    display.show(at(GIB, ended=True), "one")
    assert form.calls == ["begin download"]
    display.drop("two")
    assert form.calls == ["begin download", "hide"]
    display.say("a line")
    assert (capsys.readouterr().out, form.calls[-1]) == ("a line\n", "hide")
    display.close()
    before = list(form.calls)
    display.show(at(1), "three")
    assert form.calls == before


def test_work_goes_on_where_the_output_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(line: str) -> None:
        asked.set()
        raise BrokenPipeError

    asked = threading.Event()
    monkeypatch.setattr(shown, "SHOWN_SECONDS", 0.0)
    display = ProgressDisplay(PlainLines(gone))
    display.show(at(1))
    assert asked.wait(PATIENCE_SECONDS)
    display.show(at(GIB, ended=True))
    display.close()


def test_bytes_of_a_process_that_ended_are_no_negative_speed() -> None:
    one = stage(LOAD_WEIGHTS)
    one.note("a", at(GIB // 2, name=LOAD_WEIGHTS), 0.0)
    one.note("b", at(GIB // 4, name=LOAD_WEIGHTS), 1.0)
    one.drop("a")
    assert one.facts(3.0) == "25 %, 256 MiB of 1 GiB"


def test_closed_streams_are_no_terminal_and_take_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    for write, stream in ((say, sys.stdout), (complain, sys.stderr)):
        assert not is_live(stream)
        display = ProgressDisplay(PlainLines(write))
        display.show(at(0))
        next(iter(display._stages.values())).shown = 0.0
        display.show(at(GIB, ended=True))
        display.say("a line")
        display.close()
