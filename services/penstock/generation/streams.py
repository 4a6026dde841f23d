"""The two kinds of stream that requests answer on: one request alone, and a session of many."""

from __future__ import annotations

from penstock.common.errors import PenstockError
from penstock.generation import convert
from penstock.generation.emitter import Emitter
from penstock.generation.engine.request import Request, RequestOutput
from penstock.generation.outbox import Outbox


class RequestStream:
    """Sink of `Generate`: ends with Finished and then its status, which is the request's own."""

    def __init__(self, emitter: Emitter, bound: int) -> None:
        """At most `bound` messages wait for the reader."""
        self.outbox: Outbox[convert.GenerateResponse] = Outbox(bound)
        self._emitter = emitter

    def deliver(self, step: int, outputs: list[RequestOutput]) -> bool:
        """Send the request's events; the last word closes the stream."""
        for output in outputs:
            for event in self._emitter.events(output):
                self.outbox.put(convert.to_response(event))
            if output.finished is not None:
                self.outbox.close(output.finished.error)
        return not self.outbox.overflowed

    def fail(self, request: Request, error: PenstockError) -> None:
        """End with `error`."""
        self.outbox.close(error)

    def half_close(self) -> None:
        """Nothing to do: it ends with its request."""


class SessionStream:
    """Sink of `Session`: one message per engine step. A request of it ends with `finished` or with `error`."""

    def __init__(self, bound: int) -> None:
        """At most `bound` messages wait for the reader; past that the session ends RESOURCE_EXHAUSTED."""
        self.outbox: Outbox[convert.SessionResponse] = Outbox(bound)
        self._emitters: dict[str, Emitter] = {}
        self._half_closed = False

    def add(self, emitter: Emitter) -> None:
        """A request of this session was accepted."""
        self._emitters[emitter.request.request_id] = emitter

    def owns(self, request_id: str, attempt_epoch: int) -> bool:
        """Whether this try of a request is live in this session."""
        emitter = self._emitters.get(request_id)
        return emitter is not None and emitter.request.attempt_epoch == attempt_epoch

    def half_close(self) -> None:
        """No more commands will come: the stream ends once its live requests have."""
        self._half_closed = True
        self._settle()

    def deliver(self, step: int, outputs: list[RequestOutput]) -> bool:
        """One message with every event; a prompt's logprobs travel alone, so that messages stay below 4 MiB."""
        events: list[convert.SessionEvent] = []
        for output in outputs:
            if output.started is not None and output.started.prompt_logprobs:
                self._send(step, events)
                events = []
            events.extend(self._events(output))
        self._send(step, events)
        self._settle()
        return not self.outbox.overflowed

    def refuse(self, step: int, request_id: str, attempt_epoch: int, error: PenstockError) -> None:
        """A command could not be taken; the session goes on."""
        self._send(step, [convert.to_error_event(request_id, attempt_epoch, error)])

    def fail(self, request: Request, error: PenstockError) -> None:
        """The engine is gone: so is the session."""
        self._emitters.pop(request.request_id, None)
        self.outbox.close(error)

    def _send(self, step: int, events: list[convert.SessionEvent]) -> None:
        if events:
            self.outbox.put(convert.to_session_response(step, events))

    def _events(self, output: RequestOutput) -> list[convert.SessionEvent]:
        emitter = self._emitters[output.request.request_id]
        request, finished = emitter.request, output.finished
        events = [convert.to_session_event(request, event) for event in emitter.events(output)]
        if finished is not None:
            del self._emitters[request.request_id]
            if finished.error is not None:
                # A failed request ends with its error alone, which the reader takes for the last word.
                events[-1] = convert.to_error_event(request.request_id, request.attempt_epoch, finished.error)
        return events

    def _settle(self) -> None:
        if self._half_closed and not self._emitters:
            self.outbox.close()
