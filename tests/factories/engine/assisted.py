"""Engines with a draft model or a draft head, and draft models of chosen quality."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from factories.engine.fake_engine import engine_config
from factories.engine.model_engine import with_free_drafts
from factories.engine.pools import add_states, in_groups, unwritten_host_pool, unwritten_pool
from factories.models.checkpoints import reference_model
from factories.models.run_kernels import cpu_device, new_runner
from penstock.generation.attention.index_keys import index_rows
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.draft_head import DraftHead
from penstock.generation.runner.drafter import ModelDrafter
from penstock.generation.runner.grammar_masks import MaskFiller
from penstock.generation.runner.head_drafter import HeadDrafter
from penstock.generation.runner.model_runner import ModelRunner
from penstock.generation.startup.tune_engine import window_of

WIDE = engine_config(num_blocks=1200, max_batch_tokens=600, max_running_sequences=64, max_draft_rows=400)


def noised_checkpoint(source: Path, folder: Path, noise: float, seed: int = 0) -> Path:
    """Write the checkpoint with `noise` times each tensor's own spread added: a model that nearly agrees."""
    model = reference_model(source)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def make_runner(model: CausalLM, num_blocks: int, block_size: int) -> ModelRunner:
    """Make a runner on a pool that shows reads of unwritten places."""
    config = model.config
    geometry = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
    kv = KVCachePool(*geometry, model.dtype, model.device, has_values=config.has_values)
    for layer in range(config.num_layers):
        kv.key(layer).fill_(float("nan"))
        kv.value(layer).fill_(float("nan"))
    return new_runner(model, kv)


def assisted_engine(
    model: CausalLM, draft: CausalLM | None = None, config: EngineConfig = WIDE, *, draft_blocks: int | None = None
) -> Engine:
    """Make an engine over `model` with the draft model `draft` on a pool of its own."""
    drafter = None
    if draft is not None:
        blocks = config.num_blocks if draft_blocks is None else draft_blocks
        drafter = ModelDrafter(
            make_runner(draft, blocks, config.block_size),
            num_blocks=blocks,
            block_size=config.block_size,
            max_context_tokens=config.max_context_tokens,
            max_prefill_tokens=config.max_batch_tokens,
        )
    return Engine(config, make_runner(model, config.num_blocks, config.block_size), None, drafter=drafter)


def head_engine(
    model: CausalLM,
    head: DraftHead,
    config: EngineConfig = WIDE,
    *,
    draft_blocks: int | None = None,
    masks: MaskFiller | None = None,
) -> Engine:
    """Make an engine over `model` with a draft head on a pool of its own. It drafts as many tokens as asked for: what
    they cost is measured, and so differs from run to run."""
    blocks = config.num_blocks if draft_blocks is None else draft_blocks
    facts = head.config
    geometry = (head.num_layers, blocks, config.block_size, facts.num_kv_heads, facts.head_dim)
    kv = unwritten_pool(*geometry, head.dtype, has_values=facts.has_values)
    kernels = cpu_device().sampling_kernels()
    head.share(model)
    drafter = HeadDrafter(head, kv, model.config.vocab_size, kernels=kernels, masks=masks)
    layout, config = in_groups(model, config)
    layers = model.config.num_kv_layers if layout is None else layout.layers_a_block
    places = (layers, config.num_blocks, config.block_size, model.config.num_kv_heads, model.config.head_dim)
    kinds: dict[str, Any] = {"index": index_rows(model.config, model.dtype), "shapes": model.config.kv_shapes}
    served = unwritten_pool(*places, model.dtype, layout, has_values=model.config.has_values, **kinds)
    config = add_states(model, served, config)
    runner = new_runner(model, served, tap=drafter, masks=masks, host=unwritten_host_pool(served, config))
    return with_free_drafts(Engine(replace(config, window=window_of(model)), runner, None, drafter=drafter))
