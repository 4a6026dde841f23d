"""Trained draft head of a process: loading it, and checks that it goes together with the served model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.common.checkpoint import DEMO_HEAD, OWN_HEAD, demo_head_folder, model_name, resolve_model
from penstock.common.errors import StartupError
from penstock.common.progress import LOAD_WEIGHTS, ProgressStage, ShowProgress
from penstock.common.units import format_size
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.base import Device
from penstock.generation.host.memory import format_weights
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.dflash import is_dflash, load_dflash
from penstock.generation.models.draft_head import DraftHead
from penstock.generation.models.eagle3 import load_eagle3
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.mtp import load_mtp
from penstock.generation.runner.head_drafter import HeadDrafter
from penstock.generation.startup.draft_pool import MEMORY_FLAG, make_draft_pool

if TYPE_CHECKING:
    from penstock.generation.runner.grammar_masks import MaskFiller

HEAD_FLAG = "--draft-head"
_FLAGS = {"MODEL": HEAD_FLAG, "--kv-memory": MEMORY_FLAG}


@dataclass(frozen=True, slots=True)
class HeadDraft:
    """A draft head in memory with a pool of its own, ready to draft."""

    name: str
    head: DraftHead
    drafter: HeadDrafter

    def warm_up(self) -> None:
        """Run it once. Its computed rows of sequences are lost."""
        self.drafter.warm_up()

    def follow(self, model: LanguageModel) -> None:
        """Draft for the served model with other weights, between two steps, by this head."""
        assert isinstance(model, CausalLM), "a head drafts for a native model"
        self.drafter.follow(model, self.head)

    def status_line(self) -> str:
        """Return a line of facts for people."""
        head, kv = self.head, self.drafter.kv
        taps = ", ".join(map(str, head.taps))
        return (
            f"drafts    {self.name} ({head.kind} head on hidden states {taps}, {head.num_parameters / 1e6:.1f} M "
            f"parameters, {format_weights(head.num_bytes, 0)}), kv pool {format_size(kv.num_bytes)} = "
            f"{kv.num_blocks * kv.block_size} tokens"
        )


def load_draft_head(
    config: GenerationServiceConfig, folder: Path, model: LanguageModel, device: Device, show: ShowProgress
) -> DraftHead | None:
    """Load `config.draft_head` for the served `model` of `folder`. None: none is configured. Call it before the pools
    are sized.

    Raises StartupError naming --draft-head.
    """
    if config.draft_head is None:
        return None
    if not isinstance(model, CausalLM):
        problem = "is in several processes" if config.tensor_parallel > 1 else "is run by transformers' modules"
        raise StartupError(
            f"{HEAD_FLAG} needs a native model in one process, and this one {problem}: prompt_lookup_num_tokens and "
            "--assistant-model draft there, too",
            flag=HEAD_FLAG,
        )
    with _about_the_head():
        own = _folder(config.draft_head, folder, show)
        with ProgressStage(show, LOAD_WEIGHTS, head_name(config.draft_head)) as stage:
            if config.draft_head == OWN_HEAD:
                return load_mtp(own, model, device, config.quantization, stage.count)
            if is_dflash(own):
                return load_dflash(own, model, device, config.quantization, stage.count)
            return load_eagle3(own, model.config, device, model.dtype, config.quantization, stage.count)


def make_head_draft(
    config: GenerationServiceConfig,
    head: DraftHead,
    model: CausalLM,
    kv: KVCachePool,
    device: Device,
    context: int,
    masks: MaskFiller,
) -> HeadDraft:
    """Make pool and drafter around a loaded head, beside the served model's pool `kv`. `masks` may be the served
    model's, which never runs at the same time. Raises StartupError naming --assistant-kv-memory."""
    shape = KVShape.of(
        head.config, head.dtype, kv.block_size, requested=config.kv_cache_dtype, num_layers=head.num_layers
    )
    most = kv.num_blocks // kv.bundle_blocks
    with _about_the_head():
        own = make_draft_pool(config, shape, device, context=context, most_blocks=most)
    drafter = HeadDrafter(head, own, model.config.vocab_size, kernels=device.sampling_kernels(), masks=masks)
    drafter.follow(model, head)
    drafter.warm_up()
    return HeadDraft(head_name(config.draft_head), head, drafter)


def _folder(draft_head: str, served: Path, show: ShowProgress) -> Path:
    if draft_head == OWN_HEAD:
        return served
    return demo_head_folder() if draft_head == DEMO_HEAD else resolve_model(draft_head, show=show)


def head_name(draft_head: str | None) -> str:
    """Return the name by which requests ask for the head: the folder's own, or the hub id."""
    named = {DEMO_HEAD: "penstock-demo-head", OWN_HEAD: OWN_HEAD}
    return named.get(draft_head or "") or model_name(draft_head)


@contextmanager
def _about_the_head() -> Iterator[None]:
    """Make errors inside name the head's flags instead of the served model's."""
    try:
        yield
    except StartupError as error:
        message = error.message
        for flag, own in _FLAGS.items():
            message = message.replace(flag, own)
        if not message.startswith(HEAD_FLAG) and error.flag not in _FLAGS.values():
            message = f"{HEAD_FLAG}: {message}"
        raise StartupError(message, flag=_FLAGS.get(error.flag or "", error.flag or HEAD_FLAG)) from error
