"""Progress of stages for people and logs: a line that changes on a terminal, elsewhere occasional lines, or records.

A stage that ends within a second appears only in a log.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from penstock.cli.console import say
from penstock.common.environment import current_environment
from penstock.common.progress import (
    CHECK,
    DOWNLOAD,
    LOAD_WEIGHTS,
    PACK,
    QUANTIZE,
    RECEIVE,
    TUNE,
    WAIT,
    WARM_UP,
    StageProgress,
)
from penstock.common.units import format_size

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.common.config import ProcessConfig

# A stage that takes less is not shown.
SHOWN_SECONDS = 1.0
# Seconds between two lines of a stage without a terminal.
LINE_SECONDS = 10.0
# Seconds between two checks for something to show.
TICK_SECONDS = 0.2
# Speed and remaining time are taken over the last seconds.
SPEED_SECONDS = 30.0
BAR_CHARS = 24
# Columns that the words need: on a narrower terminal there is no bar.
NAME_CHARS = 20
# Words for a stage while it runs, and when it has ended.
WORDS = {
    WAIT: ("waiting for another process that downloads {}", "another process has downloaded {}"),
    DOWNLOAD: ("downloading {}", "downloaded {}"),
    LOAD_WEIGHTS: ("loading the weights of {}", "loaded the weights of {}"),
    TUNE: ("measuring step sizes", "measured step sizes"),
    WARM_UP: ("running {} once", "ran {} once"),
    PACK: ("packing {}", "packed {}"),
    CHECK: ("checking {}", "checked {}"),
    QUANTIZE: ("quantising {}", "quantised {}"),
    RECEIVE: ("sending {}", "sent {}"),
}


class ShownStage:
    """A stage over all the processes that run it: sums, speed, words. Times are of time.monotonic()."""

    def __init__(self, stage: str, subject: str, now: float) -> None:
        self.stage, self.subject = stage, subject
        self.began = now
        # Time of its last line; None without one.
        self.shown: float | None = None
        self._sources: dict[str, StageProgress] = {}
        # (time, bytes) of the last seconds.
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, source: str, progress: StageProgress, now: float) -> None:
        """Take the state of one process."""
        self._sources[source] = progress
        self._samples.append((now, self.done))
        while now - self._samples[0][0] > SPEED_SECONDS:
            self._samples.popleft()

    def drop(self, source: str) -> None:
        """Forget a process that ended."""
        self._sources.pop(source, None)

    @property
    def is_over(self) -> bool:
        """True when no process runs it any more."""
        return all(progress.ended for progress in self._sources.values())

    @property
    def done(self) -> int:
        """Bytes that are done."""
        return sum(progress.done for progress in self._sources.values())

    @property
    def total(self) -> int:
        """Bytes in total; 0 while unknown."""
        totals = [progress.total for progress in self._sources.values()]
        return sum(totals) if all(totals) else 0

    @property
    def percent(self) -> float | None:
        """Share of the bytes that is done; None while unknown."""
        return 100.0 * self.done / self.total if self.total else None

    @property
    def doing(self) -> str:
        """Words for the work."""
        text = WORDS[self.stage][0].format(self.subject)
        return f"{text} ({len(self._sources)} processes)" if len(self._sources) > 1 else text

    def facts(self, now: float) -> str:
        """Words for its progress and its remaining time."""
        if self.percent is None:
            return format_size(self.done) if self.done else f"{now - self.began:.0f} s"
        parts = [f"{int(self.percent)} %", f"{format_size(self.done)} of {format_size(self.total)}"]
        if speed := self._speed(now):
            parts.append(f"{format_size(int(speed))}/s")
            parts.append(f"{_shown_time((self.total - self.done) / speed)} left")
        return ", ".join(parts)

    def ended(self, now: float) -> str:
        """Return the line for its end."""
        did, seconds = WORDS[self.stage][1].format(self.subject), now - self.began
        return f"{did}: {format_size(self.done)} in {seconds:.1f} s" if self.done else f"{did} in {seconds:.1f} s"

    def fields(self, now: float) -> dict[str, Any]:
        """Return the fields of a record."""
        found: dict[str, Any] = {"stage": self.stage}
        if self.subject:
            found["model"] = self.subject
        if self.percent is not None:
            found["percent"] = round(self.percent, 1)
        if self.done or self.total:
            found |= {"bytes": self.done, "total_bytes": self.total}
        return found | {"seconds": round(now - self.began, 1)}

    def _speed(self, now: float) -> float:
        """Bytes a second; 0 while unknown."""
        when, done = self._samples[0]
        # The bytes of a process that ended are no longer among them.
        return max(0.0, self.done - done) / (now - when) if now - when >= SHOWN_SECONDS else 0.0


def _shown_time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class StageView(Protocol):
    """A way to show stages. It is called by one thread at a time."""

    def begin(self, stage: ShownStage, now: float) -> None:
        """Note that a stage begins."""

    def tick(self, stages: Iterable[ShownStage], now: float) -> None:
        """Show the stages that are open, the earliest first. Called every TICK_SECONDS."""

    def end(self, stage: ShownStage, now: float) -> None:
        """Show that a stage is over."""

    def hide(self) -> None:
        """Make room for another writer's line."""


