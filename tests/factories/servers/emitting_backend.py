"""Generation backend without a model: a real gRPC server that emits scripted ids, at will or as fast as it can.

It is for the router's tests, which step, freeze and break it, and for benchmarks, which need only a stream of tokens:
`cd tests; python -m factories.servers.emitting_backend --port 50052 --tokens 128`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from factories.engine.token_rows import in_rows
from factories.servers.honest_model import HonestAnswer, HonestModel
from factories.servers.plain_server import plain_server
from factories.servers.watched_health import WatchedHealth
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from penstock.common.config import ServerConfig
from penstock.common.errors import InvalidArgument, NotFound, PenstockError, to_status, trailing_metadata
from penstock.generation.options.request_options import ModelFacts
from penstock.router.requests.prompt_length import num_prompt_tokens
from penstock.serving.server import STOP_GRACE_SECONDS
from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    config_pb2,
    generation_pb2,
    model_pb2,
    model_pb2_grpc,
)

SERVICES = ("", "penstock.v1.GenerationService")
Script = Callable[[generation_pb2.GenerateRequest], Sequence[int]]


def count_up(tokens: int, vocabulary: int = 1000, first: int = 300) -> Script:
    """Make ids that depend on the position alone, so that a moved stream can be compared with one that was not."""
    # Tests ask for a million of them.
    ids = (list(range(first, first + vocabulary)) * (1 + tokens // vocabulary))[:tokens]
    return lambda _: ids


@dataclass(slots=True)
class Running:
    """A request being answered."""

    request: generation_pb2.GenerateRequest
    ids: Sequence[int]
    # Emitted ids of each returned sequence.
    positions: list[int]
    next_seq: int = 0
    # How its sequences end; None: as the backend's knobs say.
    reason: common_pb2.FinishReason | None = None
    started: bool = False
    ended: set[int] = field(default_factory=set)


@dataclass
class EmittingBackend:
    """Backend that emits one token per sequence and step. Its attributes may be changed while it runs."""

    script: Script = field(default_factory=lambda: count_up(8))
    model: str = "penstock-demo"
    # Further names of it.
    aliases: Sequence[str] = ()
    fingerprint: str = ""
    block_size: int = 16
    kv_blocks: int = 1024
    max_queued: int = 0
    max_context: int = 1 << 22
    # 0: not told.
    vocab_size: int = 4096
    # Seconds between steps.
    step_seconds: float = 0.0
    finish_reason: int = common_pb2.FINISH_REASON_STOP_EOS
    stop_string: str | None = None
    tokens_per_step: int = 1
    # Ids that stand beside every chosen one, as many as a request asks for.
    alternatives: Sequence[int] = ()
    # Ends an answer at max_new_tokens.
    obeys_budget: bool = True
    # True: options, lengths and ends of answers are those of a generation service that keeps every promise.
    is_honest: bool = False
    # Steps that may still be taken; None: any number.
    allowance: int | None = None
    # Refuses every request, or those for which the function returns an error.
    refuse: PenstockError | Callable[[generation_pb2.GenerateRequest], PenstockError | None] | None = None
    # Number of waiting requests of others that it reports.
    extra_load: int = 0
    draining: bool = False
    # What it tells of cached prefixes, one with each report, to those who ask for it.
    told: list[admin_pb2.PrefixChanges] = field(default_factory=list)
    # Speed that it reports; None: none, as a service of an earlier release.
    pace: admin_pb2.Pace | None = None
    # Takes requests and never answers them.
    forgets: bool = False
    # Changes a message before it is sent; its result is sent.
    distort: Callable[[generation_pb2.SessionResponse], generation_pb2.SessionResponse] | None = None
    # Bytes of a message, after all else.
    serialize: Callable[[generation_pb2.SessionResponse], bytes] = generation_pb2.SessionResponse.SerializeToString
    # As in a generation service of this release: plain tokens are rows with the handles of their requests.
    uses_handles: bool = True
    # The same: commands may come several in a message.
    takes_commands: bool = True

    transport: str = field(default_factory=lambda: os.environ.get("PENSTOCK_TEST_TRANSPORT", ServerConfig.transport))

    # Its LoRA adapters: name -> path; and folders, by path, that LoadAdapter finds below its root. It counts changes
    # that are made by `set_adapters` or by calls.
    adapters: dict[str, str] = field(default_factory=dict)
    # Digests of some of them.
    digests: dict[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    adapters_version: int = 0
    # ListAdapters waits until this is set, LoadAdapter until that.
    may_list: asyncio.Event = field(default_factory=asyncio.Event)
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    list_calls: int = 0
    adapter_loads: list[admin_pb2.LoadAdapterRequest] = field(default_factory=list)

    # Ids that end a sequence, as GetModelInfo tells; empty: not told.
    eos_token_ids: tuple[int, ...] = ()
    # Tells one process from another: a start is one. Empty: not told.
    process_start_id: str | None = None
    port: int = 0
    submitted: list[generation_pb2.GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    # Messages of commands.
    messages: int = 0
    info_calls: int = 0
    health_watches: int = 0
    serving: bool = True
    steps: int = 0
    sessions: list[Session] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._frozen = False
        self._starts = 0
        self.watchers = 0
        self._server: Any = None
        self.health: HealthServicer = WatchedHealth(self._watched)
        self.may_list.set()
        self.may_load.set()
        self.adapters_version = self.adapters_version or int(bool(self.adapters))

    def set_adapters(self, **adapters: str) -> None:
        """Know other adapters, from the next report on."""
        self.adapters, self.adapters_version = adapters, self.adapters_version + 1

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> int:
        """Requests being answered, over all sessions."""
        return sum(len(session.running) for session in self.sessions)

    async def start(self) -> EmittingBackend:
        """Listen, on the same port as before if there was one."""
        self._frozen = False
        self._starts += 1
        self._server = plain_server(self.transport, self.port)
        self.health = WatchedHealth(self._watched)
        await self.set_serving(self.serving)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        servicer: Any = _Servicer(self)
        session = grpc.stream_stream_rpc_method_handler(
            servicer.Session,
            request_deserializer=generation_pb2.SessionRequest.FromString,
            response_serializer=lambda message: self.serialize(message),
        )
        generation = grpc.method_handlers_generic_handler(SERVICES[1], {"Session": session})
        self._server.add_generic_rpc_handlers((generation,))
        admin_pb2_grpc.add_GenerationAdminServiceServicer_to_server(servicer, self._server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(servicer, self._server)
        self.port = await self._server.open_port()
        await self._server.start()
        return self

    async def __aenter__(self) -> EmittingBackend:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self, grace: float | None = None) -> None:
        """Cut every stream at once (or after `grace`) and free the port."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace)
            self.sessions.clear()
            await self.notify()

    async def set_serving(self, serving: bool) -> None:
        """Change health."""
        status = health_pb2.HealthCheckResponse
        for name in SERVICES:
            await self.health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def freeze(self) -> None:
        """Stop emitting and reporting without closing anything."""
        self._frozen = True
        await self.notify()

    async def allow(self, steps: int | None) -> None:
        """Allow this many further steps (None: any number)."""
        self.allowance = None if steps is None else (self.allowance or 0) + steps
        await self.notify()

    async def beat(self) -> None:
        """Send a heartbeat on every session."""
        for session in self.sessions:
            session.beats = True
        await self.notify()

    async def end_sessions(self) -> None:
        """End every session with OK, finished or not."""
        for session in self.sessions:
            session.ended = True
        await self.notify()

    async def _watched(self) -> None:
        self.health_watches += 1
        await self.notify()

    async def notify(self) -> None:
        """Wake `until`: a condition may hold now."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition` to hold."""
        self.watchers += 1
        try:
            async with self._changed:
                await self._changed.wait_for(condition)
        finally:
            self.watchers -= 1

    def load(self) -> admin_pb2.Load:
        """Load that WatchLoad reports."""
        return admin_pb2.Load(
            running_requests=self.running,
            waiting_requests=self.extra_load,
            kv_blocks_total=self.kv_blocks,
            kv_blocks_free=self.kv_blocks,
            step=self.steps,
            draining=self.draining,
            state=common_pb2.MODEL_STATE_READY,
            max_queued_requests=self.max_queued,
            pace=self.pace,
            adapters_version=self.adapters_version,
            process_start_id=f"{self.port}-{self._starts}" if self.process_start_id is None else self.process_start_id,
        )

    def honest_answer(self, request: generation_pb2.GenerateRequest) -> HonestAnswer:
        """Answer as a generation service that keeps every promise. Raises PenstockError as it does."""
        facts = ModelFacts(
            self.model,
            vocab_size=self.vocab_size,
            max_context_tokens=self.max_context,
            has_token_bytes=True,
            has_adapter=self.adapters.__contains__,
        )
        return HonestModel(facts).answer(request, self.script(request))

    def ids_for(self, request: generation_pb2.GenerateRequest) -> Sequence[int]:
        """Ids of the answer."""
        ids = self.script(request)
        has_budget = self.obeys_budget and request.config.HasField("max_new_tokens")
        return ids[: request.config.max_new_tokens] if has_budget else ids

    def may_step(self) -> bool:
        """True when the next step may be taken now."""
        return not self._frozen and self.allowance != 0

    @property
    def is_frozen(self) -> bool:
        return self._frozen


