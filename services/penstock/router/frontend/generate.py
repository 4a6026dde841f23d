"""Serving of one TextService stream from request to Finished: admission, prompt, backend, deltas, end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import grpc

from penstock.common.block_hashes import routing_salt
from penstock.common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    trailing_metadata,
)
from penstock.common.logging import get_logger
from penstock.common.pace import Demand
from penstock.common.request_context import current_request_id, new_request_id
from penstock.common.tracing import SpanKind, stage
from penstock.http2.metadata import Metadata
from penstock.router.backends.forecast import OVERLOADED
from penstock.router.chat.chat_output import ChatParser, make_parser
from penstock.router.frontend import convert
from penstock.router.frontend.admission import fair_share_key, serving_tenant, tenant_of
from penstock.router.frontend.drain import GraceEnd, grace_over
from penstock.router.frontend.parts import Parts
from penstock.router.frontend.stream_writer import StreamKind, StreamWriter
from penstock.router.keys.key_account import KeyAccount
from penstock.router.keys.key_desk import require_model
from penstock.router.metrics import UNKNOWN_MODEL
from penstock.router.requests.attempt_spans import describe_request
from penstock.router.requests.request_state import RequestSpec, RequestState, Timings
from penstock.router.tokenizer.pipeline import Prompt
from penstock.serving.transport import ServerCall
from penstock.v1 import model_pb2, text_pb2

# Block of a caller without a key.
_NOTHING = contextlib.nullcontext()
_log = get_logger("penstock.router")


class TextFlow:
    """Runs streams, each in its handler's task, and keeps the request ids of the live ones."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._live_ids: set[str] = set()

    async def run(self, request: convert.PublicRequest, kind: StreamKind, context: ServerCall) -> None:
        """Serve one stream. Raises PenstockError, which the interceptor maps to a status."""
        call = _StreamedCall(request, kind, context, self._parts)
        status = "INTERNAL"
        try:
            convert.check(request, self._parts.config)
            request_id = self._claim(request)
            try:
                async with self._parts.drain.attended() as grace_end:
                    await call.serve(request_id, grace_end)
            finally:
                self._live_ids.discard(request_id)
            status = "OK"
        except asyncio.CancelledError:
            status = "DEADLINE_EXCEEDED" if call.is_late else "CANCELLED"
            raise
        except PenstockError as error:
            status = error.code.name
            raise
        finally:
            self._parts.metrics.requests(kind.name, status).inc()
            self._parts.metrics.model_requests(call.model or UNKNOWN_MODEL, status).inc()

    def _claim(self, request: convert.PublicRequest) -> str:
        """Reserve and return the request's id. Raises InvalidArgument when the client chose one that is live."""
        request_id = request.request_id
        if request_id and request_id in self._live_ids:
            raise InvalidArgument("request_id", "is the id of a request in progress", reason="DUPLICATE_REQUEST_ID")
        if not request_id:
            request_id = current_request_id.get() or new_request_id()
            if request_id in self._live_ids:
                request_id = new_request_id()
        self._live_ids.add(request_id)
        return request_id


