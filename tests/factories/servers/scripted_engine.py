"""vLLM without a model: a real server with VllmEngine's calls that sends scripted ids, at will, and lies if asked."""

from __future__ import annotations

import asyncio
import hashlib
import io
import math
import os
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from factories.servers.plain_server import plain_server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.common.checkpoint import DEMO_MODEL_NAME, demo_folder
from penstock.common.config import ServerConfig
from penstock.common.fingerprint import tokenizer_fingerprint
from penstock.engines import smg_common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from penstock.engines.vllm_engine_pb2 import GenerateResponse

# Of a request of either protocol.
Script = Callable[[Any], Sequence[int]]
# Ends of the embedded model.
EOS, OTHER_EOS = 4089, 4087
# (message, number of the message in its stream) -> the messages sent in its place.
Tell = Callable[[Any, int], Iterable[Any]]


def tokenizer_zip(folder: Path | None = None) -> bytes:
    """Zip of a model's files as vLLM sends them."""
    folder = folder or demo_folder()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as files:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
            if (folder / name).is_file():
                files.write(folder / name, name)
    return made.getvalue()


def prompt_of(request: Any) -> list[int]:
    """Ids of a request of either protocol."""
    is_smg = isinstance(request, vllm_engine_pb2.GenerateRequest)
    return list(request.tokenized.input_ids if is_smg else request.token_ids.ids)


def from_position(tokens: int, first: int = 300, *, end: int | None = EOS) -> Script:
    """Make ids that depend on their position in the answer alone, and an end: what goes on after a loss fits.

    What an earlier attempt sent is at the prompt's end.
    """

    def script(request: Any) -> Sequence[int]:
        prompt = prompt_of(request)
        whole = [first + position for position in range(tokens)]
        resumed = next((size for size in range(min(tokens, len(prompt)), 0, -1) if prompt[-size:] == whole[:size]), 0)
        return [*whole[resumed:], *(() if end is None else (end,))]

    return script


@dataclass
class ScriptedEngine:
    """Engine that sends a token per message and allowed step. Its attributes may be changed while it runs."""

    script: Script = field(default_factory=lambda: from_position(8))
    model: str = DEMO_MODEL_NAME
    max_context: int = 4096
    vocab_size: int = 4096
    eos_token_ids: tuple[int, ...] = (EOS,)
    # What GetTokenizer sends; None: it fails, as for a model that is named by a hub id.
    bundle: bytes | None = field(default_factory=tokenizer_zip)
    bundle_digest: str = ""
    default_sampling_params_json: str = ""
    generates: bool = True
    healthy: bool = True
    # What the standard health service tells of it; None: it has no such service.
    serving: bool | None = None
    # Messages that may still be sent; None: any number.
    allowance: int | None = None
    # Ends every call with this status.
    refuse: grpc.StatusCode | None = None
    # Reason of an end that is none of a stop id or of the length.
    finish_reason: str = "stop"
    stop_string: str = ""
    tell: Tell | None = None
    embedding: Sequence[float] = (3.0, 4.0)
    # Of the tokenizer that it sends.
    fingerprint: str = field(default_factory=lambda: tokenizer_fingerprint(demo_folder()))
    port: int = 0

    requests: list[Any] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    health_checks: int = 0

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._server: Any = None

    @property
    def address(self) -> str:
        """Name for the router's --backend."""
        return f"vllm://127.0.0.1:{self.port}"

    async def __aenter__(self) -> ScriptedEngine:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> ScriptedEngine:
        """Listen, on the same port as before if there was one."""
        self._server = plain_server(os.environ.get("PENSTOCK_TEST_TRANSPORT", ServerConfig.transport), self.port)
        self.add_services(self._server)
        self.port = await self._server.open_port()
        await self._server.start()
        return self

    def add_services(self, server: Any) -> None:
        """Add what it serves to a server."""
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(_Engine(self), server)
        health_pb2_grpc.add_HealthServicer_to_server(_Health(self), server)

    async def stop(self) -> None:
        """Cut every stream and free the port."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def allow(self, messages: int | None) -> None:
        """Allow this many further messages (None: any number)."""
        self.allowance = None if messages is None else (self.allowance or 0) + messages
        await self.notify()

    async def notify(self) -> None:
        """Wake `until`."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition` to hold."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def take_step(self, request_id: str) -> None:
        """Wait until a message of a request may be sent. Raises Aborted."""
        await self.until(lambda: self.allowance != 0 or request_id in self.aborted)
        if request_id in self.aborted:
            raise Aborted
        if self.allowance is not None:
            self.allowance -= 1


class Aborted(Exception):
    """End of a request by Abort."""


