"""`background` of /v1/responses: a response that is made while nobody waits, polled, streamed again and cancelled."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

from penstock.common.errors import InvalidArgument
from penstock.gateway.answers import dumps, merged
from penstock.gateway.background import Background, BackgroundRun
from penstock.gateway.endpoint import Answer, HttpCall
from penstock.gateway.file_routes import query_of
from penstock.gateway.response_progress import ResponsePlan, ResponseProgress, finish_turn
from penstock.gateway.response_store import StoredResponse
from penstock.gateway.store_access import asking_store

_NUMBER = re.compile("[0-9]{1,9}")


def background_of(call: HttpCall) -> Background:
    """Return the responses in the background of a call's gateway. Raises InvalidArgument where there are none."""
    if call.background is None:
        raise InvalidArgument(
            "background", "is not for a batch, nor for a gateway that keeps no responses (--response-store)"
        )
    return call.background


async def begin_background(plan: ResponsePlan, call: HttpCall, *, is_stream: bool) -> Answer:
    """Begin to make a response; answer with it, or with its events. Raises PenstockError."""
    background = background_of(call)
    background.check(call.owner)
    progress = ResponseProgress(plan)
    queued = progress.response("queued")
    run = BackgroundRun(call.owner, StoredResponse(queued, plan.input), plan.previous)
    stream = plan.open()

    async def make(run: BackgroundRun) -> None:
        """Follow the stream; the log has each event once it is made."""

        def log_events(events: list[Any]) -> None:
            if run.log is not None:
                run.log.add(progress.numbered(events))

        log_events([("response.created", {"response": queued}), ("response.queued", {"response": queued})])
        async with stream:
            while deltas := merged(await stream.read()):
                if not progress.has_begun:
                    begun = progress.begin(stream.state.started)
                    run.response = begun[0][1]["response"]
                    log_events(begun)
                    background.begun(run)
                log_events(progress.take(deltas))
            response, last = progress.end(stream)
        await finish_turn(plan, call, response)
        run.response = response
        log_events([*last, (f"response.{response['status']}", {"response": response})])

    def last_events(response: dict[str, Any]) -> list[bytes]:
        return progress.numbered(progress.broken_off(response))

    try:
        with asking_store():
            await background.begin(run, call.tenant, make, last_events, is_streamed=is_stream, counted=call.counted)
    except BaseException:
        stream.close()
        raise
    return dumps(queued) if run.log is None else run.log.read()


async def cancel_background(call: HttpCall, stored: StoredResponse) -> Answer:
    """Cancel a response; answer with it. Raises FailedPrecondition for one that is not in the background."""
    with asking_store():
        return dumps(await background_of(call).cancel(call.owner, stored))


async def show_response(call: HttpCall, stored: StoredResponse) -> Answer:
    """Answer with a kept response as it is now, or with its events where the call asks for `stream`.

    Raises InvalidArgument naming a parameter, and FailedPrecondition where the events are not kept.
    """
    asked = query_of(call)
    stream, after = asked.get("stream", "false"), asked.get("starting_after")
    if stream not in ("true", "false"):
        raise InvalidArgument("stream", "must be true or false")
    if after is not None and _NUMBER.fullmatch(after) is None:
        raise InvalidArgument("starting_after", "must be the number of an event")
    background = background_of(call)
    if stream == "true":
        return _joined(background.events(call.owner, stored.response_id, -1 if after is None else int(after)))
    with asking_store():
        return dumps(await background.current(call.owner, stored))


async def _joined(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for piece in events:
        yield piece
