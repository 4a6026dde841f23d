"""`/v1/responses`: OpenAI's newer form of a conversation, which may build on a response that the gateway keeps.

The form is that of https://platform.openai.com/docs/api-reference/responses, as in openai-python 3.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from penstock.common.errors import FailedPrecondition, NotFound
from penstock.gateway.answers import dumps, merged
from penstock.gateway.background_responses import (
    begin_background,
    cancel_background,
    show_response,
)
from penstock.gateway.endpoint import Answer, HttpCall
from penstock.gateway.request_fields import Fields, checked_call
from penstock.gateway.response_progress import ResponsePlan, ResponseProgress, keep
from penstock.gateway.response_request import ResponseRequest
from penstock.gateway.response_store import StoredResponse
from penstock.gateway.store_access import asking_store, items_page, kept_of


async def responses(call: HttpCall) -> Answer:
    """Answer items with items. Raises PenstockError."""
    fields = Fields(call)
    is_stream = fields.get("stream", bool, False)
    plan = await ResponseRequest(fields, call).plan()
    if plan.is_background:
        return await begin_background(plan, call, is_stream=is_stream)
    if is_stream:
        return _events(plan, call)
    progress = ResponseProgress(plan)
    async with plan.open() as stream:
        async for delta in stream:
            progress.take((delta,))
        response = progress.end(stream)[0]
        call.request_id = stream.state.started.request_id  # type: ignore[union-attr] # it has
    return dumps(await keep(plan, call, response))


async def count_input_tokens(call: HttpCall) -> Answer:
    """Answer with the number of tokens of the prompt that a request would make. Raises PenstockError."""
    fields = Fields(call)
    fields.raw("stream")
    plan = await ResponseRequest(fields, call).plan()
    _, ids = await checked_call(plan.render(), schema="parameters")
    return dumps({"object": "response.input_tokens", "input_tokens": len(ids)})


async def get_response(call: HttpCall) -> Answer:
    """Answer with a kept response, or with its events. Raises NotFound, InvalidArgument, FailedPrecondition."""
    return await show_response(call, await _stored(call))


async def cancel_response(call: HttpCall) -> Answer:
    """End a response that is made in the background. Raises NotFound, FailedPrecondition."""
    return await cancel_background(call, await _stored(call))


async def compact_response(call: HttpCall) -> Answer:
    """Refuse to compact a conversation."""
    raise FailedPrecondition(
        "compaction is not supported: send fewer items, or a summary that a response made",
        reason="COMPACTION_NOT_SUPPORTED",
    )


async def list_input_items(call: HttpCall) -> Answer:
    """Answer with the items of a response's request, the last first. Raises NotFound, InvalidArgument."""
    return items_page((await _stored(call)).input, call)


async def delete_response(call: HttpCall) -> Answer:
    """Delete a kept response; one that is being made ends. Raises NotFound."""
    with asking_store():
        was_there = await kept_of(call).responses.delete(call.owner, call.tail)
        if was_there and call.background is not None:
            await call.background.forget(call.owner, call.tail)
    if not was_there:
        raise _unknown(call.tail)
    return dumps({"id": call.tail, "object": "response", "deleted": True})


def _unknown(response_id: str) -> NotFound:
    return NotFound(
        f"no response {response_id[:64]!r} of this caller: never kept, deleted, or too old", reason="RESPONSE_NOT_FOUND"
    )


async def _stored(call: HttpCall) -> StoredResponse:
    with asking_store():
        found = await kept_of(call).responses.get(call.owner, call.tail)
    if found is None:
        raise _unknown(call.tail)
    return found


async def _events(plan: ResponsePlan, call: HttpCall) -> AsyncIterator[bytes]:
    """Events of a streamed answer: the response's start, its items in order, its end."""
    progress = ResponseProgress(plan)

    def begin(started: Any) -> bytes:
        call.request_id = started.request_id
        begun = progress.begin(started)
        return b"".join(progress.numbered([("response.created", begun[0][1]), *begun]))

    async with plan.open() as stream:
        while deltas := merged(await stream.read()):
            first = b"" if progress.has_begun else begin(stream.state.started)
            if piece := first + b"".join(progress.numbered(progress.take(deltas))):
                yield piece
        first = b"" if progress.has_begun else begin(stream.state.started)
        response, last = progress.end(stream)
    response = await keep(plan, call, response)
    yield first + b"".join(progress.numbered([*last, (f"response.{response['status']}", {"response": response})]))
