"""Server under load: one request as a stream, and the times of its tokens."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
from penstock_client import ClientConfig

from penstock.cli.bench.config import BenchConfig, lengths
from penstock.cli.client.connection import wait_connected
from penstock.common.errors import (
    DeadlineExceeded,
    NotFound,
    PenstockError,
    StartupError,
    Unimplemented,
    from_rpc_error,
)
from penstock.v1 import (
    common_pb2,
    config_pb2,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    text_pb2,
    text_pb2_grpc,
)

# Reason of a status that gRPC itself made.
_NO_REASON = "UNKNOWN"
# Reasons that add nothing to their status: gRPC's own, and the server's when it saw the deadline pass first.
_PLAIN_REASONS = {_NO_REASON, "DEADLINE_EXCEEDED"}
# Words of four letters or fewer: most tokenizers have one token for each, with the space before it.
WORDS = ("time", "year", "day", "way", "man", "life", "hand", "part", "eye", "work", "week", "case", "fact", "room")


@dataclass(slots=True)
class Sample:
    """One request. Times are of time.perf_counter()."""

    due: float
    prompt_tokens: int
    # Time and number of tokens of each delta.
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0
    # Status and reason; empty when it ended well.
    failure: str = ""
    # The server's message.
    message: str = ""

    @property
    def output_tokens(self) -> int:
        """Number of tokens received."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        """Seconds until the first delta."""
        return self.arrivals[0][0] - self.due

    @property
    def total(self) -> float:
        """Seconds until the stream ended."""
        return self.ended - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first delta's; None without further tokens."""
        first, after = self.arrivals[0][0], self.output_tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - first) / after if after else None

    @property
    def gaps(self) -> Iterator[float]:
        """Seconds between deltas."""
        for (before, _), (after, _) in pairwise(self.arrivals):
            yield after - before


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """Prompt of a request. `text` is set when words are sent instead of ids; the model's template turns `messages`
    (role, text) into the prompt."""

    token_ids: list[int]
    text: str | None
    output_tokens: int
    messages: list[tuple[str, str]] | None = None


class Prompts:
    """Random prompts, all different; the same seed makes the same prompts."""

    def __init__(self, config: BenchConfig, vocab_size: int) -> None:
        self._config, self._vocab_size = config, vocab_size
        self._random = random.Random(config.seed)
        self._common = self._draw(config.common_prefix_tokens)

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def __next__(self) -> BenchPrompt:
        config = self._config
        length = self._random.randint(*lengths(config.prompt_tokens))
        ids = self._common + self._draw(length - len(self._common))
        text = " ".join(WORDS[one % len(WORDS)] for one in ids) if config.text else None
        return BenchPrompt(ids, text, self._random.randint(*lengths(config.output_tokens)))


