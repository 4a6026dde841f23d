"""File of JSON lines, written on a thread of its own: the engine's thread hands over plain data and goes on."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections import deque
from pathlib import Path
from typing import IO, Any

from penstock.common.logging import get_logger

# Time between two writes of the engine's lines.
_INTERVAL_SECONDS = 0.2
# Most lines that wait for the disk; more end the trace, since a trace with a gap is of no use.
_MAX_QUEUED_LINES = 10_000
_log = get_logger(__name__)


class TraceFile:
    """Trace on disk. It ends by itself, with one log line, when it is full, fails, or the disk is too slow.

    Its last line says why, {"end": "stopped"}, "full", "too slow" or "failed"; none where it cannot be written.

    The writing process keeps it locked: of two processes with one file name the second writes nothing.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        """`%p` in `path` stands for the process id. Lines are taken from now on, and written once it is started."""
        self._path = Path(path.replace("%p", str(os.getpid()))).expanduser()
        self._left = max_bytes
        # Reason for the end, which is the last line's.
        self._end = "stopped"
        self._lines: deque[Any] = deque()
        self._closing = threading.Event()
        self._file: IO[str] | None = None
        self.is_open = True
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)

    def start(self) -> None:
        """Open the file, and start the thread that writes it. Never raises for a file: its errors are logged."""
        try:
            self._file = self._opened()
        except OSError as error:
            self.is_open = False
            self._lines.clear()
            self._complain(error.strerror)
            return
        self._thread.start()

    def write(self, line: Any) -> None:
        """Queue one line, which must not change any more. To be called from one thread."""
        if not self.is_open:
            return
        if len(self._lines) >= _MAX_QUEUED_LINES:
            self._end = "too slow"
            self.is_open = False
            self._complain("it is not written as fast as the engine steps")
            return
        self._lines.append(line)

    def fail(self, error: Exception) -> None:
        """End the trace because of `error`; the lines before it are kept."""
        if self.is_open:
            self._end = "failed"
            self.is_open = False
            self._complain(type(error).__name__, error)

    def close(self) -> None:
        """Write the lines that are left. Blocks for as long as that takes."""
        self.is_open = False
        self._closing.set()
        if self._file is not None:
            self._thread.join()
        self._lines.clear()

    def _opened(self) -> IO[str]:
        # Truncated only after it is known that no other process writes it.
        file = self._path.open("a", encoding="ascii")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._path.is_file():
                file.truncate(0)
        except OSError:
            file.close()
            raise
        return file

    def _run(self) -> None:
        assert self._file is not None, "opened before the thread was started"
        try:
            # Closing writes the file's buffer and may fail as well.
            with self._file as file:
                while not self._closing.wait(_INTERVAL_SECONDS) and self.is_open:
                    self._drain(file)
                self._drain(file)
                self._lines.clear()
                file.write(json.dumps({"end": self._end}) + "\n")
        except OSError as error:
            self.is_open = False
            self._complain(error.strerror)
        except Exception as error:  # the thread's boundary: the trace ends, the service goes on
            self.is_open = False
            self._complain(type(error).__name__, error)

    def _drain(self, file: IO[str]) -> None:
        while self._lines and self._left > 0:
            text = json.dumps(self._lines.popleft(), separators=(",", ":")) + "\n"
            self._left -= len(text)
            if self._left > 0:
                file.write(text)
            else:
                self.is_open = False
                self._end = "full"
                _log.info("the trace of steps is full", bytes=file.tell())
        file.flush()

    def _complain(self, why: str | None, error: Exception | None = None) -> None:
        _log.error("steps are not traced", why=why, exc_info=error)
