"""MindIE's GeneratorTorch: a Generator made of `model_config`, and the model by hand beside its requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.common.errors import InvalidArgument
from penstock.common.logging import get_logger
from penstock.common.progress import ShowProgress, show_nothing
from penstock.compat.mindie.by_hand import (
    ForwardPass,
    HandSampler,
    ModelInput,
    SamplingMetadata,
    copy_blocks,
    swap_blocks,
)
from penstock.compat.mindie.lora_status import LoraStatus, load_lora, unload_lora
from penstock.compat.mindie.model_settings import ModelSettings
from penstock.generation.adapters.store import AdapterStore
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.decoding_mode import PLAIN
from penstock.generation.core.step import SampledToken
from penstock.generation.service import WarmUpSize
from penstock.generation.wire.convert import to_generate_options
from penstock.generator.argument_names import of_fields, reading, renaming, whole
from penstock.generator.generator import Generator

_log = get_logger("penstock.generator")
# Fields of the service's WarmUp by the arguments that MindIE has for them.
_WARM_UP_NAMES = {
    "prefill_tokens": "max_prefill_tokens",
    "sequence_tokens": "max_seq_len",
    "input_tokens": "max_input_len",
    "iterations": "max_iter_times",
}
# Keywords of structured output.
_CONSTRAINT_NAMES = ("json_schema", "json_object", "regex", "grammar", "choice")


class GeneratorTorch(Generator):
    """Generator with the constructor, attributes and operations of MindIE-LLM's class of this name.

    Every operation takes its turn on the engine's thread, between two steps of the requests that run.
    """

    def __init__(
        self,
        model_config: Mapping[str, Any],
        *,
        max_in_flight: int | None = None,
        allow_control_tokens_in_text: bool = False,
        show: ShowProgress = show_nothing,
        **options: Any,
    ) -> None:
        """Load the model that the dictionary names. Keywords are those of Generator, and go before the dictionary.

        Raises ModelConfigError, a ValueError naming the dictionary's field, and what Generator raises.
        """
        self._settings = ModelSettings.read(model_config)
        for warning in self._settings.warnings:
            _log.warning(warning)
        with self._settings.naming_fields(options):
            wanted = self._settings.with_options(options)
            super().__init__(
                wanted.pop("model", None),
                max_in_flight=max_in_flight,
                allow_control_tokens_in_text=allow_control_tokens_in_text,
                show=show,
                **wanted,
            )
        self._forward, self._sampler = ForwardPass(self._engine.loaded), HandSampler(self._engine.loaded)

    @property
    def cache_pool(self) -> KVCachePool:
        """Keys and values of all blocks: (layers, 2, blocks, block_size, kv_heads, head_dim) in `tensors`."""
        return self._engine.loaded.pools.kv

    @property
    def device(self) -> torch.device:
        """Device of the model's tensors."""
        return self._engine.loaded.weights.device.torch_device

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._settings.rank

    @property
    def model_config(self) -> ModelSettings:
        """The dictionary that it was made of."""
        return self._settings

    @property
    def adapter_manager(self) -> AdapterStore:
        """Store of LoRA adapters."""
        return self._engine.loaded.weights.adapters

    def forward(self, model_input: ModelInput | Mapping[str, Any]) -> torch.Tensor:
        """Compute rows by hand; keys and values go into the blocks that the caller names. Returns logits
        (N, vocabulary) in float32.

        New blocks are claimed while no request is live, and stay the caller's until `release_blocks`; it takes its turn
        between two steps of the engine. Raises InvalidArgument naming a field of the input, FailedPrecondition: BUSY,
        BLOCK_IN_USE.
        """
        rows = of_fields(ModelInput, model_input, "model_input")
        return self._engine.on_engine(lambda engine: self._forward.run(engine, rows))

    def sample(self, logits: Any, metadata: SamplingMetadata | Mapping[str, Any]) -> list[SampledToken]:
        """Draw the next token of each row of logits (N, vocabulary), by the very sampler of the engine.

        Options are those of `generate` in modes that draw one token a step: greedy and sampling. Raises
        InvalidArgument, and TypeError or ValueError naming an option.
        """
        metadata = of_fields(SamplingMetadata, metadata, "metadata")
        with reading("logits", "rows of numbers, one for each of metadata.sequence_ids"):
            rows = self._sampler.check(logits, metadata)
        given = metadata.options
        each: list[Mapping[str, Any]] = [given] * len(rows) if isinstance(given, Mapping) else [*given]
        if len(each) != len(rows):
            raise InvalidArgument("options", f"must be one mapping, or {len(rows)}")
        params = [self._draw_params(prompt, one) for prompt, one in zip(metadata.prompt_token_ids, each, strict=True)]
        seeded = [one.get("seed") is not None for one in each]
        return self._engine.on_engine(lambda _: self._sampler.draw(rows, metadata, params, seeded))

    def warm_up(
        self,
        max_prefill_tokens: int = 4096,
        max_seq_len: int = 2560,
        max_input_len: int | None = None,
        max_iter_times: int | None = None,
    ) -> int:
        """Run the model once at such sizes, cut to what a step computes and the pool holds. Returns the pool's bytes.

        The prefix cache is empty afterwards. Raises InvalidArgument for a size below 1, FailedPrecondition BUSY while
        requests are live.
        """
        core = self._engine.core
        size = WarmUpSize(
            whole("max_prefill_tokens", max_prefill_tokens),
            whole("max_seq_len", max_seq_len),
            None if max_input_len is None else whole("max_input_len", max_input_len),
            None if max_iter_times is None else whole("max_iter_times", max_iter_times),
        )
        with renaming(_WARM_UP_NAMES):
            self._engine.call(core.warm_up(size))
        return core.loaded.pools.kv.num_bytes

    def clear_cache(self, sequence_ids: Iterable[str | int] | None = None) -> int:
        """Forget what was computed, and return the number of blocks or sequences that are forgotten.

        None: every reusable prefix that no running request holds. Texts are ids of live requests: they keep their
        tokens and compute them again. Numbers are the caller's sequences of `sample`. Raises NotFound for a request
        that is not live.
        """
        if sequence_ids is None:
            return super().clear_cache()
        with reading("sequence_ids", "a list of request ids and of numbers of sequences"):
            ids = [one if isinstance(one, str) else whole("sequence_ids", one) for one in sequence_ids]
        requests = [one for one in ids if isinstance(one, str)]
        numbers = [one for one in ids if not isinstance(one, str)]
        with renaming({"live_request_ids": "sequence_ids"}):
            cleared = self._engine.call(self._engine.core.clear_cache(requests)) if requests else 0
        return cleared + (self._engine.on_engine(lambda _: self._sampler.clear(numbers)) if numbers else 0)

    def copy_blocks(self, pairs: Any) -> int:
        """Copy (source, destination) blocks in every layer, in order; returns the number of pairs. Blocks as in
        `forward`."""
        with reading("pairs", "pairs of block numbers [source, destination]"):
            return self._engine.on_engine(lambda engine: copy_blocks(engine, pairs))

    def swap_cache(self, swaps: Any) -> int:
        """Swap blocks [[kind, source, destination]]; kind 0: host to device, 1: device to host. Returns their number.

        Blocks of the device are as in `forward`. Those of the host pool are the caller's until `release_blocks`, too,
        and may be new while requests are live. Raises InvalidArgument, and FailedPrecondition: NO_HOST_POOL (see
        host_kv_memory), BUSY, BLOCK_IN_USE.
        """
        with reading("swaps", "rows of whole numbers [kind, source, destination]"):
            return self._engine.on_engine(lambda engine: swap_blocks(engine, swaps))

    def claim_blocks(self, blocks: Iterable[int]) -> None:
        """Hold blocks of the pool ahead, so that later calls of `forward` find them also while requests are live.

        Raises InvalidArgument, FailedPrecondition: BUSY, BLOCK_IN_USE.
        """
        with reading("blocks", "a list of whole numbers"):
            wanted = [whole("blocks", one) for one in blocks]
        self._engine.on_engine(lambda engine: engine.caller_blocks.claim(wanted))

    def release_blocks(self, blocks: Iterable[int] | None = None, *, host_blocks: Iterable[int] | None = None) -> int:
        """Give blocks of `forward`, `copy_blocks` and `swap_cache` back to the engine; without arguments all, of both
        pools. Returns their number."""
        given = None if blocks is None else list(blocks)
        on_host = None if host_blocks is None else list(host_blocks)
        return self._engine.on_engine(lambda engine: engine.caller_blocks.release(given, on_host))

    def load_lora(self, lora_id: str, path: str | Path) -> LoraStatus:
        """Load a PEFT folder as adapter `lora_id`, for requests with adapter=`lora_id`.

        Raises Unavailable where the engine has failed or is being closed.
        """
        return load_lora(self.adapter_manager, lora_id, path)

    def unload_lora(self, lora_id: str) -> LoraStatus:
        """Forget an adapter; requests that have it go on to their end."""
        return unload_lora(self.adapter_manager, lora_id)

    def _draw_params(self, prompt: Sequence[int], options: Mapping[str, Any]) -> Any:
        """Return what the sampler makes of keyword options. Raises InvalidArgument for a mode of several sequences."""
        core = self._engine.core
        if any(options.get(name) is not None for name in _CONSTRAINT_NAMES):
            raise InvalidArgument("options", "structured output is for generate: the caller's logits can be masked")
        made = to_generate_options(self._requests.make(list(prompt), options).message, core.limits)
        params = core.prepare(made, None).request.params
        if params.mode is not PLAIN or params.guidance.is_on:
            raise InvalidArgument("options", "must be those of greedy decoding or sampling: one token a step")
        return params