class _Engine(vllm_engine_pb2_grpc.VllmEngineServicer):
    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        engine = self._engine
        engine.requests.append(request)
        if engine.refuse is not None:
            await context.abort(engine.refuse, "the engine's own words")
        engine.live.add(request.request_id)
        await engine.notify()
        try:
            number = 0
            async for message in self._messages(request):
                for told in engine.tell(message, number) if engine.tell else (message,):
                    await context.write(told)
                number += 1
        finally:
            engine.live.discard(request.request_id)
            # Shielded: a call that is cancelled is news, too.
            await asyncio.shield(engine.notify())

    async def _messages(self, request: Any) -> AsyncIterator[GenerateResponse]:
        engine, sampling = self._engine, request.sampling_params
        ids = list(engine.script(request))[: sampling.max_tokens]
        prompt, reason, matched = len(request.tokenized.input_ids), engine.finish_reason, None
        sent: list[int] = []
        for position, token_id in enumerate(ids):
            try:
                await engine.take_step(request.request_id)
            except Aborted:
                reason = "abort"
                break
            sent.append(token_id)
            chunk = vllm_engine_pb2.GenerateStreamChunk(token_ids=[token_id], prompt_tokens=prompt, completion_tokens=1)
            if sampling.HasField("logprobs"):
                self._add_logprobs(chunk.output_logprobs, token_id, sampling.logprobs)
            if position == 0 and sampling.HasField("prompt_logprobs"):
                for at, one in enumerate(request.tokenized.input_ids):
                    self._add_logprobs(chunk.input_logprobs, one, sampling.prompt_logprobs, is_first=at == 0)
            yield GenerateResponse(chunk=chunk)
            if token_id in sampling.stop_token_ids:
                reason, matched = "stop", token_id
                break
        else:
            if len(ids) == sampling.max_tokens:
                reason = "length"
        # As vLLM's servicer: the end repeats the last chunk.
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=sent[-1:], finish_reason=reason, prompt_tokens=prompt, completion_tokens=1
        )
        if matched is not None:
            complete.matched_token_id = matched
        elif engine.stop_string and reason == "stop":
            complete.matched_stop_str = engine.stop_string
        yield GenerateResponse(complete=complete)

    @staticmethod
    def _add_logprobs(logprobs: Any, token_id: int, alternatives: int, *, is_first: bool = False) -> None:
        if isinstance(logprobs, vllm_engine_pb2.InputLogProbs):
            logprobs.token_logprobs.add(**({} if is_first else {"value": -0.5}))
        else:
            logprobs.token_logprobs.append(-0.5)
        logprobs.token_ids.append(token_id)
        if alternatives:
            # The token first, then the most likely ones: here it is the second.
            others = [
                (token_id, -0.5),
                *((token_id + at, math.log(1 / (at + 1)) - 0.3) for at in range(1, alternatives)),
            ]
            logprobs.top_logprobs.add(token_ids=[one for one, _ in others], values=[value for _, value in others])

    async def Embed(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.EmbedResponse(
            embedding=self._engine.embedding, prompt_tokens=len(request.tokenized.input_ids)
        )

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        self._engine.health_checks += 1
        await self._engine.notify()
        return vllm_engine_pb2.HealthCheckResponse(healthy=self._engine.healthy)

    async def Abort(self, request: Any, context: Any) -> Any:
        self._engine.aborted.extend(request.request_ids)
        await self._engine.notify()
        return vllm_engine_pb2.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        engine = self._engine
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=f"/models/{engine.model}",
            served_model_name=engine.model,
            is_generation=engine.generates,
            max_context_length=engine.max_context,
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            default_sampling_params_json=engine.default_sampling_params_json,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.GetServerInfoResponse(server_type="vllm-grpc", block_size=16, max_num_seqs=8)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        load = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=len(self._engine.live), max_total_num_tokens=16384, token_usage=0.25
        )
        return vllm_engine_pb2.GetLoadsResponse(loads=[load], dp_rank_count=1)

    async def GetTokenizer(self, request: Any, context: Any) -> None:  # type: ignore[override]
        data = self._engine.bundle
        if data is None:
            await context.abort(grpc.StatusCode.INTERNAL, "no such folder")
            return
        digest, size = self._engine.bundle_digest or hashlib.sha256(data).hexdigest(), 1 << 16
        for begin in range(0, len(data), size):
            is_last = begin + size >= len(data)
            chunk = smg_common_pb2.GetTokenizerChunk(data=data[begin : begin + size], sha256=digest if is_last else "")
            await context.write(chunk)


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def Check(self, request: Any, context: Any) -> Any:
        if self._engine.serving is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        if request.service != "vllm.grpc.engine.VllmEngine":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self._engine.serving else status.NOT_SERVING)