class Session:
    """One Session stream."""

    def __init__(self, backend: EmittingBackend) -> None:
        self._backend = backend
        self.running: dict[str, Running] = {}
        # Running requests by id and epoch.
        self._handles: dict[tuple[str, int], int] = {}
        self.refusals: list[generation_pb2.SessionEvent] = []
        # True: a heartbeat is due.
        self.beats = False
        self.ended = False

    def submit(self, request: generation_pb2.GenerateRequest, handle: int) -> None:
        backend = self._backend
        if backend.uses_handles:
            self._handles[request.request_id, request.attempt_epoch] = handle
        backend.submitted.append(request)
        refusal = backend.refuse(request) if callable(backend.refuse) else backend.refuse
        if refusal is None and backend.vocab_size and max(request.prompt_token_ids, default=0) >= backend.vocab_size:
            # Nobody has a text for it.
            refusal = InvalidArgument("prompt_token_ids", f"must be ids below {backend.vocab_size}")
        if request.adapter and request.adapter not in backend.adapters:
            refusal = NotFound("adapter: not here", reason="ADAPTER_NOT_FOUND", field="adapter")
        elif request.adapter_digest not in ("", backend.digests.get(request.adapter, "")):
            refusal = NotFound("adapter_digest: another", reason="ADAPTER_DIFFERS", field="adapter_digest")
        answer: HonestAnswer | None = None
        if refusal is None and backend.is_honest:
            try:
                answer = backend.honest_answer(request)
            except PenstockError as error:
                refusal = error
        if refusal is not None:
            self._refuse(request, refusal)
            return
        count = max(1, request.config.num_return_sequences)
        resumed = [len(ids.ids) for ids in request.resumed_token_ids] or [0] * count
        if not backend.forgets:
            ids = backend.ids_for(request) if answer is None else answer.ids
            reason = None if answer is None else answer.reason
            self.running[request.request_id] = Running(request, ids, resumed, reason=reason)

    def break_off(self, error: PenstockError) -> None:
        """End every running request with `error`."""
        for running in self.running.values():
            self._refuse(running.request, error)
        self.running.clear()

    def _refuse(self, request: generation_pb2.GenerateRequest, error: PenstockError) -> None:
        status = to_status(error)
        told = generation_pb2.RequestError(
            code=status.code, message=status.message, status_details=status.SerializeToString()
        )
        self.refusals.append(
            generation_pb2.SessionEvent(request_id=request.request_id, attempt_epoch=request.attempt_epoch, error=told)
        )

    def has_work(self) -> bool:
        return self.beats or bool(self.refusals) or (bool(self.running) and self._backend.may_step())

    def step(self) -> generation_pb2.SessionResponse:
        """Make one message: an event or more for every request."""
        backend = self._backend
        message = generation_pb2.SessionResponse(step=backend.steps, heartbeat=self.beats)
        self.beats = False
        message.events.extend(self.refusals)
        self.refusals.clear()
        if backend.may_step():
            if backend.allowance is not None:
                backend.allowance -= 1
            backend.steps += 1
            for running in list(self.running.values()):
                self._advance(running, message)
        distorted = backend.distort(message) if backend.distort is not None else message
        return in_rows(distorted, self._handles)

    def _advance(self, running: Running, message: generation_pb2.SessionResponse) -> None:
        request = running.request
        request_id, epoch = request.request_id, request.attempt_epoch
        add = message.events.add
        if not running.started:
            running.started = True
            event = add(request_id=request_id, attempt_epoch=epoch)
            event.started.request_id, event.started.seed = request_id, request.seed
            event.started.model = self._backend.model
            event.started.prompt_tokens = num_prompt_tokens(request, len(request.prompt_token_ids))
            event.started.adapter_digest = self._backend.digests.get(request.adapter, "")
        live = False
        for index, position in enumerate(running.positions):
            if index in running.ended:
                continue
            end = min(position + self._backend.tokens_per_step, len(running.ids))
            event = add(request_id=request_id, attempt_epoch=epoch)
            delta = event.delta
            delta.seq, delta.index = running.next_seq, index
            delta.token_ids.extend(running.ids[position:end])
            if request.output.HasField("top_logprobs"):
                for token_id in running.ids[position:end]:
                    position = delta.logprobs.add()
                    position.chosen.CopyFrom(common_pb2.TokenLogprob(token_id=token_id, logprob=-0.5, rank=1))
                    others = [one for one in self._backend.alternatives if one != token_id]
                    for rank, other in enumerate([token_id, *others][: request.output.top_logprobs], 1):
                        position.top.add(token_id=other, logprob=-0.5 * rank, rank=rank)
            running.next_seq += 1
            running.positions[index] = end
            if end == len(running.ids):
                running.ended.add(index)
                delta.finished.CopyFrom(self._result(running, index))
            else:
                live = True
        if not live:
            self._finish(running, message)

    def _result(self, running: Running, index: int) -> common_pb2.SequenceResult:
        config = running.request.config
        has_budget = self._backend.obeys_budget and config.HasField("max_new_tokens")
        is_cut = has_budget and len(running.ids) == config.max_new_tokens
        reason: Any = common_pb2.FINISH_REASON_LENGTH if is_cut else self._backend.finish_reason
        if running.reason is not None:
            reason = running.reason
        result = common_pb2.SequenceResult(index=index, finish_reason=reason, token_count=len(running.ids))
        if self._backend.stop_string is not None:
            result.stop_string = self._backend.stop_string
        return result

    def _finish(self, running: Running, message: generation_pb2.SessionResponse) -> None:
        request = running.request
        event = message.events.add(request_id=request.request_id, attempt_epoch=request.attempt_epoch)
        finished = event.finished
        finished.last_seq = running.next_seq - 1
        for index in range(len(running.positions)):
            finished.sequences.append(self._result(running, index))
        finished.usage.prompt_tokens = num_prompt_tokens(request, len(request.prompt_token_ids))
        finished.usage.completion_tokens = len(running.ids) * len(running.positions)
        finished.timings.queue_seconds, finished.timings.prefill_seconds = 0.001, 0.002
        finished.timings.decode_seconds = 0.003
        del self.running[request.request_id]


