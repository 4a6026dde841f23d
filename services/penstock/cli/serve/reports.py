"""Reports of a process of the tree to its parent: JSON lines over an inherited pipe.

A child reports `listening`, then `ready`, or one `error`; a worker reports `loaded` instead of `listening`. It also
reports `progress` until it is ready. When the pipe ends, the child has ended.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from penstock.cli.console import STARTUP_EXIT_CODE
from penstock.common.progress import StageProgress

if TYPE_CHECKING:
    from penstock.common.addresses import BoundAddresses
    from penstock.common.errors import StartupError

LISTENING, LOADED, READY, ERROR, PROGRESS = "listening", "loaded", "ready", "error", "progress"
# Seconds, and share of its bytes, after which a stage is reported again. The share is small, so that the last report
# before a stall is nearly true.
PROGRESS_SECONDS, PROGRESS_SHARE = 0.2, 0.005


@dataclass(frozen=True)
class Report:
    """One message. `addresses` maps a process's name to its gRPC address, `metrics` to its metrics address."""

    event: str
    addresses: dict[str, str]
    metrics: dict[str, str]
    lines: tuple[str, ...] = ()
    message: str = ""
    flag: str | None = None
    progress: StageProgress | None = None

    def encode(self) -> bytes:
        """Encode as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def decode(line: bytes) -> Report:
        """Invert `encode`."""
        fields = json.loads(line)
        progress = fields.pop("progress")
        shown = None if progress is None else StageProgress(**progress)
        return Report(**{**fields, "lines": tuple(fields["lines"])}, progress=shown)


class Reporter:
    """Writer of reports to a file descriptor; without one it drops them."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        # Last report of progress, and its time.
        self._reported: tuple[StageProgress | None, float] = (None, 0.0)
        if fd is not None:
            # Grandchildren must not keep the pipe open.
            os.set_inheritable(fd, False)

    @property
    def is_heard(self) -> bool:
        """True when there is a parent, which prints in place of this process."""
        return self._fd is not None

    def send(self, report: Report) -> None:
        """Write `report`. A lost parent is not an error here: the kernel ends this process with it."""
        if self._fd is not None:
            os.write(self._fd, report.encode())

    def listening(self, name: str, bound: BoundAddresses) -> None:
        """Report that the ports are open; nothing is loaded yet."""
        self.send(Report(LISTENING, {name: bound.grpc}, {name: bound.metrics} if bound.metrics else {}))

    def loaded(self) -> None:
        """Report that a worker is ready to open its port."""
        self.send(Report(LOADED, {}, {}))

    def progress(self, progress: StageProgress) -> None:
        """Report the start and the end of a stage, and from time to time its progress. Any thread may call it."""
        last, when = self._reported
        now = time.monotonic()
        is_same = last is not None and (last.stage, last.subject) == (progress.stage, progress.subject)
        if (
            last is None
            or not is_same
            or progress.ended
            or now - when >= PROGRESS_SECONDS
            or progress.done - last.done >= PROGRESS_SHARE * progress.total
        ):
            self._reported = (None if progress.ended else progress, now)
            self.send(Report(PROGRESS, {}, {}, progress=progress))

    def ready(self, name: str, bound: BoundAddresses, lines: list[str]) -> None:
        """Report that health is SERVING."""
        self.send(Report(READY, {name: bound.grpc}, {name: bound.metrics} if bound.metrics else {}, tuple(lines)))

    def give_up(self, error: StartupError, *, debug: bool) -> int:
        """Report that the process cannot start, and return the exit code; the parent prints the error with its flag.

        Raises the error when there is no parent, or for its traceback.
        """
        self.send(Report(ERROR, {}, {}, message=error.message, flag=error.flag))
        if debug or self._fd is None:
            raise error
        return STARTUP_EXIT_CODE