class LiveLine:
    """StageView of a terminal: a line that is redrawn: the earliest stage that is open."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console: Console | None = None
        self._is_drawn = False

    def begin(self, stage: ShownStage, now: float) -> None:
        """The next tick draws it."""

    def tick(self, stages: Iterable[ShownStage], now: float) -> None:
        first = next(iter(stages), None)
        if first is not None:
            # The cursor goes back to the beginning: a line that another process writes here begins there, too.
            self._stream.write(f"\r\x1b[2K{self._line(first, now)}\r")
            self._stream.flush()
            self._is_drawn = True

    def end(self, stage: ShownStage, now: float) -> None:
        """A line that stays, for a stage that took long."""
        self.hide()
        if now - stage.began >= SHOWN_SECONDS:
            self._stream.write(stage.ended(now) + "\n")
            self._stream.flush()

    def hide(self) -> None:
        if self._is_drawn:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._is_drawn = False

    def _line(self, stage: ShownStage, now: float) -> str:
        # Imported late, and only for a terminal: it takes 5 MiB and 0.05 s.
        from rich.console import Console
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if self._console is None:
            self._console = Console(file=self._stream, highlight=False)
        facts = Text(stage.facts(now), style="dim")
        room = self._console.width - facts.cell_len - 1
        cells: list[Any] = [facts]
        if stage.percent is not None and room >= BAR_CHARS + NAME_CHARS:
            cells.insert(0, ProgressBar(total=100.0, completed=stage.percent, width=BAR_CHARS))
            room -= BAR_CHARS + 1
        doing = Text(stage.doing)
        doing.truncate(max(room, 1), overflow="ellipsis")
        row = Table.grid(padding=(0, 1))
        for _ in range(len(cells) + 1):
            row.add_column(no_wrap=True, overflow="ellipsis")
        row.add_row(doing, *cells)
        with self._console.capture() as captured:
            self._console.print(row)
        return captured.get().partition("\n")[0].rstrip()


class PlainLines:
    """StageView without a terminal: a line when a stage has lasted for a second, every LINE_SECONDS, and at its end."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def begin(self, stage: ShownStage, now: float) -> None:
        """The first line comes after the stage has lasted a while."""

    def tick(self, stages: Iterable[ShownStage], now: float) -> None:
        for stage in stages:
            if now - (stage.began if stage.shown is None else stage.shown) < _patience(stage):
                continue
            has_facts = stage.percent is not None or stage.shown is not None
            stage.shown = now
            self._write(f"{stage.doing}: {stage.facts(now)}" if has_facts else f"{stage.doing} …")

    def end(self, stage: ShownStage, now: float) -> None:
        if stage.shown is not None:
            self._write(stage.ended(now))

    def hide(self) -> None:
        """Lines stay."""