class _StreamedCall:
    """One stream on its way through the stages."""

    def __init__(self, request: convert.PublicRequest, kind: StreamKind, context: ServerCall, parts: Parts) -> None:
        self._request = request
        self._kind = kind
        self._context = context
        self._parts = parts
        self.model = self._adapter = ""
        self._timings = Timings(time.monotonic())
        remaining = context.time_remaining()
        self._deadline = None if remaining is None else self._timings.received_at + remaining
        self._timings.deadline = self._deadline

    @property
    def is_late(self) -> bool:
        """True once the deadline has passed."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _left(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    async def serve(self, request_id: str, grace_end: GraceEnd) -> None:
        """Serve the stream after admission."""
        parts = self._parts
        # Chosen once: a stream must not move to another model.
        self.model, self._adapter = parts.pool.choose_model(self._request.model, self._request.adapter)
        describe_request(self._kind.operation, self.model, self._adapter, self._request.config)
        parts.attempts.check_capacity(self.model, self._adapter)
        metadata = self._context.invocation_metadata()
        account = self._account(metadata)
        tenant = tenant_of(parts.config, metadata) if account is None else account.tenant
        served_as = serving_tenant(tenant, metadata)
        demand = convert.to_demand(self._request, fair_share_key(served_as), self._info())
        # A stack: everything held is given back even if one release fails.
        with _NOTHING if account is None else account, _Held() as held:
            live = parts.metrics.model_live(self.model or UNKNOWN_MODEL)
            live.inc()
            held.add(live.dec)
            coming = _HeldPlace(parts.forecast.expect(self.model, demand, self._left()))
            held.add(coming.give_back)
            with stage("admission"):
                await parts.admission.enter(served_as, self._left(), parts.forecast.tokens(self.model, demand))
            place = _HeldPlace(partial(parts.admission.leave, served_as))
            held.add(place.give_back)
            await parts.attempts.returns.end(self.model, self._adapter, self._left())
            if self._adapter:
                await parts.attempts.adapters.require(self.model, self._adapter, self._left())
            room = _HeldPlace(parts.attempts.prepare(self.model, self._adapter))
            held.add(room.give_back)
            self._timings.route = time.monotonic() - self._timings.received_at
            with stage("tokenize", SpanKind.CLIENT):
                prompt = await self._prompt()
            if account is not None:
                await account.reserve(*convert.most_tokens(prompt, self._request, self._info()), request_id)
            state = self._make_state(request_id, tenant, prompt, demand)
            # All but the place: from there on the backends' own figures count the request, placed or not.
            await self._stream(state, prompt, place, (coming, room), grace_end, account)

    def _account(self, metadata: Metadata) -> KeyAccount | None:
        """Return the account of the caller's key; None for a caller without a key."""
        keys = self._parts.keys
        if keys is None or (key := keys.find(metadata, self._kind.name)) is None:
            return None
        # What an adapter's or a model's name stood for is known now.
        require_model(key, self.model, self._adapter)
        return keys.begin(key, self.model)

    def _info(self) -> model_pb2.GetModelInfoResponse | None:
        return self._parts.pool.models.get(self.model)

    async def _prompt(self) -> Prompt:
        request, pipeline = self._request, self._parts.pipeline
        if isinstance(request, text_pb2.ChatRequest):
            prompt, is_either = await pipeline.chat(request, self._left()), convert.may_call_in_place(request)
            if convert.forces_calls(request):
                await pipeline.force_calls(
                    prompt,
                    convert.forced_schemas(request),
                    max_calls=1 if request.tool_choice.function else self._max_calls(request),
                    timeout=self._left(),
                )
            elif request.HasField("constraint") and not is_either:
                await pipeline.free_thought(prompt, self._left())
            elif convert.parses_tools(request) and (is_either or self._parts.config.hold_tool_calls):
                hold = pipeline.calls_or_answer if is_either else pipeline.hold_calls
                await hold(
                    prompt,
                    convert.schemas_of(request),
                    convert.strict_tools(request),
                    max_calls=self._max_calls(request),
                    timeout=self._left(),
                )
        else:
            prompt = await pipeline.text(request, self._left())
        convert.begin_prompt(prompt, request, self._info())
        convert.check_prompt(prompt, request, self._info())
        self._timings.template, self._timings.tokenize = prompt.template_seconds, prompt.tokenize_seconds
        return prompt

    def _make_state(self, request_id: str, tenant: str, prompt: Prompt, demand: Demand) -> RequestState:
        request, parts = self._request, self._parts
        info = self._info()
        salt = convert.cache_salt(tenant, request.cache_salt)
        names_salt = routing_salt(salt, self._adapter)
        block_size = info.kv.block_size if info is not None else 0
        spec = RequestSpec(
            request_id=request_id,
            template=convert.to_template(
                request,
                prompt,
                model=self.model,
                adapter=self._adapter,
                salt=salt,
                key=demand.tenant,
                fingerprint=parts.link.fingerprint,
            ),
            num_sequences=convert.num_sequences(request, info),
            decode_options=convert.to_decode_options(request, prompt, parts.detokenizer.context),
            make_parser=self._parser(prompt),
            wants_token_ids=request.output.return_token_ids,
            wants_logprobs=request.output.HasField("top_logprobs"),
            wants_tensors=convert.wants_tensors(request.output),
            model=self.model,
            adapter=self._adapter,
            demand=replace(demand, prompt_tokens=convert.num_prompt_tokens(prompt, request)),
            session=convert.session_key(tenant, request.session_id, self._adapter),
            prefix_hashes=convert.prefix_hashes(prompt, request, block_size, names_salt, parts.config.max_prefix_blocks)
            if block_size
            else [],
            warnings=convert.warnings_of(request, prompt, hides_tools=parts.pipeline.hides_tools),
        )
        config = parts.config
        is_large = spec.wants_tensors or (spec.wants_logprobs and convert.comes_in_bursts(request, info))
        bound = config.max_buffered_tensor_bytes if is_large else config.max_buffered_bytes
        return RequestState(spec, self._timings, parts.detokenizer.drop, parts.metrics, bound)

    def _parser(self, prompt: Prompt) -> Callable[[], ChatParser] | None:
        request = self._request
        if not isinstance(request, text_pb2.ChatRequest):
            return None
        return partial(
            make_parser,
            prompt.chat,
            parse_tools=convert.parses_tools(request),
            in_reasoning=prompt.opens_reasoning,
            schemas=convert.schemas_of(request),
            max_calls=self._max_calls(request),
            distinct_calls=convert.forces_calls(request),
        )

    def _max_calls(self, request: text_pb2.ChatRequest) -> int:
        return 1 if convert.allows_one_call(request) else self._parts.config.max_tool_calls

    async def _stream(
        self,
        state: RequestState,
        prompt: Prompt,
        place: _HeldPlace,
        coming: Sequence[_HeldPlace],
        grace_end: GraceEnd,
        account: KeyAccount | None,
    ) -> None:
        parts, loop = self._parts, asyncio.get_running_loop()
        await parts.pipeline.negative_prompt(state.spec.template.config, self._left())
        echo = await self._echo(prompt)
        # The last backend may have gone while the prompt was made.
        await parts.attempts.returns.end(self.model, self._adapter, self._left())
        if self._adapter:
            # It may have been unloaded while the prompt was made.
            await parts.attempts.adapters.require(self.model, self._adapter, self._left())
        left = self._left()
        timer = None if left is None else loop.call_later(left, state.fail, _late())
        writer = StreamWriter(state, prompt, self._kind, parts, self._context, self._left, account)
        last_wait = _LastWait(state, writer, parts.config.slow_reader_grace_seconds, self._hang_up)

        def on_close() -> None:
            # The handler may be stuck in a write to a reader that was cut off; meanwhile it must hold no place.
            if state.error is not None:
                place.give_back()
                writer.stop_waiting()
            last_wait.begin()

        state.on_close = on_close
        grace_end.state, grace_end.error = state, lambda: writer.as_seen(grace_over())
        try:
            begin = time.monotonic()
            for one in coming:
                one.give_back()
            left = self._left()
            if left is not None and state.spec.demand is not None:
                # Others may have been placed while the prompt was made: the backend would refuse it a step later.
                parts.forecast.check(self.model, state.spec.demand, left)
            parts.attempts.place(state)
            self._timings.route += time.monotonic() - begin
            await writer.run(echo)
        except ResourceExhausted as error:
            if error.reason == OVERLOADED and state.spec.demand is not None:
                parts.forecast.note_refused(state.spec.demand.tenant)
            raise
        except InvalidArgument as error:
            # Neither raised from that error, which it may be, nor through a variable: both make reference cycles that
            # hold the request until a garbage collection.
            raise convert.public_error(error, self._request) from None
        finally:
            state.close()
            last_wait.end()
            if account is not None and state.started is not None:
                # It ended without Finished: what backends generated counts, and a prompt that one began.
                account.note(convert.num_prompt_tokens(prompt, self._request), state.num_tokens)
            state.release()
            if timer is not None:
                timer.cancel()

    def _hang_up(self, error: PenstockError | None, handler: asyncio.Task[Any]) -> None:
        """Queue the status behind the unread message, and end the handler."""
        if error is None:
            self._parts.metrics.slow_readers.inc()
            error = ResourceExhausted("the reader of this stream does not read its end", reason="SLOW_READER")
        status = asyncio.ensure_future(_abort(self._context, error))
        self._parts.hanging_up.add(status)
        status.add_done_callback(self._parts.hanging_up.discard)
        asyncio.get_running_loop().call_soon(handler.cancel)

    async def _echo(self, prompt: Prompt) -> str:
        if not self._request.output.echo:
            return ""
        skip = convert.skips_special_tokens(self._request)
        return await self._parts.pipeline.echo_text(prompt, self._left(), skip_special_tokens=skip)


