"""A worker for the smg gateway that emits tokens at will, for benchmarks/wire.py: the pace of `_wire_backend.py`.

It speaks what smg asks of a vLLM worker (smg_grpc_proto's vllm_engine.proto), one response stream for each request,
over Penstock's own asyncio transport: what a step writes to all streams leaves in one system call, so that smg is
measured and not grpc.aio. A request's `seed` is its slot in the file that the client counts what it has received in.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in (".", "services")]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from penstock.common.config import ServerConfig
from penstock.http2.limits import ServerLimits
from penstock.http2.server import Http2Server
from penstock.http2.server_call import Call
from penstock.serving.transport import http2_limits

from benchmarks._processes import end_with_parent
from benchmarks._wire_pace import Pace, add_backend_flags
from benchmarks._wire_proto import block, fields, number, packed

_SERVICE = "vllm.grpc.engine.VllmEngine"
_CONTEXT, _VOCABULARY, _MAX_CALLS = 4096, 4096, 8192


def parse_request(data: bytes) -> tuple[int, int]:
    """A GenerateRequest's slot and the length of its prompt in tokens."""
    slot = prompt = 0
    for field, value in fields(data):
        if field == 2 and isinstance(value, bytes):  # tokenized
            ids = b"".join(part for one, part in fields(value) if one == 2 and isinstance(part, bytes))
            prompt = sum(byte < 0x80 for byte in ids)
        elif field == 4 and isinstance(value, bytes):  # sampling_params
            slot = next((int(part) for one, part in fields(value) if one == 24 and isinstance(part, int)), 0)
    return slot, prompt


def answer(ids: list[int], prompt: int, interval: int) -> list[bytes]:
    """The GenerateResponses of a request: chunks of `interval` tokens, and the end with all of them."""
    parts = [ids[at : at + interval] for at in range(0, len(ids), interval)]
    out, done = [], 0
    for part in parts:
        done += len(part)
        out.append(block(1, packed(1, part) + number(2, prompt) + number(3, done)))
    out.append(block(2, packed(1, ids) + block(2, b"length") + number(3, prompt) + number(4, done)))
    return out


@dataclass(slots=True, eq=False)
class Running:
    """A request being answered."""

    call: Call
    slot: int
    messages: list[bytes]
    ended: asyncio.Future[None]
    position: int = 0


class TokenSource:
    """Steps all requests of all connections together."""

    def __init__(self, ids: list[int], received: memoryview, pace: Pace) -> None:
        """`received[slot]` counts tokens at the client."""
        self._ids, self._received, self._pace = ids, received, pace
        self._answers: dict[int, list[bytes]] = {}
        self.running: dict[Running, None] = {}
        self.wakeup = asyncio.Event()

    async def generate(self, data: bytes, call: Call) -> None:
        """VllmEngine.Generate."""
        slot, prompt = parse_request(data)
        messages = self._answers.get(prompt)
        if messages is None:
            messages = self._answers[prompt] = answer(self._ids, prompt, self._pace.interval)
        running = Running(call, slot, messages, asyncio.get_running_loop().create_future())
        self.running[running] = None
        self.wakeup.set()
        try:
            await running.ended
        finally:
            self.running.pop(running, None)

    async def step(self) -> bool:
        """The next tokens of every request that may have some; False when none may."""
        pace, any_moved = self._pace, False
        for running in list(self.running):
            position = running.position
            if pace.window and position * pace.interval - self._received[running.slot] >= pace.window:
                continue
            if not running.call.try_write(running.messages[position]):
                if position or running.call.is_over:
                    continue  # its connection is full
                await running.call.write(running.messages[0])
            any_moved = True
            running.position = position + 1
            if running.position == len(running.messages) - 1:
                await running.call.write(running.messages[-1])
                self.running.pop(running, None)
                running.ended.set_result(None)
        return any_moved

    async def run(self) -> None:
        """Step for ever."""
        while True:
            self.wakeup.clear()
            if await self.step():
                await asyncio.sleep(self._pace.step_seconds)
            elif self.running:
                await asyncio.sleep(self._pace.poll_seconds)
            else:
                await self.wakeup.wait()


def _fixed(response: bytes) -> Callable[[bytes, Call], Awaitable[bytes]]:
    async def answer_with(_: bytes, __: Call) -> bytes:
        return response

    return answer_with


def methods(source: TokenSource, model: str, tokenizer: str) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
    """VllmEngine, as far as smg uses it; messages are bytes."""
    folder = tokenizer.encode()
    info = block(1, folder) + number(2, 1) + number(3, _CONTEXT) + number(4, _VOCABULARY) + block(6, model.encode())
    info += block(7, folder) + block(8, b"qwen2") + block(9, b"Qwen2ForCausalLM")
    unary = {
        "HealthCheck": number(1, 1),
        "GetModelInfo": info,
        "GetServerInfo": block(5, b"vllm-grpc") + number(9, 1),
        "Abort": b"",
        "FlushCache": b"",
    }
    generate: Any = source.generate
    handlers = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    for method, response in unary.items():
        fixed: Any = _fixed(response)
        handlers[method] = grpc.unary_unary_rpc_method_handler(fixed)
    return handlers


async def _serve(arguments: argparse.Namespace) -> None:
    with arguments.counters.open("r+b") as file:
        received = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    bounds = ServerLimits(
        max_calls=_MAX_CALLS, max_probes=8, request_bytes=1 << 28, max_strangers=_MAX_CALLS, strangers_share=1.0
    )
    server = Http2Server(http2_limits(ServerConfig(), max_streams=_MAX_CALLS), bounds)
    source = TokenSource(arguments.ids, received, Pace.of(arguments))
    handlers = methods(source, arguments.model, arguments.tokenizer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, dict(handlers)),))
    health: Any = HealthServicer()
    for name in ("", _SERVICE):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    target: Any = server
    health_pb2_grpc.add_HealthServicer_to_server(health, target)
    await server.listen("127.0.0.1", arguments.port, None, shares_port=False)
    await server.start()
    stepping = asyncio.ensure_future(source.run())
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await asyncio.wait([stepping, asyncio.ensure_future(ended.wait())], return_when=asyncio.FIRST_COMPLETED)
    stepping.cancel()
    await server.stop(None)


def main() -> None:
    """Command line; benchmarks/wire.py writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the name to serve")
    parser.add_argument("--tokenizer", required=True, help="folder of the tokenizer, for smg")
    add_backend_flags(parser)
    arguments = parser.parse_args()
    end_with_parent(arguments.parent_pid)
    asyncio.run(_serve(arguments))


if __name__ == "__main__":
    main()
