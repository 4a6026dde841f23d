"""Responses that are made while nobody waits for them: kept from the start, asked for again, cancelled.

A response in progress is in the store, as everybody may read it, and a task of this process makes it. Nobody makes it
any more where neither this process nor a sign of life says so: whoever reads it then ends it as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any, TypeAlias

from penstock.common.errors import FailedPrecondition, PenstockError
from penstock.common.kept_running import kept_running
from penstock.common.logging import get_logger
from penstock.common.request_context import current_request_id
from penstock.gateway.config import GatewayConfig
from penstock.gateway.event_log import EventLog, EventLogs, no_events
from penstock.gateway.http_errors import HttpError, known_errors, status_of
from penstock.gateway.kept_stores import KeptStores
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.places import Body, Places
from penstock.gateway.response_store import StoredResponse, StoreFailed

# A caller polls a response that is "queued" or "in_progress".
_UNDER_WAY = ("queued", "in_progress")
# Renewals of a sign of life while it lasts: one may be late.
_RENEWALS = 3
_STOPPED = "the gateway that made the response stopped before it was done"
_LOST = "the gateway that made the response ended before it was done"
_log = get_logger("penstock.gateway")


def is_under_way(response: dict[str, Any]) -> bool:
    """True for a response that nobody has ended."""
    return response["status"] in _UNDER_WAY


def failed(response: dict[str, Any], message: str, *, code: str = "server_error", reason: str = "") -> dict[str, Any]:
    """Return a response as one that failed. `code`: one of OpenAI's."""
    error = {"code": code, "message": message, **({"reason": reason} if reason else {})}
    return {**response, "status": "failed", "error": error}


class BackgroundRun:
    """One response in progress."""

    def __init__(self, caller: str, stored: StoredResponse, previous: str | None) -> None:
        """`stored`: the response as it is at the start, and the items of its request."""
        self.caller, self.previous = caller, previous
        self.response, self.input = stored.response, stored.input
        # Events of a streamed one.
        self.log: EventLog | None = None
        # Status and message of an end that was asked for.
        self.asked_end = ("cancelled", "")
        self.work: asyncio.Task[None] | None = None
        # The write of its begin: that of its end comes after it.
        self.first_write: asyncio.Task[None] | None = None
        self.is_over = asyncio.Event()

    @property
    def response_id(self) -> str:
        """Its id."""
        return str(self.response["id"])

    @property
    def stored(self) -> StoredResponse:
        """The response as it is now."""
        return StoredResponse(self.response, self.input)

    def end(self, status: str, message: str = "") -> None:
        """Ask for its end."""
        self.asked_end = status, message
        if self.work is not None:
            self.work.cancel()


# Makes a response: it sets the run's `response`, and adds to its log.
Make: TypeAlias = "Callable[[BackgroundRun], Awaitable[None]]"
# Returns the last events of a response that did not end by itself.
LastEvents: TypeAlias = "Callable[[dict[str, Any]], list[bytes]]"


