"""Draft model of a process: loading it, and checks that it goes together with the served model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from penstock.common.checkpoint import model_name, resolve_model
from penstock.common.errors import StartupError
from penstock.common.fingerprint import tokenizer_fingerprint
from penstock.common.logging import get_logger
from penstock.common.progress import LOAD_WEIGHTS, ProgressStage, ShowProgress
from penstock.common.units import format_size
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.base import Device
from penstock.generation.engine.config import EngineConfig
from penstock.generation.host.memory import format_weights
from penstock.generation.layers.lora import AdapterBatch
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import read_model_config
from penstock.generation.runner.drafter import ModelDrafter
from penstock.generation.runner.grammar_masks import MaskFiller
from penstock.generation.runner.model_runner import ModelRunner
from penstock.generation.startup.draft_pool import MEMORY_FLAG, make_draft_pool
from penstock.generation.startup.read_model import read_model
from penstock.text.tokenizer_json import read_tokenizer_json

_log = get_logger("penstock.generation")
MODEL_FLAG = "--assistant-model"
_FLAGS = {"MODEL": MODEL_FLAG, "--kv-memory": MEMORY_FLAG}


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model in memory with a pool of its own, ready to draft."""

    name: str
    model: LanguageModel
    kv: KVCachePool
    runner: ModelRunner
    drafter: ModelDrafter

    def warm_up(self) -> None:
        """Run it once. Its computed tokens of sequences are lost."""
        self.drafter.clear()
        self.runner.warm_up()

    def status_line(self) -> str:
        """Return a line of facts for people."""
        config, kv = self.model.config, self.kv
        weights = format_weights(self.model.num_bytes, self.model.mapped_bytes)
        return (
            f"drafts    {self.name} ({config.architecture}, {config.num_parameters / 1e6:.1f} M parameters, "
            f"{weights}), kv pool {format_size(kv.num_bytes)} = "
            f"{kv.num_blocks * kv.block_size} tokens"
        )


def load_draft_weights(
    config: GenerationServiceConfig, folder: Path, device: Device, show: ShowProgress
) -> LanguageModel | None:
    """Load the weights of `config.assistant_model`. Its token ids must be those of the model in `folder`.

    None: no draft model is configured. Call it before the pools are sized. Raises StartupError naming
    --assistant-model.
    """
    if config.assistant_model is None:
        return None
    with _about_the_draft_model():
        own = resolve_model(config.assistant_model, show=show)
        served, drafting = (read_model_config(one, config.route).vocab_size for one in (folder, own))
        _check_vocabulary(folder, own, served, drafting)
        with ProgressStage(show, LOAD_WEIGHTS, model_name(config.assistant_model)) as stage:
            weights = read_model(config, own, device, stage.count)
        if weights.state_layout:
            raise StartupError(
                f"{MODEL_FLAG} has layers that keep a state: it cannot go back to the last accepted draft",
                flag=MODEL_FLAG,
            )
        if served == drafting:
            return weights
        if not isinstance(weights, CausalLM):
            raise StartupError(
                f"{MODEL_FLAG} has a vocabulary of {drafting} and the served model one of {served}: only a native "
                "draft model may have another",
                flag=MODEL_FLAG,
            )
        return ResizedVocabulary(weights, served)


def make_draft_model(
    config: GenerationServiceConfig, weights: LanguageModel, device: Device, engine: EngineConfig, masks: MaskFiller
) -> DraftModel:
    """Make pool, runner and drafter around loaded weights, and warm up.

    `masks` may be the served model's, which never runs at the same time. Raises StartupError naming
    --assistant-kv-memory.
    """
    context = min(engine.max_context_tokens, weights.config.max_position_embeddings)
    with _about_the_draft_model():
        kv = _pool(config, weights, device, engine, context)
    runner = ModelRunner(weights, kv, masks=masks, kernels=device.sampling_kernels())
    drafter = ModelDrafter(
        runner,
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_context_tokens=context,
        max_prefill_tokens=engine.max_batch_tokens,
        on_grow=kv.leave_small_pages,
    )
    draft = DraftModel(model_name(config.assistant_model), weights, kv, runner, drafter)
    draft.warm_up()
    return draft