async def _abort(context: ServerCall, error: PenstockError) -> None:
    # InternalError: the connection is gone, so there is no call to end.
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.InternalError):
        await context.abort(error.code, error.message, trailing_metadata(error))


class _Held:
    """Everything that a call holds, given back at the end of the block, the last first: of ExitStack what a request
    needs."""

    __slots__ = ("_give_back",)

    def __init__(self) -> None:
        self._give_back: list[Callable[[], None]] = []

    def add(self, give_back: Callable[[], None]) -> None:
        """Call `give_back` at the end."""
        self._give_back.append(give_back)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._give_back:
            try:
                self._give_back.pop()()
            except BaseException:
                self.__exit__()
                raise


class _HeldPlace:
    """A held place that is given back once."""

    __slots__ = ("_give_back",)

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def give_back(self) -> None:
        """Give back the place; later calls do nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class _LastWait:
    """Limit on each write of a handler after its request is over: the grace."""

    def __init__(
        self,
        state: RequestState,
        writer: StreamWriter,
        grace_seconds: float,
        hang_up: Callable[[PenstockError | None, asyncio.Task[Any]], None],
    ) -> None:
        self._state = state
        self._writer = writer
        self._grace_seconds = grace_seconds
        self._hang_up = hang_up
        self._handler = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start the limit: the request is over."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._grace_seconds, self._look, self._writer.num_written)

    def end(self) -> None:
        """Stop the limit: the handler has ended, too."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, num_written: int) -> None:
        if self._state.error is None and self._writer.num_written > num_written:
            self.begin()
        elif self._handler is not None:
            self._hang_up(self._state.error, self._handler)


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed", reason="DEADLINE_EXCEEDED")
