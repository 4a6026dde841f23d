"""A generation backend that emits tokens at will, for benchmarks/wire.py: one message a step for all requests.

Every answer is the same ids. A request's `config.seed` is its slot in the file that the client counts what it has
received in; with `--window` a request is given its next token only when so many are on their way to the client.
Messages are put together from bytes made once, so that the backend takes as little of the machine as it can.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in (".", "services")]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from penstock.common.config import ServerConfig
from penstock.serving.grpc_options import server_options
from penstock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

from benchmarks._processes import end_with_parent
from benchmarks._wire_pace import Pace, add_backend_flags
from benchmarks._wire_proto import block, varint

MODEL = "penstock-demo"
VOCABULARY = 1 << 20


@dataclass(slots=True)
class Running:
    """A request being answered."""

    request: generation_pb2.GenerateRequest
    slot: int
    # request_id and attempt_epoch, serialized.
    head: bytes
    # A varint; empty where the router gave none.
    handle: bytes
    position: int = 0


class TokenSource:
    """Makes the messages of one Session."""

    def __init__(self, ids: list[int], received: memoryview, pace: Pace) -> None:
        """`received[slot]` counts tokens at the client."""
        parts = [ids[at : at + pace.interval] for at in range(0, len(ids), pace.interval)]
        self._tokens = len(ids)
        # Sequence numbers of deltas of one token, as varints: these travel by handles, longer deltas do not.
        self._seqs = [varint(seq) for seq in range(len(parts))]
        self._ids = [varint(one) for one in ids] if pace.interval == 1 else []
        self._deltas = [
            block(4, generation_pb2.TokenDelta(seq=seq, token_ids=part).SerializeToString())
            for seq, part in enumerate(parts[:-1])
        ]
        reason: Any = common_pb2.FINISH_REASON_LENGTH
        self._result = common_pb2.SequenceResult(finish_reason=reason, token_count=len(ids))
        last = generation_pb2.TokenDelta(seq=len(parts) - 1, token_ids=parts[-1], finished=self._result)
        self._deltas.append(block(4, last.SerializeToString()))
        self._received, self._pace = received, pace
        self.running: dict[str, Running] = {}
        self.wakeup = asyncio.Event()

    def submit(self, request: generation_pb2.GenerateRequest, handle: int) -> None:
        """Answer `request` from the next step on."""
        ids = generation_pb2.SessionEvent(request_id=request.request_id, attempt_epoch=request.attempt_epoch)
        number = varint(handle) if handle and self._ids else b""
        self.running[request.request_id] = Running(request, request.config.seed, ids.SerializeToString(), number)
        self.wakeup.set()

    def step(self) -> bytes:
        """A SessionResponse with the next token of every request that may have one; empty when none may."""
        events: list[bytes] = []
        handles: list[bytes] = []
        seqs: list[bytes] = []
        ids: list[bytes] = []
        pace, last = self._pace, len(self._deltas) - 1
        for running in list(self.running.values()):
            position = running.position
            if pace.window and position * pace.interval - self._received[running.slot] >= pace.window:
                continue
            if running.handle and 0 < position < last:
                handles.append(running.handle)
                seqs.append(self._seqs[position])
                ids.append(self._ids[position])
                running.position = position + 1
                continue
            if not position:
                events.append(block(1, running.head + block(3, self._started(running))))
            events.append(block(1, running.head + self._deltas[position]))
            running.position = position + 1
            if running.position == len(self._deltas):
                events.append(block(1, running.head + block(5, self._finished(running))))
                del self.running[running.request.request_id]
        if handles:
            columns = (block(field, b"".join(column)) for field, column in enumerate((handles, seqs, ids), 1))
            events.append(block(1, block(7, b"".join(columns))))
        return b"".join(events)

    def _started(self, running: Running) -> bytes:
        request = running.request
        prompt = len(request.prompt_token_ids)
        return generation_pb2.Started(
            request_id=request.request_id, seed=request.seed, model=MODEL, prompt_tokens=prompt
        ).SerializeToString()

    def _finished(self, running: Running) -> bytes:
        finished = generation_pb2.Finished(sequences=[self._result], last_seq=len(self._deltas) - 1)
        finished.usage.prompt_tokens = len(running.request.prompt_token_ids)
        finished.usage.completion_tokens = self._tokens
        return finished.SerializeToString()


class Servicer:
    """GenerationService, GenerationAdminService and ModelService, as far as the router uses them."""

    def __init__(self, arguments: argparse.Namespace, received: memoryview) -> None:
        self._arguments = arguments
        self._received = received

    def __getattr__(self, name: str) -> Any:
        """Any other RPC."""

        async def unimplemented(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, name)

        return unimplemented

    async def GetModelInfo(self, _: Any, __: Any) -> model_pb2.GetModelInfoResponse:
        return model_pb2.GetModelInfoResponse(
            model=MODEL,
            kv=model_pb2.KvGeometry(num_blocks=65536, block_size=16),
            limits=model_pb2.Limits(max_context_tokens=4096),
            # No id of an answer is near: a router compares them nevertheless.
            vocab_size=VOCABULARY,
            eos_token_ids=[VOCABULARY - 1],
            tokenizer_fingerprint=self._arguments.fingerprint,
            state=common_pb2.MODEL_STATE_READY,
        )

    async def WatchLoad(self, _: Any, __: Any) -> AsyncIterator[admin_pb2.WatchLoadResponse]:
        load = admin_pb2.Load(kv_blocks_total=65536, kv_blocks_free=65536, state=common_pb2.MODEL_STATE_READY)
        yield admin_pb2.WatchLoadResponse(load=load)
        await asyncio.Event().wait()

    async def Session(self, commands: AsyncIterator[generation_pb2.SessionRequest], context: Any) -> None:
        pace = Pace.of(self._arguments)
        source = TokenSource(self._arguments.ids, self._received, pace)
        reader = asyncio.ensure_future(_read(commands, source))
        try:
            while True:
                source.wakeup.clear()
                message = source.step()
                if message:
                    await context.write(message)
                    await asyncio.sleep(pace.step_seconds)
                elif source.running:
                    await asyncio.sleep(pace.poll_seconds)
                else:
                    await source.wakeup.wait()
        finally:
            reader.cancel()


async def _read(commands: AsyncIterator[generation_pb2.SessionRequest], source: TokenSource) -> None:
    async for command in commands:
        if command.HasField("submit"):
            source.submit(command.submit, command.handle)
        else:
            source.running.pop(command.abort.request_id, None)


def _add(server: grpc.aio.Server, servicer: Any) -> None:
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    admin_pb2_grpc.add_GenerationAdminServiceServicer_to_server(servicer, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(servicer, server)


class _Raw(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stub only
    """Session's messages are bytes already."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler_call_details.method.endswith("/Session"):
            return handler._replace(response_serializer=None)
        return handler


async def _serve(arguments: argparse.Namespace) -> None:
    with arguments.counters.open("r+b") as file:
        received = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    # The setting of a real backend: by grpc's own, the third ping of a router that hears nothing costs it the
    # connection.
    server = grpc.aio.server(interceptors=(_Raw(),), options=server_options(ServerConfig()))
    health = HealthServicer()
    for name in ("", "penstock.v1.GenerationService"):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    _add(server, Servicer(arguments, received))
    if not server.add_insecure_port(f"127.0.0.1:{arguments.port}"):
        raise SystemExit("the port is taken")
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.stop(None)


def main() -> None:
    """Command line; benchmarks/wire.py writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fingerprint", default="", help="tokenizer fingerprint to report")
    add_backend_flags(parser)
    arguments = parser.parse_args()
    end_with_parent(arguments.parent_pid)
    asyncio.run(_serve(arguments))


if __name__ == "__main__":
    main()
