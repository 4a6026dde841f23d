"""Last step of a start: the parts of an engine, with a step size that is measured and a model that has run once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.common.heap import trim_heap
from penstock.common.logging import get_logger
from penstock.common.options import values_of
from penstock.common.progress import TUNE, WARM_UP, ProgressStage
from penstock.common.units import format_size
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.engine.config import EngineConfig, EngineOptions
from penstock.generation.grammar.matcher_state import MaskWorkers
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.runner.model_runner import ModelRunner, WarmUpWork
from penstock.generation.startup.batch_tuning import (
    LARGEST_SIZE,
    BatchTuning,
    PromptTimer,
    smallest_budget,
    tune_batch_tokens,
)
from penstock.generation.startup.draft_model import DraftModel, make_draft_model
from penstock.generation.startup.load_head import HeadDraft, make_head_draft
from penstock.generation.startup.load_weights import LoadedWeights
from penstock.generation.startup.make_pools import Pools
from penstock.generation.startup.read_files import ModelFiles
from penstock.generation.startup.start import Start

_log = get_logger("penstock.generation")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Parts that an engine is made of."""

    config: EngineConfig
    runner: ModelRunner
    batch: BatchTuning
    draft: DraftModel | HeadDraft | None

    def follow(self, model: LanguageModel) -> None:
        """Let a draft head share parts with the served model that takes its place, between two steps."""
        if isinstance(self.draft, HeadDraft):
            self.draft.follow(model)

    def warm_up(self, work: WarmUpWork | None = None) -> None:
        """Run all models once, the served one with `work`. Writes into blocks of the pools, so none may be in use or
        cached."""
        self.runner.warm_up(work)
        if self.draft is not None:
            self.draft.warm_up()

    def status_lines(self, pools: Pools) -> list[str]:
        """Return lines of facts for people."""
        return [
            *([] if pools.host is None else [self._host_line(pools.host.num_bytes)]),
            f"batch     {self.batch.describe()}",
            *([] if self.draft is None else [self.draft.status_line()]),
        ]

    def _host_line(self, num_bytes: int) -> str:
        config = self.config
        prefixes = ", evicted prefixes are kept" if config.prefix_cache and config.host_prefix_cache else ""
        way = f"preemption by {config.preemption}"
        return f"host pool {format_size(num_bytes)}: {config.num_host_blocks} blocks, {way}{prefixes}"


def tune_engine(start: Start, files: ModelFiles, weights: LoadedWeights, pools: Pools) -> EngineParts:
    """Make the runners, measure steps and warm up. Nothing else of the process may run meanwhile.

    Raises StartupError naming the flag.
    """
    config, model, device = start.config, weights.model, weights.device
    masks = MaskWorkers(files.config.vocab_size, config.mask_threads)
    head = None
    if weights.head is not None:
        assert isinstance(model, CausalLM), "a head drafts for a native model"
        head = make_head_draft(config, weights.head, model, pools.kv, device, files.context, masks)
    runner = ModelRunner(
        model,
        pools.kv,
        masks=masks,
        kernels=device.sampling_kernels(),
        host=pools.host,
        graphs=pools.graphs,
        most_captured_rows=config.max_running_sequences,
        tap=None if head is None else head.drafter,
    )
    # Before the warm-up, which writes into the KV pool: the memory of large steps then does not add to the pool's.
    batch = _tune_batch(start, weights, pools)
    trim_heap()
    start.timer.end("tuning")
    with ProgressStage(start.show, WARM_UP, start.name):
        runner.warm_up()
    start.timer.end("warm_up")
    if window := window_of(model):
        _log.info("every layer has a window: blocks behind it are given back while a sequence goes on", window=window)
    if pools.kv.layout is not None:
        spans = [group.span for group in pools.kv.layout.groups if group.span]
        _log.info("layers keep only what they read: blocks behind it are given back", tokens=spans)
    own = _engine_config(config, pools, files.context, batch.tokens, window)
    draft = None if weights.draft is None else make_draft_model(config, weights.draft, device, own, masks)
    return EngineParts(own, runner, batch, draft or head)


def window_of(model: LanguageModel) -> int:
    """Return the most positions that a row of any layer reads, its own included; 0: all."""
    windows = model.windows
    if not windows or model.state_layout or None in windows:
        return 0
    return max(window for window in windows if window is not None) + model.attention.reads_behind


def _tune_batch(start: Start, weights: LoadedWeights, pools: Pools) -> BatchTuning:
    config = start.config
    if config.max_batch_tokens is not None:
        return BatchTuning(config.max_batch_tokens)
    _log.info("measuring step sizes", at_most_seconds=config.tune_seconds)
    with ProgressStage(start.show, TUNE):
        timer = PromptTimer(weights.model, pools.kv, weights.device, most_tokens=LARGEST_SIZE)
        tuned = tune_batch_tokens(
            timer,
            smallest=smallest_budget(config.max_running_sequences),
            largest=timer.longest_prompt,
            step_seconds=config.target_step_seconds,
            spend_seconds=config.tune_seconds,
        )
    _log.info("batch size", batch=tuned.describe())
    return tuned


def _engine_config(
    config: GenerationServiceConfig, pools: Pools, context: int, batch_tokens: int, window: int
) -> EngineConfig:
    """Add what the steps before have found to the engine's knobs."""
    kv, states = pools.kv, pools.kv.states
    if states is not None and not states.num_snapshots:
        config = replace(config, prefix_cache=False)
    return EngineConfig(
        **values_of(EngineOptions, config),
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_context_tokens=context,
        max_batch_tokens=batch_tokens,
        groups=() if kv.layout is None else kv.layout.groups,
        window=window,
        keeps_states=states is not None,
        num_state_snapshots=0 if states is None else states.num_snapshots,
        num_host_blocks=0 if pools.host is None else pools.host.num_blocks,
        block_bytes=kv.bytes_per_block,
    )
