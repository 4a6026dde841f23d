"""Penstock's engine as its service starts it: the model, the pool and the engine's own thread, without gRPC."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from benchmarks.engines.base import Adapter, Settings, TokenTimes, Unsupported

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def service_options(settings: Settings) -> dict[str, str]:
    """The generation service's options for these settings, as its flags write them. Raises Unsupported."""
    from penstock.common.options import options_of
    from penstock.generation.config import GenerationServiceConfig

    bytes_per_token = _kv_bytes_per_token(settings)
    options = {
        "threads": str(settings.threads),
        "kv_memory": str(settings.kv_tokens * bytes_per_token),
        "max_context": str(settings.max_context),
    }
    known = {option.name for option in options_of(GenerationServiceConfig)}
    if settings.dtype in DTYPES:
        options["dtype"] = DTYPES[settings.dtype]
    elif "quantization" in known:
        options |= {"dtype": "bfloat16", "quantization": settings.dtype}
    else:
        raise Unsupported(f"{settings.dtype} weights")
    unknown = settings.options.keys() - known
    if unknown:
        raise Unsupported(f"--option penstock.{min(unknown)}: the generation service has no such option")
    return {**options, **settings.options}


def _kv_bytes_per_token(settings: Settings) -> int:
    from pathlib import Path

    from penstock.generation.models.registry import read_model_config

    config = read_model_config(Path(settings.model))
    width = 4 if settings.dtype == "fp32" else 2
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * width


def named_adapters(settings: Settings) -> dict[str, str]:
    """{name: folder} of the adapters; that of request i is "i"."""
    return {str(number): folder for number, folder in enumerate(settings.adapters)}


class PenstockEngine(Adapter):
    """Requests go to EngineLoop.submit, tokens come back on the event loop as the service gets them."""

    takes_adapters = True

    def prepare(self) -> None:
        """See Adapter."""
        from penstock.generation.engine import engine, loop  # noqa: F401  # torch is loaded here
        from penstock.generation.startup.load import load  # noqa: F401

        self._options = service_options(self.settings)
        self._runner = asyncio.Runner()
        self._ids = itertools.count()

    def load(self) -> None:
        """See Adapter."""
        from penstock.common.config import from_env_and_flags
        from penstock.generation.config import GenerationServiceConfig
        from penstock.generation.engine.engine import Engine
        from penstock.generation.startup.load import load

        given: dict[str, object] = {**self._options, "model": self.settings.model}
        if adapters := named_adapters(self.settings):
            given["lora"] = tuple(f"{name}={folder}" for name, folder in adapters.items())
            given["max_adapters"] = str(len(adapters))
        config = from_env_and_flags(GenerationServiceConfig, given)
        self._loaded: Any = load(config, "bench", lambda percent: None)
        self._engine = Engine(self._loaded.engine.config, self._loaded.engine.runner, self._loaded.files.token_bytes)
        self._runner.run(self._start())

    async def _start(self) -> None:
        from penstock.generation.engine.loop import EngineLoop

        self._loop = EngineLoop(self._engine, asyncio.get_running_loop(), self._deliver, self._failed)
        self._loop.start()

    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        """See Adapter."""
        return self._runner.run(self._run(prompts, outputs))

    async def _run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        from penstock.generation.core.request import Request
        from penstock.generation.core.sampling_params import SamplingParams

        self._index: dict[str, int] = {}
        self._left = len(prompts)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._times = TokenTimes(len(prompts))
        for index, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
            request_id = str(next(self._ids))
            self._index[request_id] = index
            params = SamplingParams(tokens, ignore_eos=True)
            adapter = self._loaded.weights.adapters.bring(str(self.adapter(index))) if self.settings.adapters else None
            self._loop.submit(Request(request_id, prompt, params, time.monotonic(), adapter=adapter))
        await self._done
        return self._times.times

    def _deliver(self, _step: int, outputs: list[Any]) -> None:
        for output in outputs:
            index = self._index[output.request.request_id]
            for delta in output.deltas:
                self._times.add(index, len(delta.token_ids))
            if output.finished is not None:
                self._left -= 1
                if output.finished.error is not None and not self._done.done():
                    self._done.set_exception(output.finished.error)
        if not self._left and not self._done.done():
            self._done.set_result(None)

    def _failed(self, error: BaseException) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def version(self) -> str:
        """See Adapter."""
        import penstock
        import torch

        return f"{penstock.__version__} (torch {torch.__version__})"

    def facts(self) -> dict[str, int | float | str]:
        """See Adapter."""
        loaded = self._loaded
        return {"weights_bytes": loaded.weights.model.num_bytes, "kv_bytes": loaded.pools.kv.num_bytes}

    def close(self) -> None:
        """See Adapter."""
        self._loop.stop()
        self._runner.close()
