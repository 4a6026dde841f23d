"""Crashes of one backend's process: from the ends of its connections, what its engine told, and who answers next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.router.backends.crash_log import CrashLog
from penstock.router.requests.suspect import Crash, Suspect


class CrashWatch:
    """Watch over one backend's process; it notes crashes in the router's log. Belongs to one event loop."""

    def __init__(
        self,
        log: CrashLog,
        verdict_seconds: float,
        *,
        suspects: Callable[[], list[Suspect]],
        takes_work: Callable[[], bool],
    ) -> None:
        """Make it. `verdict_seconds`: a process that cannot be reached for so long has crashed. `suspects`: our
        requests that are there now; `takes_work`: True while the backend is ready."""
        self._log = log
        self._verdict_seconds = verdict_seconds
        self._suspects = suspects
        self._takes_work = takes_work
        # Ends of its connection that no process has answered for.
        self._unconfirmed: list[Crash] = []
        # The crash that the engine of this connection told of, before the process went.
        self._told: Crash | None = None
        # The process that reported last, and True while it does on a connection that lasts.
        self._start_id = ""
        self._step = 0
        self._is_here = False

    def connect(self) -> None:
        """Note that a connection begins."""
        self._told, self._is_here = None, False

    def note_broken_call(self) -> None:
        """Note that a connection ended with work of ours: the process may have crashed."""
        if self._told is not None:
            return
        newest = self._newest_unconfirmed()
        if newest is not None:
            self._log.add(newest, self._suspects())
        else:
            self._add(self._suspects())

    def note_failed_step(self, suspect: Suspect) -> None:
        """Note that a step broke in which a request was: the process ends, and only such requests may be the cause."""
        if self._told is not None:
            self._log.add(self._told, [suspect])
            return
        newest = self._newest_unconfirmed()
        if newest is not None:
            # A connection that ended before its engine's last word was read: one end is not two crashes.
            self._unconfirmed.remove(newest)
            self._log.resolve(newest, is_confirmed=False)
        self._told = self._add([suspect])

    def disconnect(self, *, may_be_crash: bool) -> bool:
        """Note that the connection ended. Return True where that may be a crash that nobody told of."""
        self._is_here = False
        if self._told is not None:
            self._log.resolve(self._told, is_confirmed=True)
            return False
        if may_be_crash:
            self.note_broken_call()
        return may_be_crash

    def take_report(self, start_id: str, step: int) -> bool:
        """Take what a report tells of its process. Return True where that is another one than before.

        Services of the last release tell their steps only.
        """
        is_other = False
        if not self._is_here:
            known = self._start_id
            is_other = start_id != known if start_id and known else step < self._step
            for crash in self._unconfirmed:
                self._log.resolve(crash, is_confirmed=is_other)
            self._unconfirmed.clear()
        self._is_here, self._start_id, self._step = True, start_id, step
        return is_other

    def _newest_unconfirmed(self) -> Crash | None:
        newest = self._unconfirmed[-1] if self._unconfirmed else None
        return newest if newest is not None and newest.is_confirmed is None else None

    def _add(self, suspects: list[Suspect]) -> Crash:
        crash = self._log.note(suspects)
        self._unconfirmed.append(crash)
        asyncio.get_running_loop().call_later(self._verdict_seconds, self._resolve_by_time, crash)
        return crash

    def _resolve_by_time(self, crash: Crash) -> None:
        """Confirm a crash of a process that could not be reached for so long. Until it answers, if it does."""
        if crash.is_confirmed is not None:
            return
        is_told = crash is self._told
        # One that told of its end, and takes no work any more, is on its way out.
        lives = self._is_here and (not is_told or self._takes_work())
        self._log.resolve(crash, is_confirmed=not lives)
        if lives:
            self._unconfirmed.remove(crash)
            if is_told:
                self._told = None