def _patience(stage: ShownStage) -> float:
    return SHOWN_SECONDS if stage.shown is None else LINE_SECONDS


class LogLines:
    """StageView of a log: a record at the start of a stage, every LINE_SECONDS, and at its end. Logging must be
    configured."""

    def begin(self, stage: ShownStage, now: float) -> None:
        stage.shown = now
        self._log("begin", stage, now)

    def tick(self, stages: Iterable[ShownStage], now: float) -> None:
        for stage in stages:
            if stage.shown is not None and now - stage.shown >= LINE_SECONDS:
                stage.shown = now
                self._log("running", stage, now)

    def end(self, stage: ShownStage, now: float) -> None:
        self._log("end", stage, now)

    def hide(self) -> None:
        """Records stay."""

    def _log(self, state: str, stage: ShownStage, now: float) -> None:
        from penstock.common.logging import get_logger

        get_logger("penstock.progress").info("progress", state=state, **stage.fields(now))


class ProgressDisplay:
    """Display of stages in one StageView. Any thread may call it; its own thread draws while a stage is open."""

    def __init__(self, view: StageView) -> None:
        self._view = view
        self._lock = threading.RLock()
        self._stages: dict[tuple[str, str], ShownStage] = {}
        self._ticker: threading.Thread | None = None
        self._closed = threading.Event()

    def show(self, progress: StageProgress, source: str = "") -> None:
        """Take the progress of the process `source`."""
        key, now = (progress.stage, progress.subject), time.monotonic()
        with self._lock, _output():
            if self._closed.is_set():
                return
            stage = self._stages.get(key)
            is_new = stage is None
            if stage is None:
                stage = self._stages[key] = ShownStage(*key, now)
            stage.note(source, progress, now)
            if is_new:
                self._view.begin(stage, now)
            if stage.is_over:
                del self._stages[key]
                self._view.end(stage, now)
            elif self._ticker is None:
                self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
                self._ticker.start()

    def drop(self, source: str) -> None:
        """Forget a process that ended during its stages."""
        with self._lock, _output():
            for key, stage in list(self._stages.items()):
                stage.drop(source)
                if stage.is_over:
                    del self._stages[key]
                    self._view.hide()

    def say(self, line: str) -> None:
        """Write another writer's line."""
        with self._lock:
            with _output():
                self._view.hide()
            say(line)

    def close(self) -> None:
        """Stop showing anything."""
        self._closed.set()
        with self._lock, _output():
            self._stages.clear()
            self._view.hide()

    def _tick(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            with self._lock, _output():
                if not self._stages:
                    self._ticker = None
                    return
                if not self._closed.is_set():
                    self._view.tick(self._shown(), time.monotonic())

    def _shown(self) -> list[ShownStage]:
        """Return the open stages, the earliest first; one process reports a download, and the others wait for it."""
        downloads = {stage.subject for stage in self._stages.values() if stage.stage == DOWNLOAD}
        return [stage for stage in self._stages.values() if stage.stage != WAIT or stage.subject not in downloads]


def _output() -> contextlib.AbstractContextManager[None]:
    """Let the work continue when its output is gone."""
    return contextlib.suppress(OSError, ValueError)


def is_live(stream: TextIO | None) -> bool:
    """True when a line on `stream` (None when it is closed) can be redrawn."""
    return stream is not None and stream.isatty() and current_environment().get("TERM") not in (None, "", "dumb")


def serve_display(config: ProcessConfig) -> ProgressDisplay:
    """Make the display of a service: on standard output, or in its log if that is JSON by choice."""
    if config.log_format == "json":
        return ProgressDisplay(LogLines())
    return ProgressDisplay(LiveLine(sys.stdout) if is_live(sys.stdout) else PlainLines(say))


def parent_display(config: ProcessConfig, service: str) -> ProgressDisplay:
    """Make the display of a parent of services; it logs nothing else."""
    if config.log_format == "json":
        from penstock.common.logging import configure_logging

        configure_logging(
            service, log_format="json", level=config.log_level, debug=config.debug, bounds=config.log_bounds
        )
    return serve_display(config)
