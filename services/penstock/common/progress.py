"""Progress of work that takes seconds or minutes, such as the parts of a start, as plain data. No terminal, no log."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

# Stages, in the order of a start; the others are of `penstock pack`, `penstock quantize`, and a model loaded by a call.
WAIT, DOWNLOAD, LOAD_WEIGHTS, TUNE, WARM_UP = "wait", "download", "load_weights", "tune", "warm_up"
PACK, CHECK = "pack", "check"
QUANTIZE = "quantize"
RECEIVE = "receive"
# Longest subject: progress must be one small write into a pipe.
MAX_SUBJECT_CHARS = 200


@dataclass(frozen=True, slots=True)
class StageProgress:
    """State of one stage. Amounts are bytes; a total of 0: there is nothing to count."""

    stage: str
    # Model that the stage is about.
    subject: str = ""
    done: int = 0
    total: int = 0
    ended: bool = False


ShowProgress = Callable[[StageProgress], None]
# Bytes done, and bytes in total.
CountBytes = Callable[[int, int], None]


# Takes a function that ends the wait of a start, for the time when the start is cancelled.
IfCancelled = Callable[[Callable[[], None]], None]


def show_nothing(_: StageProgress) -> None:
    """Drop the progress."""


def never_cancelled(_: Callable[[], None]) -> None:
    """Drop the function: nobody cancels the start."""


class HeldCount:
    """A count that can be shown again while other work goes on: it never goes back."""

    def __init__(self, show: CountBytes) -> None:
        self._show = show
        self._last = (0, 0)

    def __call__(self, done: int, total: int) -> None:
        """Show it."""
        self._last = done, total
        self._show(done, total)

    def again(self) -> None:
        """Show the last count again. May raise the error of the inner one, to give up."""
        self._show(*self._last)


class ProgressStage:
    """A stage as a context manager: `show` gets its start, the amounts from `count`, and its end unless it fails."""

    def __init__(self, show: ShowProgress, stage: str, subject: str = "", total: int = 0) -> None:
        self._show = show
        self._stage, self._subject = stage, subject[:MAX_SUBJECT_CHARS]
        self._done, self._total = 0, total

    def __enter__(self) -> Self:
        self.count(0, self._total)
        return self

    def count(self, done: int, total: int) -> None:
        """Show a number of bytes. May raise the error of `show`, to give up."""
        self._done, self._total = min(done, total) if total else done, total
        self._show(StageProgress(self._stage, self._subject, self._done, self._total))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._show(StageProgress(self._stage, self._subject, self._done, self._total, ended=True))


@runtime_checkable
class ReportsProgress(Protocol):
    """A service that shows the progress of its start."""

    def bind_progress(self, show: ShowProgress) -> None:
        """Take `show`, which any thread may call; called once, before the start."""


class StartCancelled(Exception):
    """A process is stopped while it starts; this ends the loading thread."""


class CancellableProgress:
    """ShowProgress that makes the loading thread give up once the start is cancelled."""

    def __init__(self) -> None:
        self.show: ShowProgress = show_nothing
        self._is_cancelled = threading.Event()
        self._lock = threading.Lock()
        self._endings: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Make the next call raise StartCancelled, and end a wait of the thread."""
        with self._lock:
            self._is_cancelled.set()
            endings, self._endings = self._endings, []
        for end in endings:
            end()

    def if_cancelled(self, end: Callable[[], None]) -> None:
        """Make `cancel` call `end`, on its own thread, so that a wait of the loading thread fails; at once if the start
        is already cancelled."""
        with self._lock:
            if not self._is_cancelled.is_set():
                self._endings.append(end)
                return
        end()

    def check(self) -> None:
        """Raise StartCancelled once the start is cancelled."""
        if self._is_cancelled.is_set():
            raise StartCancelled

    def __call__(self, progress: StageProgress) -> None:
        """Show it. Raises StartCancelled."""
        self.check()
        self.show(progress)
