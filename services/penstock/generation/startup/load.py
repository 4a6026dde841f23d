"""Start of a model, step by step: files, weights, pools, engine. Blocking: runs on a thread of its own."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from penstock.common.heap import trim_heap
from penstock.common.logging import get_logger
from penstock.common.progress import IfCancelled, ShowProgress, never_cancelled
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.engine.acceptance import most_output_tokens
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.options.request_options import ModelFacts
from penstock.generation.startup.load_weights import LoadedWeights, load_weights
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.generation.startup.make_pools import make_pools
from penstock.generation.startup.preload import Begun, begin_ranks
from penstock.generation.startup.read_files import ModelFiles, read_files
from penstock.generation.startup.start import Start
from penstock.generation.startup.tune_engine import EngineParts, tune_engine

_log = get_logger("penstock.generation")


def load(
    config: GenerationServiceConfig,
    name: str,
    show: ShowProgress,
    begun: Begun | None = None,
    if_cancelled: IfCancelled = never_cancelled,
) -> LoadedModel:
    """Load `config.model`, size the KV pool by the memory that is left, and run the model once.

    `show` gets the progress and may raise to give up; `if_cancelled` gets what ends a wait for other processes. What
    was begun of the start is used, and closed when the weights are loaded, or cannot be. Raises StartupError naming the
    flag to change.
    """
    if begun is None:
        # They import torch while this process reads files.
        begun = Begun(ranks=begin_ranks(config))
    start = Start(config, name, show, if_cancelled)
    with (
        contextlib.closing(begun),
        ThreadPoolExecutor(1, "tables") as beside,
        contextlib.ExitStack() as if_failed,
    ):
        files = read_files(start)
        start.timer.end("tokenizer")
        # Runs beside the loading of weights, which needs the interpreter for moments only.
        making = None if files.token_tables is None else beside.submit(files.token_tables.prefixes)
        weights = load_weights(start, files, begun)
        if_failed.callback(weights.close)
        # No other work may run while steps are measured.
        prefixes = None if making is None else making.result()
        start.timer.end("weights")
        pools = make_pools(start, files, weights)
        if_failed.callback(pools.close)
        engine = tune_engine(start, files, weights, pools)
        loaded = LoadedModel(files, weights, pools, engine, _served(start, files, weights, engine), prefixes)
        # Frees the memory that reading and packing needed for a moment.
        trim_heap()
        start.timer.end("rest")
        _log_loaded(start, loaded)
        if_failed.pop_all()
        return loaded


def _served(start: Start, files: ModelFiles, weights: LoadedWeights, engine: EngineParts) -> ModelFacts:
    """Return the facts that requests are checked against."""
    model = weights.model.config
    return ModelFacts(
        name=start.name,
        vocab_size=model.vocab_size,
        max_context_tokens=files.context,
        tokenizer_fingerprint=files.tokenizer_fingerprint(),
        has_token_bytes=files.token_bytes is not None,
        loads_tokenizer=start.config.load_tokenizer,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        tied_embeddings=model.tie_word_embeddings,
        unsupported=weights.model.unsupported,
        assistant_model="" if engine.draft is None else engine.draft.name,
        max_output_tokens=partial(most_output_tokens, engine.config, MODES),
        has_adapter=weights.adapters.__contains__,
    )


def _log_loaded(start: Start, loaded: LoadedModel) -> None:
    """Log what was loaded, and what each part of the start took."""
    model = loaded.weights.model
    quantised: dict[str, object] = {}
    if model.config.checkpoint_format:
        quantised = {
            "checkpoint_format": model.config.checkpoint_format,
            "weight_forms": dict(model.config.weight_forms),
        }
    _log.info(
        "loaded",
        route=model.config.route,
        seconds=start.timer.seconds,
        processor_seconds=start.timer.processor_seconds,
        weights_bytes=model.num_bytes,
        mapped_bytes=model.mapped_bytes,
        kv_bytes=loaded.pools.kv.num_bytes,
        **quantised,
    )