def _pool(
    config: GenerationServiceConfig, weights: LanguageModel, device: Device, engine: EngineConfig, context: int
) -> KVCachePool:
    shape = KVShape.of(weights.config, weights.dtype, engine.block_size, requested=config.kv_cache_dtype)
    most = engine.num_blocks // engine.bundle_blocks
    return make_draft_pool(config, shape, device, context=context, most_blocks=most)


def _check_vocabulary(folder: Path, own: Path, served: int, drafting: int) -> None:
    """Refuse a draft model with other ids. The sizes may differ by ids that no tokenizer gives (padding)."""
    prints = tokenizer_fingerprint(folder), tokenizer_fingerprint(own)
    if served == drafting and prints[0] == prints[1]:
        return
    if all(prints):
        ids = _token_ids(own)
        if prints[0] != prints[1] and _token_ids(folder) != ids:
            raise StartupError(
                f"{MODEL_FLAG} has another tokenizer than the served model: a draft model must have the same ids",
                flag=MODEL_FLAG,
            )
        if max(ids.values()) < min(served, drafting):
            return
    elif served == drafting:
        _log.warning("a tokenizer.json is missing: only the vocabularies' sizes were compared", flag=MODEL_FLAG)
        return
    raise StartupError(
        f"{MODEL_FLAG} has a vocabulary of {drafting} and the served model one of {served}: a draft model must have "
        "the same",
        flag=MODEL_FLAG,
    )


def _token_ids(folder: Path) -> dict[str, int]:
    """Return every token's id from tokenizer.json; its vocabulary is a mapping, or a list in the order of ids."""
    try:
        content = read_tokenizer_json(folder / "tokenizer.json")
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):
            vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", ())}
        found = {**vocabulary, **added}
        if not found or not all(type(token_id) is int for token_id in found.values()):
            raise ValueError("ids are whole numbers")
        return found
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StartupError(f"{MODEL_FLAG}: tokenizer.json is broken", flag=MODEL_FLAG) from error


@contextmanager
def _about_the_draft_model() -> Iterator[None]:
    """Make errors inside name the draft model's flags instead of the served model's."""
    try:
        yield
    except StartupError as error:
        message = error.message
        for flag, own in _FLAGS.items():
            message = message.replace(flag, own)
        raise StartupError(message, flag=_FLAGS.get(error.flag or "", error.flag)) from error


class ResizedVocabulary(CausalLM):
    """Another model's weights behind a vocabulary of another size: checkpoints of one family differ in padding.

    An id beyond the model's own is read as its last one, and is never likely: its logit is -inf. Logits beyond
    `vocab_size` are cut off.
    """

    def __init__(self, model: CausalLM, vocab_size: int) -> None:
        """`vocab_size` is the size of ids and logits from now on; `config.vocab_size` stays the model's own."""
        vars(self).update(vars(model))
        self._vocab_size = vocab_size

    @property
    @override
    def can_draw(self) -> bool:
        """The head has the model's own vocabulary."""
        return False

    @override
    def embed(self, input_ids_T: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        return super().embed(input_ids_T.clamp(max=self.config.vocab_size - 1), adapters)

    @override
    def table_ids(self, input_ids_T: Tensor) -> Tensor:
        return super().table_ids(input_ids_T.clamp(max=self.config.vocab_size - 1))

    @torch.inference_mode()
    @override
    def compute_logits(self, hidden_NI: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """Logits (N, vocab_size)."""
        logits_NV = super().compute_logits(hidden_NI, adapters)
        missing = self._vocab_size - logits_NV.shape[1]
        if missing > 0:
            return F.pad(logits_NV, (0, missing), value=-torch.inf)
        return logits_NV[:, : self._vocab_size].contiguous()