class Background:
    """Responses in progress of one gateway. Belongs to one event loop."""

    def __init__(self, kept: KeptStores, config: GatewayConfig, places: Places, metrics: GatewayMetrics) -> None:
        """Make it; nothing runs yet."""
        self._kept, self._config, self._places, self._metrics = kept, config, places, metrics
        self._logs = EventLogs(config.background_event_bytes, config.background_event_seconds)
        self._runs: dict[tuple[str, str], BackgroundRun] = {}
        self._most_of_caller = max(1, int(config.tenant_share * config.max_background))
        # Logs of ended responses, by caller and id.
        self._ended: dict[tuple[str, str], EventLog] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        metrics.background.set_function(lambda: len(self._runs))

    def check(self, caller: str) -> None:
        """Raise HttpError 429 where no further response of a caller may begin."""
        flag = ""
        if len(self._runs) >= self._config.max_background:
            flag = "--max-background"
        elif caller and sum(owner == caller for owner, _ in self._runs) >= self._most_of_caller:
            flag = "--tenant-share of --max-background"
        if flag:
            raise HttpError(
                429,
                f"the limit on responses in the background is reached ({flag})",
                reason="MAX_REQUESTS",
                retry_after_seconds=1.0,
            )

    async def begin(
        self,
        run: BackgroundRun,
        tenant: str,
        make: Make,
        last_events: LastEvents,
        *,
        is_streamed: bool,
        counted: Body | None = None,
    ) -> None:
        """Keep a response and begin to make it, in a place of its tenant. Raises HttpError 429, StoreFailed.

        `is_streamed`: keep its events, too. `counted`: the body of its request, which counts until the response ends.
        """
        self.check(run.caller)
        key = (run.caller, run.response_id)
        with ExitStack() as holding:
            holding.enter_context(self._places.admitted())
            holding.enter_context(self._places.entered(tenant))
            if counted is not None:
                holding.callback(counted.moved().close)
            # Found from here on: a reader of the store would take it for lost.
            self._runs[key] = run
            holding.callback(self._runs.pop, key)
            await self._kept.signs.renew(*key)
            await self._kept.responses.put(run.caller, run.stored, run.previous)
            run.log = self._logs.open() if is_streamed else None
            run.work = asyncio.ensure_future(known_errors(make(run)))
            task = asyncio.create_task(self._follow(run, last_events, holding.pop_all()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, run: BackgroundRun, last_events: LastEvents, holding: ExitStack) -> None:
        """Wait for a response's end, and keep it."""
        assert run.work is not None
        begin, reason = time.monotonic(), ""
        with holding:
            pause = self._config.background_sign_seconds / _RENEWALS
            renewing = asyncio.create_task(kept_running(lambda: self._renew(run), _log, "signs of life", pause))
            try:
                await run.work
            except asyncio.CancelledError:
                status, message = run.asked_end
                run.response = (
                    failed(run.response, message, reason="DRAINING")
                    if status == "failed"
                    else {**run.response, "status": status}
                )
                reason = status.upper()
            except PenstockError as error:
                run.response, reason = _refused(run.response, error), error.reason
            finally:
                renewing.cancel()
            if run.log is not None and reason:
                run.log.add(last_events(run.response))
            await self._keep_end(run)
            if run.log is not None:
                self._ended[run.caller, run.response_id] = run.log
                self._forget_dropped()
                run.log.end()
            run.is_over.set()
        self._metrics.background_ended(run.response["status"]).inc()
        write = _log.warning if run.response["status"] == "failed" else _log.info
        write(
            "background response",
            request_id=current_request_id.get(),
            status=run.response["status"],
            seconds=round(time.monotonic() - begin, 3),
            **({"reason": reason} if reason else {}),
        )

    async def _keep_end(self, run: BackgroundRun) -> None:
        """Write a response's end; it may have been deleted meanwhile."""
        if run.first_write is not None:
            await run.first_write
        try:
            await self._kept.responses.replace(run.caller, run.stored, run.previous)
            await self._kept.signs.drop(run.caller, run.response_id)
        except StoreFailed as error:
            # Without a sign of life, and without its end, it is taken for failed.
            _log.error("the end of a response was not kept", error=str(error))

    async def _renew(self, run: BackgroundRun) -> None:
        """Renew the sign of life of a response until it ends, or another gateway asks for its end."""
        while True:
            await asyncio.sleep(self._config.background_sign_seconds / _RENEWALS)
            with contextlib.suppress(StoreFailed):
                if await self._kept.signs.renew(run.caller, run.response_id):
                    run.end("cancelled")
                    return

    def begun(self, run: BackgroundRun) -> None:
        """Write that a response is in progress; its tokens do not wait for it."""
        run.first_write = asyncio.create_task(self._keep_begin(run, run.stored))

    async def _keep_begin(self, run: BackgroundRun, stored: StoredResponse) -> None:
        # A store that fails is told at the end.
        with contextlib.suppress(StoreFailed):
            await self._kept.responses.replace(run.caller, stored, run.previous)

    async def current(self, caller: str, stored: StoredResponse) -> dict[str, Any]:
        """Return a kept response as it is now; one that nobody makes any more has failed. Raises StoreFailed."""
        response = stored.response
        if not is_under_way(response):
            return response
        key = (caller, stored.response_id)
        if (run := self._runs.get(key)) is not None:
            return run.response
        if await self._kept.signs.is_held(*key):
            return response
        # Its end is written before its sign of life is dropped.
        again = await self._kept.responses.get(*key)
        if again is None or not is_under_way(again.response):
            return response if again is None else again.response
        lost = StoredResponse(failed(again.response, _LOST), again.input)
        await self._kept.responses.replace(caller, lost, again.response["previous_response_id"])
        return lost.response

    async def cancel(self, caller: str, stored: StoredResponse) -> dict[str, Any]:
        """End a response that is under way; return it. Raises FailedPrecondition, StoreFailed."""
        if not stored.response.get("background"):
            raise FailedPrecondition(
                "only a response that was made with background can be cancelled", reason="NOT_IN_BACKGROUND"
            )
        key = (caller, stored.response_id)
        if (run := self._runs.get(key)) is not None:
            run.end("cancelled")
            await run.is_over.wait()
            return run.response
        response = await self.current(caller, stored)
        if is_under_way(response) and await self._kept.signs.ask_end(*key):
            seconds = self._config.background_sign_seconds
            end = time.monotonic() + seconds
            while is_under_way(response) and time.monotonic() < end:
                await asyncio.sleep(seconds / _RENEWALS / 4)
                response = await self.current(caller, stored)
        return response

    async def forget(self, caller: str, response_id: str) -> None:
        """End a response that its caller deleted. Raises StoreFailed."""
        if (run := self._runs.get((caller, response_id))) is not None:
            run.end("cancelled")
        else:
            await self._kept.signs.ask_end(caller, response_id)

    def events(self, caller: str, response_id: str, after: int) -> AsyncIterator[bytes]:
        """Return a response's events behind the number `after`. Raises FailedPrecondition."""
        key = (caller, response_id)
        run = self._runs.get(key)
        log = self._ended.get(key) if run is None else run.log
        if log is None:
            raise no_events()
        return log.read(after)

    def _forget_dropped(self) -> None:
        for key in [key for key, log in self._ended.items() if log.is_dropped]:
            del self._ended[key]

    async def close(self) -> None:
        """End all responses that are under way as failed."""
        for run in list(self._runs.values()):
            run.end("failed", _STOPPED)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._logs.close()


def _refused(response: dict[str, Any], error: PenstockError) -> dict[str, Any]:
    """Return a response that an error ended, with one of OpenAI's codes."""
    status = status_of(error)
    code = "rate_limit_exceeded" if status == 429 else "invalid_prompt" if status < 500 else "server_error"
    return failed(response, error.message, code=code, reason=error.reason)