class BenchTarget:
    """A connection to a router, or to a generation service. It never retries: a refusal is a result."""

    def __init__(self, config: BenchConfig, client: ClientConfig) -> None:
        """Make it on the event loop. Raises as ClientConfig does for files and tokens."""
        self._config, address = config, config.address
        self._metadata = client.metadata(address)
        self.forget_prefixes()
        options = client.channel_options(address)
        if client.tls:
            self._channel = grpc.aio.secure_channel(address, client.tls.credentials(), options)
        else:
            self._channel = grpc.aio.insecure_channel(address, options)
        self._text: Any = text_pb2_grpc.TextServiceStub(self._channel)
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._model: Any = model_pb2_grpc.ModelServiceStub(self._channel)

    def forget_prefixes(self) -> None:
        """Take a new cache salt: the same seed or dataset makes the same prompts, which must not use an earlier run's
        blocks in the prefix cache."""
        self._salt = secrets.token_hex(8)

    async def close(self) -> None:
        """End the connection."""
        await self._channel.close(None)

    async def wait_ready(self) -> None:
        """Wait until connected. Raises StartupError after --connect-timeout-seconds, or for a reason that lasts."""
        await wait_connected(self._channel, self._config)

    async def vocab_size(self) -> int:
        """Ask for the model's vocabulary size. Raises PenstockError; StartupError at the address of another service."""
        direct = self._config.direct
        try:
            # A router also has the model's service, for operators.
            if direct and await self._has_service(direct=False):
                raise StartupError(f"{self._config.address} is a router: leave --direct out", flag="--direct")
            return await self._vocab_size(direct=direct)
        except grpc.RpcError as error:
            found = from_rpc_error(error)
            if isinstance(found, Unimplemented):
                raise await self._wrong_service() from error
            if isinstance(found, NotFound):
                found = NotFound(self._explained(found), reason=found.reason)
            raise found from error

    async def _vocab_size(self, *, direct: bool) -> int:
        call: dict[str, Any] = {"timeout": self._config.connect_timeout_seconds, "metadata": self._metadata}
        if direct:
            info = await self._model.GetModelInfo(model_pb2.GetModelInfoRequest(), **call)
            return int(info.vocab_size)
        model = await self._text.GetModel(text_pb2.GetModelRequest(name=self._config.model or ""), **call)
        return int(model.model.vocab_size)

    async def _has_service(self, *, direct: bool) -> bool:
        """True when the server has the text service, or with `direct` the model's, whatever it answers."""
        try:
            await self._vocab_size(direct=direct)
        except grpc.RpcError as error:
            return not isinstance(from_rpc_error(error), Unimplemented)
        return True

    async def _wrong_service(self) -> StartupError:
        """Make the error for a server without the requested service; with --direct the server is not a router."""
        address = self._config.address
        if self._config.direct or not await self._has_service(direct=True):
            return StartupError(f"{address} is neither a router nor a generation service", flag="--address")
        return StartupError(f"{address} is a generation service: add --direct, or give a router", flag="--direct")

    async def run(self, prompt: BenchPrompt, due: float) -> Sample:
        """Run one request to its end; an error is noted in the sample."""
        sample = Sample(due, len(prompt.token_ids))
        finished = False
        try:
            async for message in self._open(prompt):
                event = message.WhichOneof("event")
                if event == "delta" and message.delta.token_ids:
                    sample.arrivals.append((time.perf_counter(), len(message.delta.token_ids)))
                elif event == "finished":
                    finished = True
                    sample.prompt_tokens = message.finished.usage.prompt_tokens or sample.prompt_tokens
        except grpc.RpcError as error:
            found = from_rpc_error(error)
            sample.failure, sample.message = _status(found), self._explained(found)
        sample.ended = time.perf_counter()
        if not sample.failure and not (finished and sample.arrivals):
            sample.failure = "OK without Finished or tokens"
        return sample

    def _open(self, prompt: BenchPrompt) -> Any:
        config = self._config
        common: dict[str, Any] = {
            "model": config.model or "",
            "adapter": config.adapter or "",
            "config": config_pb2.GenerationConfig(max_new_tokens=prompt.output_tokens, do_sample=False),
            "stop": config_pb2.StopConfig(ignore_eos=not config.stop_at_eos),
            "cache_salt": self._salt,
        }
        call = {"timeout": config.timeout_seconds, "metadata": self._metadata}
        if config.direct:
            return self._generation.Generate(
                generation_pb2.GenerateRequest(prompt_token_ids=prompt.token_ids, **common), **call
            )
        common["output"] = config_pb2.OutputConfig(return_token_ids=True)
        if prompt.messages is not None:
            chat = text_pb2.ChatRequest(**common)
            for role, text in prompt.messages:
                chat.messages.add(role=role, content=text)
            return self._text.Chat(chat, **call)
        request = text_pb2.GenerateTextRequest(**common)
        if prompt.text is None:
            request.token_ids.CopyFrom(common_pb2.TokenIds(ids=prompt.token_ids))
        else:
            request.text = prompt.text
        return self._text.Generate(request, **call)

    def _explained(self, error: PenstockError) -> str:
        """Return the error's message, with a hint if this command knows more."""
        if isinstance(error, NotFound):
            flags = (("adapter", self._config.adapter), ("model", self._config.model))
            named = [
                f"--{flag} {value}" for flag, value in flags if value and error.reason == f"{flag.upper()}_NOT_FOUND"
            ]
            return f"{error.message} ({named[0]})" if named else error.message
        if isinstance(error, DeadlineExceeded) and error.reason in _PLAIN_REASONS and self._config.timeout_seconds:
            return f"took longer than --timeout {self._config.timeout_seconds:g}s"
        return error.message


def _status(error: PenstockError) -> str:
    return error.code.name if error.reason in _PLAIN_REASONS else f"{error.code.name} {error.reason}".strip()
