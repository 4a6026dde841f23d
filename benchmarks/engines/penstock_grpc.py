"""Penstock's whole stack: router, tokenizer and generation processes, and a gRPC client in this one."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
from pathlib import Path
from typing import Any

from typing_extensions import override

from benchmarks.engines.base import Adapter, TextScores, TokenTimes
from benchmarks.engines.penstock import model_path, named_adapters, service_options


class PenstockStack(Adapter):
    """Every request is a stream of TextService.Generate: token ids in; text and ids out, detokenised by the way."""

    takes_adapters = True

    @override
    def prepare(self) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
        self._options = service_options(self.settings)
        self._runner = asyncio.Runner()

    @override
    def load(self) -> None:
        """Waits until all three report SERVING."""
        from factories.servers.stack import Stack

        flags = [part for name, value in self._options.items() for part in ("--" + name.replace("_", "-"), value)]
        adapters = named_adapters(self.settings)
        flags += [part for name, folder in adapters.items() for part in ("--lora", f"{name}={folder}")]
        if adapters:
            flags += ["--max-adapters", str(len(adapters))]
        self._stack = Stack(model=Path(model_path(self.settings)), generation_flags=tuple(flags))
        # Whatever ends this process, SIGTERM in the middle of loading too.
        atexit.register(self._stack.stop)
        self._stack.__enter__()
        self._runner.run(self._connect())

    async def _connect(self) -> None:
        import grpc
        from penstock.v1 import text_pb2_grpc

        self._channel = grpc.aio.insecure_channel(self._stack.address)
        self._stub: Any = text_pb2_grpc.TextServiceStub(self._channel)

    @override
    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        return self._runner.run(self._run(prompts, outputs))

    async def _run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        requests = [
            _request(prompt, tokens, str(self.adapter(index)) if self.settings.adapters else "")
            for index, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True))
        ]
        times = TokenTimes(len(prompts))

        async def stream(index: int, request: Any) -> None:
            async for message in self._stub.Generate(request):
                if message.WhichOneof("event") == "delta":
                    times.add(index, len(message.delta.token_ids))

        await asyncio.gather(*(stream(index, request) for index, request in enumerate(requests)))
        return times.times

    @override
    def score(self, documents: list[list[int]]) -> TextScores:
        """Reads prompt_logprobs."""
        return self._runner.run(self._score(documents))

    async def _score(self, documents: list[list[int]]) -> TextScores:
        scores = TextScores()
        for ids in documents:
            request = _request(ids, 1, "")
            request.output.prompt_logprobs = 1
            async for message in self._stub.Generate(request):
                if message.WhichOneof("event") == "started":
                    # Of the first token nothing is known.
                    for place in message.started.prompt_logprobs[1:]:
                        scores.log_probabilities.append(place.chosen.logprob)
                        scores.likeliest.append(place.top[0].token_id)
        return scores

    @override
    def version(self) -> str:
        import penstock

        return f"{penstock.__version__}, router + tokenizer + generation"

    def processes(self) -> list[int]:
        """The services' and their children; not the client."""
        import psutil

        if not hasattr(self, "_stack"):
            return [os.getpid()]
        roots = [psutil.Process(process.popen.pid) for process in self._stack.processes]
        return [one.pid for root in roots for one in [root, *root.children(recursive=True)]]

    @override
    def close(self) -> None:
        try:
            self._runner.run(self._channel.close())
            self._runner.close()
        finally:
            self._stack.stop()


def _request(prompt: list[int], tokens: int, adapter: str) -> Any:
    from penstock.v1 import common_pb2, config_pb2, text_pb2

    return text_pb2.GenerateTextRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        config=config_pb2.GenerationConfig(max_new_tokens=tokens, do_sample=False),
        stop=config_pb2.StopConfig(ignore_eos=True),
        output=config_pb2.OutputConfig(return_token_ids=True),
        adapter=adapter,
    )
