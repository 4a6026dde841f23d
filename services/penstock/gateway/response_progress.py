"""A response of /v1/responses in progress: from the plan of a request, by the deltas of a stream, to its end."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock_client import AsyncStream, Delta, Usage

from penstock.common.logging import get_logger
from penstock.gateway.answers import chat_logprobs, extras, named_event, usage_of
from penstock.gateway.conversation_turn import add_turn
from penstock.gateway.custom_tools import ToolNames
from penstock.gateway.endpoint import HttpCall
from penstock.gateway.response_items import Event, OutputItems
from penstock.gateway.response_store import StoredResponse, StoreFailed

_INCOMPLETE = {"LENGTH", "MAX_TIME", "ABORTED"}
_log = get_logger("penstock.gateway")


@dataclass(slots=True)
class ResponsePlan:
    """A parsed request."""

    response_id: str
    # Name of the model as it was asked for.
    model: str
    # Fields of the answer that repeat the request.
    echo: dict[str, Any]
    input: list[dict[str, Any]]
    previous: str | None
    # Id of the conversation that the turn belongs to.
    conversation: str | None
    is_stored: bool
    is_background: bool
    open: Callable[[], AsyncStream]
    # Render the prompt: its text and ids.
    render: Callable[[], Awaitable[tuple[str, list[int]]]]
    tool_names: ToolNames


class ResponseProgress:
    """Items, state and events of one response."""

    def __init__(self, plan: ResponsePlan) -> None:
        """Begin it now."""
        self._plan = plan
        self._items = OutputItems(plan.tool_names)
        self._created_at = int(time.time())
        self._model = plan.model
        # Number of the next event.
        self._number = 0
        self.has_begun = False

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        """Return the response as it is now, with further fields."""
        return {
            "id": self._plan.response_id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            **self._plan.echo,
            "usage": None,
            **more,
        }

    def begin(self, started: Any) -> list[Event]:
        """Take the facts from the stream's start; return the event for it."""
        self.has_begun, self._model = True, started.model
        return [("response.in_progress", {"response": self.response("in_progress")})]

    def take(self, deltas: Iterable[Delta]) -> list[Event]:
        """Add deltas to the items; return the events for them."""
        items, found = self._items, list[Event]()
        for delta in deltas:
            if delta.reasoning:
                found += items.reason(delta.reasoning)
            if delta.text or (delta.logprobs and not (delta.reasoning or delta.tool_calls)):
                found += items.write(delta.text, chat_logprobs(delta.logprobs)["content"] if delta.logprobs else [])
            for piece in delta.tool_calls:
                found += items.call(piece.index, piece.id, piece.name, piece.arguments)
        return found

    def end(self, stream: AsyncStream) -> tuple[dict[str, Any], list[Event]]:
        """Return the response of a stream that has ended, and the events of its last item."""
        state = stream.state
        started, finished = state.started, state.finished
        self._model = started.model  # type: ignore[union-attr] # the stream has ended
        is_cut = (state.choices[0].finish_reason or "") in _INCOMPLETE
        status = "incomplete" if is_cut else "completed"
        # A call in which a stop string, or the model itself, broke off is not to be run.
        last = self._items.end(status, is_whole=state.choices[0].finish_reason == "TOOL_CALLS")
        usage = usage_of([Usage.of(finished.usage)])  # type: ignore[union-attr] # the same
        return (
            self.response(
                status,
                incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
                output=self._items.items,
                usage={
                    "input_tokens": usage["prompt_tokens"],
                    "input_tokens_details": usage["prompt_tokens_details"],
                    "output_tokens": usage["completion_tokens"],
                    "output_tokens_details": {
                        "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
                    },
                    "total_tokens": usage["total_tokens"],
                },
                penstock=extras(started, finished),
            ),
            last,
        )

    def broken_off(self, response: dict[str, Any]) -> list[Event]:
        """Add what there is of the output to a response that ended before its stream; return its last events."""
        found = self._items.end("incomplete")
        response["output"] = self._items.items
        # OpenAI has no event for a cancelled one.
        name = "failed" if response["status"] == "failed" else "incomplete"
        return [*found, (f"response.{name}", {"response": response})]

    def numbered(self, events: Iterable[Event]) -> list[bytes]:
        """Return events as bytes, one each, with their numbers."""
        found = []
        for name, value in events:
            found.append(named_event(name, {"sequence_number": self._number, **value}))
            self._number += 1
        return found


async def finish_turn(plan: ResponsePlan, call: HttpCall, response: dict[str, Any]) -> None:
    """Count the tokens of a response that its stream ended, and add its turn to the conversation."""
    call.tokens.prompt += response["usage"]["input_tokens"]
    call.tokens.output += response["usage"]["output_tokens"]
    if plan.conversation is not None and (
        warning := await add_turn(call, plan.conversation, [*plan.input, *response["output"]])
    ):
        response["penstock"]["warnings"].append(warning)


async def keep(plan: ResponsePlan, call: HttpCall, response: dict[str, Any]) -> dict[str, Any]:
    """Keep a response if it is to be kept; return it. If that fails, the response says so."""
    await finish_turn(plan, call, response)
    if not plan.is_stored or call.kept is None:
        return response
    try:
        await call.kept.responses.put(call.owner, StoredResponse(response, plan.input), plan.previous)
    except StoreFailed as error:
        _log.error("a response was not kept", error=str(error))
        return {**response, "store": False}
    return response
