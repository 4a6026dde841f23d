"""Penstock's engine as its service starts it: the model, the pool and the engine's own thread, without gRPC."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from typing_extensions import override

from benchmarks.engines.base import Adapter, Settings, TextScores, TokenTimes, Unsupported
from benchmarks.engines.compressed import QUANTIZED_BY_US, quantised_by_us
from benchmarks.engines.gguf_files import gguf_file_of, is_gguf

# Words of `penstock eval --format`.
FORMATS = {"bf16": "bfloat16", "fp32": "float32", "int8": "bfloat16+int8", "int4": "bfloat16+int4"}


def service_options(settings: Settings) -> dict[str, str]:
    """The generation service's options for these settings, as its flags write them. A dtype of `penstock eval`'s words,
    such as float32+int8, is taken as well. Raises Unsupported."""
    from penstock.common.options import options_of
    from penstock.evaluation.number_format import NumberFormat
    from penstock.generation.config import GenerationServiceConfig

    if has_own_weights(settings.dtype):
        format = NumberFormat("bfloat16", "auto")
    else:
        try:
            format = NumberFormat.parse(FORMATS.get(settings.dtype, settings.dtype))
        except ValueError as error:
            raise Unsupported(f"{settings.dtype} weights ({error})") from error
    options = {
        "threads": str(settings.threads),
        "kv_memory": str(settings.kv_tokens * _kv_bytes_per_token(settings, format.dtype)),
        "max_context": str(settings.max_context),
        "dtype": format.dtype,
        "quantization": format.quantization,
        "kv_cache_dtype": format.kv_cache_dtype,
    }
    known = {option.name for option in options_of(GenerationServiceConfig)}
    unknown = settings.options.keys() - known
    if unknown:
        raise Unsupported(f"--option penstock.{min(unknown)}: the generation service has no such option")
    return {**options, **settings.options}


def has_own_weights(dtype: str) -> bool:
    """True for a format with files of its own."""
    return is_gguf(dtype) or dtype.startswith(QUANTIZED_BY_US)


def model_path(settings: Settings) -> str:
    """Return the model that is served: the checkpoint, or what was made of it. Raises Unsupported."""
    if is_gguf(settings.dtype):
        return str(gguf_file_of(settings))
    if settings.dtype.startswith(QUANTIZED_BY_US):
        return str(quantised_by_us(settings, may_make=True))
    return settings.model


def _kv_bytes_per_token(settings: Settings, dtype: str) -> int:
    from pathlib import Path

    from penstock.generation.models.registry import read_model_config

    config = read_model_config(Path(settings.model))
    width = 4 if dtype == "float32" else 2
    own = config.kv_widths or (config.num_kv_heads * config.head_dim,) * config.num_kv_layers
    return 2 * sum(own) * width


def named_adapters(settings: Settings) -> dict[str, str]:
    """{name: folder} of the adapters; that of request i is "i"."""
    return {str(number): folder for number, folder in enumerate(settings.adapters)}


class PenstockEngine(Adapter):
    """Requests go to EngineLoop.submit, tokens come back on the event loop as the service gets them."""

    takes_adapters = True

    @override
    def prepare(self) -> None:
        from penstock.generation.engine import engine, loop  # noqa: F401  # torch is loaded here
        from penstock.generation.startup.load import load  # noqa: F401

        self._options = service_options(self.settings)
        self._runner = asyncio.Runner()
        self._ids = itertools.count()

    @override
    def load(self) -> None:
        from penstock.common.config import from_env_and_flags
        from penstock.generation.config import GenerationServiceConfig
        from penstock.generation.engine.engine import Engine
        from penstock.generation.startup.load import load

        given: dict[str, object] = {**self._options, "model": model_path(self.settings)}
        if adapters := named_adapters(self.settings):
            given["lora"] = tuple(f"{name}={folder}" for name, folder in adapters.items())
            given["max_adapters"] = str(len(adapters))
        config = from_env_and_flags(GenerationServiceConfig, given)
        self._loaded: Any = load(config, "bench", lambda percent: None)
        self._engine = Engine(self._loaded.engine.config, self._loaded.engine.runner, self._loaded.files.token_bytes)
        # As a service's engine does.
        self._engine.device_blocks.on_grow = self._loaded.pools.kv.leave_small_pages
        self._runner.run(self._start())

    async def _start(self) -> None:
        from penstock.generation.engine.loop import EngineLoop

        self._loop = EngineLoop(self._engine, asyncio.get_running_loop(), self._deliver, self._failed)
        self._loop.start()

    @override
    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        return self._runner.run(self._run(prompts, outputs))

    @override
    def score(self, documents: list[list[int]]) -> TextScores:
        """Reads prompt_logprobs, as a client gets them."""
        scores = TextScores()
        for ids in documents:
            self._runner.run(self._run([ids], [1], prompt_logprobs=1))
            # Of the first token nothing is known.
            for place in self._prompt_logprobs[1:]:
                scores.log_probabilities.append(place.chosen.logprob)
                scores.likeliest.append(place.top[0].token_id)
        return scores

    async def _run(
        self, prompts: list[list[int]], outputs: list[int], prompt_logprobs: int | None = None
    ) -> list[list[float]]:
        from penstock.generation.core.request import Request
        from penstock.generation.core.sampling_params import SamplingParams

        self._index: dict[str, int] = {}
        self._prompt_logprobs: tuple[Any, ...] = ()
        self._left = len(prompts)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._times = TokenTimes(len(prompts))
        for index, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
            request_id = str(next(self._ids))
            self._index[request_id] = index
            params = SamplingParams(tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs)
            adapter = self._loaded.weights.adapters.bring(str(self.adapter(index))) if self.settings.adapters else None
            self._loop.submit(Request(request_id, prompt, params, time.monotonic(), adapter=adapter))
        await self._done
        return self._times.times

    def _deliver(self, _step: int, outputs: list[Any]) -> None:
        for output in outputs:
            index = self._index[output.request.request_id]
            if output.started is not None:
                self._prompt_logprobs = output.started.prompt_logprobs
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

    @override
    def version(self) -> str:
        import penstock
        import torch

        return f"{penstock.__version__} (torch {torch.__version__})"

    @override
    def facts(self) -> dict[str, int | float | str]:
        loaded = self._loaded
        return {"weights_bytes": loaded.weights.model.num_bytes, "kv_bytes": loaded.pools.kv.num_bytes}

    @override
    def close(self) -> None:
        self._loop.stop()
        self._runner.close()
