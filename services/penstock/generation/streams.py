"""The two kinds of stream that requests answer on: one request alone, and a session of many."""

from __future__ import annotations

from penstock.common.errors import PenstockError
from penstock.generation import convert
from penstock.generation.emitter import Emitter
from penstock.generation.engine.request import FinishedOutput, Request, RequestOutput
from penstock.generation.outbox import Outbox


class RequestStream:
    """Sink of `Generate`: ends with Finished and then its status, which is the request's own."""

    is_session = False

    def __init__(self, emitter: Emitter, bound: int) -> None:
        """At most `bound` messages wait for the reader."""
        self.outbox: Outbox[convert.GenerateResponse] = Outbox(bound)
        self._emitter = emitter

    def deliver(self, step: int, outputs: list[RequestOutput]) -> bool:
        """Send the request's events; the last word closes the stream."""
        for output in outputs:
            for event in self._emitter.events(output):
                self.outbox.put(convert.to_response(output.request, self._emitter.model, event))
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

    is_session = True

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
        message = convert.SessionResponse(step=step)
        for output in outputs:
            if output.started is not None and output.started.prompt_logprobs:
                self._send(message)
                message = convert.SessionResponse(step=step)
            self._append(message, output)
        self._send(message)
        self._settle()
        return not self.outbox.overflowed

    def refuse(self, step: int, request_id: str, attempt_epoch: int, error: PenstockError) -> None:
        """A command could not be taken; the session goes on."""
        message = convert.SessionResponse(step=step)
        convert.add_error(message, request_id, attempt_epoch, error)
        self._send(message)

    def fail(self, request: Request, error: PenstockError) -> None:
        """The engine is gone: so is the session."""
        self._emitters.pop(request.request_id, None)
        self.outbox.close(error)

    def _send(self, message: convert.SessionResponse) -> None:
        if message.events:
            self.outbox.put(message)

    def _append(self, message: convert.SessionResponse, output: RequestOutput) -> None:
        emitter = self._emitters[output.request.request_id]
        request, finished = emitter.request, output.finished
        error = finished.error if finished is not None else None
        for event in emitter.events(output):
            # A failed request ends with its error alone, which the reader takes for the last word.
            if error is None or not isinstance(event, FinishedOutput):
                convert.add_event(message, request, emitter.model, event)
        if error is not None:
            convert.add_error(message, request.request_id, request.attempt_epoch, error)
        if finished is not None:
            del self._emitters[request.request_id]

    def _settle(self) -> None:
        if self._half_closed and not self._emitters:
            self.outbox.close()
