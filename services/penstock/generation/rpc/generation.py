"""GenerationService: one request on a stream, or many on a session. Token ids in, token ids out.

Handlers run on the event loop and never touch the engine's state: they hand requests to the hub and write the outputs
that the hub routes back to them. A handler that ends for any reason (cancelled, deadline, reader gone) detaches its
stream, which aborts its live requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from penstock.common.errors import InvalidArgument, PenstockError
from penstock.common.tracing import Span, current_span, current_tracer, parse_context
from penstock.generation.delivery.deltas import DeltaMaker
from penstock.generation.delivery.request_spans import begin_in_call, begin_in_session, end_refused
from penstock.generation.delivery.streams import RequestStream, SessionStream
from penstock.generation.lifecycle import Lifecycle
from penstock.generation.metrics import GenerationMetrics
from penstock.generation.options.request_options import GenerateOptions
from penstock.generation.service import GenerationCore
from penstock.generation.wire import convert, score_embed_messages
from penstock.v1 import generation_pb2, generation_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


def deadline_of(context: Context) -> float | None:
    """Return the call's deadline as time.monotonic(); None when it has none."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService over one Lifecycle."""

    def __init__(self, lifecycle: Lifecycle, metrics: GenerationMetrics) -> None:
        self._lifecycle = lifecycle
        self._metrics = metrics

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Send Started, deltas and Finished of one request, then its status."""
        span = begin_in_call(current_span.get())
        try:
            core = self._lifecycle.accepting()
            maker = await self._make(core, request, deadline_of(context))
            maker.request.span = span
            stream = RequestStream(maker, core.config.max_pending_messages)
            core.hub.submit(maker.request, stream)
        except PenstockError as error:
            end_refused(span, error)
            self._metrics.request_refused(error)
            raise
        core.hub.attach(stream)
        try:
            async for message in stream.buffer:
                await context.write(message)
        finally:
            core.hub.detach(stream)

    async def _make(
        self, core: GenerationCore, message: generation_pb2.GenerateRequest, deadline: float | None
    ) -> DeltaMaker:
        """Make a request that can be submitted. Its options may hold megabytes; they do not outlive this call."""
        options = convert.to_generate_options(message, core.limits)
        maker = core.prepare(options, deadline)
        if core.takes_time(maker.request, options):
            await core.complete(maker.request, options)
            # It may have begun to drain meanwhile.
            self._lifecycle.accepting()
        return maker

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[generation_pb2.SessionRequest], context: Context
    ) -> None:
        """Read commands, and send one message per engine step, or per several that waited for the reader."""
        core = self._lifecycle.loaded()
        session = SessionStream(core.config.max_pending_messages)
        reader = asyncio.create_task(self._read(request_iterator, session, deadline_of(context)))
        # A reader that fails ends the session; its exception is raised below.
        reader.add_done_callback(lambda task: session.half_close() if _ended(task) else session.buffer.close())
        core.hub.attach(session)
        try:
            async for message in session.buffer:
                await context.write(message)
            if reader.done():
                await reader
        finally:
            reader.cancel()
            session.give_up()
            core.hub.detach(session)

    async def _read(
        self, commands: AsyncIterator[generation_pb2.SessionRequest], session: SessionStream, deadline: float | None
    ) -> None:
        async for message in commands:
            for command in message.commands.commands if message.HasField("commands") else (message,):
                if self._take(command, session, deadline):
                    # Its id must be taken before the next command: that may be its abort, and may have arrived already.
                    await asyncio.sleep(0)

    def _take(self, command: generation_pb2.SessionRequest, session: SessionStream, deadline: float | None) -> bool:
        """Carry out a command. True: the next turn of the event loop begins to prepare its request first."""
        kind = command.WhichOneof("command")
        if kind == "abort":
            self._abort(command.abort, session)
            return False
        submit, span, tracer = command.submit, None, current_tracer.get()
        try:
            if kind != "submit":
                raise InvalidArgument("command", "must be submit or abort")
            if tracer is not None:
                span = begin_in_session(tracer, parse_context(submit.traceparent, submit.tracestate))
            return self._submit(submit, command.handle, session, deadline, span)
        except PenstockError as error:
            self._refuse(session, submit.request_id, submit.attempt_epoch, error, span)
            return False

    def _submit(
        self,
        message: generation_pb2.GenerateRequest,
        handle: int,
        session: SessionStream,
        deadline: float | None,
        span: Span | None,
    ) -> bool:
        """Submit a request. True: the next turn of the event loop begins to prepare it first."""
        core = self._lifecycle.accepting()
        if not message.request_id:
            raise InvalidArgument("request_id", "must be set in a session")
        options = convert.to_generate_options(message, core.limits)
        maker = core.prepare(options, deadline)
        maker.handle = handle
        maker.request.span = span
        if core.takes_time(maker.request, options):
            # The session's other commands do not wait for it.
            session.later(maker, self._submit_later(maker, options, session))
            return True
        core.hub.submit(maker.request, session)
        session.add(maker)
        return False

    async def _submit_later(self, maker: DeltaMaker, options: GenerateOptions, session: SessionStream) -> None:
        request = maker.request
        try:
            await self._lifecycle.accepting().complete(request, options)
            # It may have begun to drain meanwhile.
            self._lifecycle.accepting().hub.submit(request, session)
            session.add(maker)
        except PenstockError as error:
            self._refuse(session, request.request_id, request.attempt_epoch, error, request.span)
        except asyncio.CancelledError:
            end_refused(request.span, None)
            raise

    def _refuse(
        self, session: SessionStream, request_id: str, attempt_epoch: int, error: PenstockError, span: Span | None
    ) -> None:
        end_refused(span, error)
        self._metrics.request_refused(error)
        session.refuse(self._step(), request_id, attempt_epoch, error)

    def _abort(self, message: generation_pb2.SessionAbort, session: SessionStream) -> None:
        """Abort one of the session's own requests; it is no error if the request is over already."""
        core = self._lifecycle.core
        if core is not None and session.owns(message.request_id, message.attempt_epoch):
            core.hub.abort([message.request_id])

    def _step(self) -> int:
        core = self._lifecycle.core
        return core.hub.step if core is not None else 0

    async def Score(self, request: generation_pb2.ScoreRequest, context: Context) -> generation_pb2.ScoreResponse:
        """Return log-probabilities of given continuations, batched with all other requests."""
        core = self._lifecycle.accepting()
        command = score_embed_messages.to_score(request, core.limits)
        return score_embed_messages.from_scores(
            await core.score(command, deadline_of(context), self._lifecycle.accepting)
        )

    async def Embed(self, request: generation_pb2.EmbedRequest, context: Context) -> generation_pb2.EmbedResponse:
        """Return the means of the final hidden states."""
        core = self._lifecycle.accepting()
        command = score_embed_messages.to_embed(request, core.limits)
        results = await core.embed(command, deadline_of(context), self._lifecycle.accepting)
        return score_embed_messages.from_embeddings(results, normalize=command.normalize)

    async def DetectWatermark(
        self, request: generation_pb2.DetectWatermarkRequest, context: Context
    ) -> generation_pb2.DetectWatermarkResponse:
        """Return the evidence of a watermark in given tokens."""
        core = self._lifecycle.accepting()
        command = convert.to_detect_watermark(request, core.limits)
        evidence = await core.detect_watermark(command, deadline_of(context))
        return generation_pb2.DetectWatermarkResponse(evidence=convert.from_evidence(evidence))

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        """End live requests of any stream. They finish with reason ABORTED."""
        hub = self._lifecycle.loaded().hub
        wanted = hub.live_ids() if request.all else request.request_ids
        return generation_pb2.AbortResponse(request_ids=hub.abort(wanted))


def _ended(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is None