class _Servicer:
    """GenerationService, GenerationAdminService and ModelService, as far as the router uses them."""

    def __init__(self, backend: EmittingBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        """Refuse any other RPC."""

        async def unimplemented(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, name)

        return unimplemented

    async def GetModelInfo(self, _: Any, __: Any) -> model_pb2.GetModelInfoResponse:
        backend = self._backend
        backend.info_calls += 1
        return model_pb2.GetModelInfoResponse(
            model=backend.model,
            aliases=backend.aliases,
            architecture="Emitting",
            kv=model_pb2.KvGeometry(num_blocks=backend.kv_blocks, block_size=backend.block_size),
            limits=model_pb2.Limits(max_context_tokens=backend.max_context, max_queued_requests=backend.max_queued),
            vocab_size=backend.vocab_size,
            eos_token_ids=backend.eos_token_ids,
            default_stop=config_pb2.StopConfig(),
            tokenizer_fingerprint=backend.fingerprint,
            state=common_pb2.MODEL_STATE_READY,
            percent_loaded=100.0,
            takes_session_commands=backend.takes_commands,
        )

    async def ListAdapters(self, _: Any, __: Any) -> admin_pb2.ListAdaptersResponse:
        backend = self._backend
        backend.list_calls += 1
        await backend.notify()
        await backend.may_list.wait()
        found = [admin_pb2.Adapter(name=name, path=path) for name, path in backend.adapters.items()]
        return admin_pb2.ListAdaptersResponse(adapters=found, version=backend.adapters_version)

    async def LoadAdapter(self, request: admin_pb2.LoadAdapterRequest, context: Any) -> admin_pb2.LoadAdapterResponse:
        backend = self._backend
        backend.adapter_loads.append(request)
        await backend.notify()
        await backend.may_load.wait()
        path = request.path or request.name
        if request.name in backend.adapters and not request.replace:
            await _refuse(context, InvalidArgument("name", "is there", reason="ADAPTER_EXISTS"))
        if path not in backend.folders:
            await _refuse(context, InvalidArgument("path", "is not there", reason="ADAPTER_PATH"))
        backend.set_adapters(**{**backend.adapters, request.name: path})
        return admin_pb2.LoadAdapterResponse(
            adapter=admin_pb2.Adapter(name=request.name, path=path), version=backend.adapters_version
        )

    async def UnloadAdapter(self, request: admin_pb2.UnloadAdapterRequest, _: Any) -> admin_pb2.UnloadAdapterResponse:
        backend = self._backend
        backend.set_adapters(**{name: path for name, path in backend.adapters.items() if name != request.name})
        return admin_pb2.UnloadAdapterResponse(version=backend.adapters_version)

    async def WatchLoad(
        self, request: admin_pb2.WatchLoadRequest, _: Any
    ) -> AsyncIterator[admin_pb2.WatchLoadResponse]:
        backend = self._backend
        sent: admin_pb2.Load | None = None
        num_told = 0
        while True:
            load, told = backend.load(), backend.told[num_told : num_told + 1] if request.prefixes else []
            if (load != sent or told) and not backend.is_frozen:
                sent, num_told = load, num_told + len(told)
                yield admin_pb2.WatchLoadResponse(load=load, prefixes=told[0] if told else None)
            await asyncio.sleep(request.min_interval_seconds)

    async def Session(self, commands: AsyncIterator[generation_pb2.SessionRequest], context: Any) -> None:
        backend = self._backend
        session = Session(backend)
        backend.sessions.append(session)
        reader = asyncio.ensure_future(self._read(commands, session))
        try:
            while not session.ended:
                if not session.has_work():
                    await backend.until(lambda: session.ended or session.has_work())
                    continue
                await context.write(session.step())
                if backend.watchers:
                    await backend.notify()
                await asyncio.sleep(backend.step_seconds)
        finally:
            reader.cancel()
            if session in backend.sessions:
                backend.sessions.remove(session)
                # Somebody may wait for its end.
                await backend.notify()

    async def _read(self, commands: AsyncIterator[generation_pb2.SessionRequest], session: Session) -> None:
        async for message in commands:
            self._backend.messages += 1
            for command in message.commands.commands if message.HasField("commands") else (message,):
                if command.HasField("submit"):
                    session.submit(command.submit, command.handle)
                else:
                    self._backend.aborted.append(command.abort.request_id)
                    session.running.pop(command.abort.request_id, None)
            await self._backend.notify()


async def _refuse(context: Any, error: PenstockError) -> None:
    await context.abort(error.code, error.message, trailing_metadata(error))


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=50052)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--max-context", type=int, default=EmittingBackend.max_context, help="tokens of a sequence")
    parser.add_argument("--allowance", type=int, help="steps until SIGUSR1; the rest after it")
    parser.add_argument("--transport", choices=("grpc", "asyncio"), default=ServerConfig.transport)
    parser.add_argument("--fingerprint", default="", help="tokenizer fingerprint to report")
    args = parser.parse_args()
    backend = EmittingBackend(
        script=count_up(args.tokens),
        port=args.port,
        tokens_per_step=args.tokens_per_step,
        step_seconds=args.step_seconds,
        allowance=args.allowance,
        fingerprint=args.fingerprint,
        transport=args.transport,
        max_context=args.max_context,
        is_honest=True,
    )
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGUSR1, lambda: asyncio.ensure_future(backend.allow(None)))
    async with backend:
        await stopped.wait()
        await backend.stop(STOP_GRACE_SECONDS)


if __name__ == "__main__":
    asyncio.run(_main())
