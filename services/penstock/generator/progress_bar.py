"""Progress of a batch for people: a bar on a terminal or in a notebook, or the caller's own function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from penstock.generator.ordered_batch import BatchProgress

# Prompts from which on a bar is shown unasked, on a terminal.
_WORTH_A_BAR = 8
ShowBatch = Callable[[BatchProgress], None]


class BatchReport:
    """Counter of a batch's answers that shows each change. A context: its end ends the bar."""

    def __init__(self, wanted: bool | ShowBatch | None, total: int | None) -> None:
        """`wanted`: True, a bar; a function, which gets every change; None: a bar on a terminal, for more than a few
        prompts."""
        self._total = total
        self._show = wanted if callable(wanted) else None
        if wanted is None:
            wanted = sys.stderr.isatty() and (total is None or total >= _WORTH_A_BAR)
        self._bar = _Bar(total) if wanted is True else None
        self._done = self._failed = self._tokens = 0

    def __enter__(self) -> BatchReport:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def ended(self, tokens: int, *, failed: bool) -> None:
        """Count one prompt that ended, with the tokens of its answer."""
        self._done += 1
        self._failed += failed
        self._tokens += tokens
        progress = BatchProgress(self._done, self._failed, self._total, self._tokens)
        if self._show is not None:
            self._show(progress)
        if self._bar is not None:
            self._bar.show(progress)


class _Bar:
    """Bar on standard error. rich is imported for it alone."""

    def __init__(self, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns: tuple[Any, ...] = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("prompts", total=total, rate="")

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def show(self, progress: BatchProgress) -> None:
        seconds = self._progress.tasks[0].elapsed or 0.0
        rate = f"{progress.tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
        if progress.failed:
            rate += f", {progress.failed} failed"
        self._progress.update(self._task, completed=progress.done, rate=rate)
