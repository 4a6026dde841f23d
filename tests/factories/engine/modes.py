"""Run requests as the service does, on a real model, with generate()'s own keyword arguments, and look inside.

arguments -> GenerateRequest -> GenerationCore.prepare (convert, validate, resolve) -> Engine over a pool full of NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from factories.engine.fake_engine import Answer, engine_config, run
from factories.engine.grammars import compiled
from factories.engine.model_engine import with_free_drafts
from factories.engine.pools import add_states, unwritten_host_pool, unwritten_pool
from factories.models.run_kernels import KERNELS, cpu_device, new_runner
from penstock.common.progress import show_nothing
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.request import Request
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine
from penstock.generation.grammar.matcher_state import MaskWorkers
from penstock.generation.runner.head_drafter import HeadDrafter
from penstock.generation.sampling.sampler import Sampler
from penstock.generation.service import GenerationCore
from penstock.generation.startup.load import load
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.generation.wire.convert import to_generate_options
from penstock.generation.wire.embeds_intake import to_prompt_embeds
from penstock.v1 import common_pb2, config_pb2, generation_pb2
from penstock_client._config_values import watermarking_config
from penstock_client._tensors import set_rows

ROOMY = engine_config(num_blocks=400, max_context_tokens=256, max_batch_tokens=200, max_running_sequences=64)

_STOP = ("stop_strings", "ignore_eos", "include_stop_string_in_output")
_EARLY_STOPPING = {
    False: config_pb2.EARLY_STOPPING_FALSE,
    True: config_pb2.EARLY_STOPPING_TRUE,
    "never": config_pb2.EARLY_STOPPING_NEVER,
}
_SCHEDULES = {
    "constant": config_pb2.ASSISTANT_TOKENS_SCHEDULE_CONSTANT,
    "heuristic": config_pb2.ASSISTANT_TOKENS_SCHEDULE_HEURISTIC,
    "heuristic_transient": config_pb2.ASSISTANT_TOKENS_SCHEDULE_HEURISTIC_TRANSIENT,
}


def load_service(folder: Path, **config: Any) -> LoadedModel:
    """Load a folder as the service does, in float32, on one thread."""
    own = {"kv_memory": "1MiB", "threads": 1, "dtype": "float32", "tune_seconds": 0.0}
    settings = {"model": str(folder), **own, **config}
    torch.set_num_threads(1)
    return load(GenerationServiceConfig(kernels=KERNELS, **settings), folder.name, show_nothing)


def to_message(prompt: Iterable[int], arguments: Mapping[str, Any]) -> generation_pb2.GenerateRequest:
    """Turn generate()'s arguments into a message; options that it does not have are named as in our API."""
    given = {name: value for name, value in arguments.items() if value is not None}
    message = generation_pb2.GenerateRequest(prompt_token_ids=list(prompt))
    ends = given.pop("eos_token_id", [])
    message.eos_token_ids.extend(ends if isinstance(ends, list) else [ends])
    for name in _STOP:
        if name in given:
            value = given.pop(name)
            message.stop.MergeFrom(config_pb2.StopConfig(**{name: value}))
    message.stop.stop_token_ids.extend(_runs(given.pop("stop_token_ids", [])))
    for name in [name for name in given if name in config_pb2.OutputConfig.DESCRIPTOR.fields_by_name]:
        message.output.MergeFrom(config_pb2.OutputConfig(**{name: given.pop(name)}))
    if "constraint" in given:
        message.constraint.CopyFrom(config_pb2.Constraint(**given.pop("constraint")))
    if "inputs_embeds" in given:
        set_rows(message.inputs_embeds, given.pop("inputs_embeds"))
    for name in ("seed", "cache_salt", "adapter", "priority", "inputs_embeds_before_ids"):
        if name in given:
            setattr(message, name, given.pop(name))
    for name, value in given.items():
        message.config.MergeFrom(config_pb2.GenerationConfig(**{name: _value(name, value)}))
    return message


def _runs(runs: Iterable[Iterable[int]]) -> list[common_pb2.TokenIds]:
    return [common_pb2.TokenIds(ids=ids) for ids in runs]


def _value(name: str, value: Any) -> Any:
    """Return an argument in the form of its field."""
    match name:
        case "early_stopping":
            return _EARLY_STOPPING[value]
        case "num_assistant_tokens_schedule":
            return _SCHEDULES[value]
        case "forced_eos_token_id":
            return value if isinstance(value, list) else [value]
        case "bad_words_ids":
            return _runs(value)
        case "negative_prompt_ids":
            return common_pb2.TokenIds(ids=value)
        case "force_words_ids":
            return [_alternatives(word if isinstance(word[0], list) else [word]) for word in value]
        case "constraints":
            return [_constraint(entry) for entry in value]
        case "sequence_bias":
            return [config_pb2.SequenceBias(token_ids=ids, bias=bias) for ids, bias in value]
        case "exponential_decay_length_penalty":
            return config_pb2.ExponentialDecayLengthPenalty(start_index=value[0], decay_factor=value[1])
        case "dola_layers":
            if isinstance(value, str):
                return config_pb2.DolaLayers(preset=value)
            return config_pb2.DolaLayers(indices=config_pb2.LayerIndices(indices=value))
        case "watermarking_config":
            return watermarking_config(value)
        case "allowed_token_trie":
            return config_pb2.AllowedTokenTrie(sequences=_runs(value))
        case _:
            return value


def _alternatives(runs: Iterable[Iterable[int]]) -> config_pb2.WordAlternatives:
    return config_pb2.WordAlternatives(alternatives=_runs(runs))


def _constraint(entry: Mapping[str, Any]) -> config_pb2.DecodingConstraint:
    if "phrasal" in entry:
        return config_pb2.DecodingConstraint(phrasal=common_pb2.TokenIds(ids=entry["phrasal"]))
    return config_pb2.DecodingConstraint(disjunctive=_alternatives(entry["disjunctive"]))


def prepare(
    loaded: LoadedModel, message: generation_pb2.GenerateRequest, block_size: int = ROOMY.block_size
) -> Request:
    """Prepare a message as the servicer does; constraints are the demo tokenizer's. Raises the servicer's errors.

    `block_size` is that of the engine that it is for.
    """
    # The parts of it that only move bytes are left out.
    parts = dict.fromkeys((part.name for part in dataclasses.fields(GenerationCore) if part.init), None)
    core = GenerationCore(**(parts | {"config": GenerationServiceConfig(), "loaded": loaded}))  # type: ignore[arg-type]
    command = to_generate_options(message)
    request = core.prepare(command, None).request
    if command.inputs_embeds is not None:
        dtype = str(loaded.weights.model.dtype).removeprefix("torch.")
        request.embeds = to_prompt_embeds(command.inputs_embeds, dtype, block_size, command.num_placeholders)
    if command.constraint is not None:
        grammar = compiled(command.constraint)
        request.grammar = grammar.ending_itself() if request.params.ignore_eos else grammar
    return request


@dataclass(frozen=True, slots=True)
class Row:
    """One row that was drawn from: all tokens before it, the model's logits (V) and the processed scores (V)."""

    sequence: Sequence
    token_ids: list[int]
    logits: torch.Tensor
    scores: torch.Tensor


class RecordingSampler(Sampler):
    """Sampler that keeps logits and processed scores of every row that it draws from."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, cpu_device().sampling_kernels())
        self.rows: list[Row] = []

    def sample(self, logits_NV: torch.Tensor, sequences: Items[Sequence], *rest: Any, **named: Any) -> Any:
        scores_NV = self.processed_scores(logits_NV, sequences, *rest, **named)
        self.rows += [
            Row(sequence, list(sequence.token_ids), logits_V, scores_V)
            for sequence, logits_V, scores_V in zip(sequences, logits_NV.clone(), scores_NV, strict=True)
        ]
        return super().sample(logits_NV, sequences, *rest, **named)


@functools.cache
def _mask_workers(vocab_size: int) -> MaskWorkers:
    return MaskWorkers(vocab_size, 1)


def new_engine(loaded: LoadedModel, config: EngineConfig = ROOMY, sampler: Sampler | None = None) -> Engine:
    """Make an engine with a pool of its own: reads of unwritten places give NaN."""
    model = loaded.weights.model
    geometry = (model.config.num_kv_layers, config.num_blocks, config.block_size)
    own = loaded.pools.kv
    kv = unwritten_pool(
        *geometry, own.num_kv_heads, own.head_dim, own.dtype, has_values=own.has_values, index=own.index
    )
    config = add_states(model, kv, config)
    host = unwritten_host_pool(kv, config)
    drafter = None if loaded.engine.draft is None else loaded.engine.draft.drafter
    tap = drafter if isinstance(drafter, HeadDrafter) else None
    runner = new_runner(model, kv, masks=_mask_workers(model.config.vocab_size), host=host, tap=tap)
    if sampler is not None:
        runner._sampler = sampler
    if drafter is not None:
        # Another engine counts its sequences from 0 as well.
        drafter.clear()
    return with_free_drafts(Engine(config, runner, loaded.files.token_bytes, drafter=drafter))


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer: ids and score per returned sequence, and the rows that were drawn from."""

    ids: list[list[int]]
    scores: list[float | None]
    answer: Answer
    rows: list[Row] = field(default_factory=list)


def generate(
    loaded: LoadedModel, prompt: Iterable[int], arguments: Mapping[str, Any], *, record: bool = False
) -> Generated:
    """Run a request alone on an engine of its own to its end; check that every block is free then."""
    request = prepare(loaded, to_message(prompt, arguments))
    sampler = RecordingSampler(loaded.weights.model.device) if record else None
    engine = new_engine(loaded, sampler=sampler)
    answer = run(engine, request)[request.request_id]
    assert answer.finished is not None
    assert answer.finished.error is None, answer.finished.error
    assert engine.load().kv_blocks_used == 0
    ends = sorted(answer.finished.sequences, key=lambda end: end.index)
    return Generated(
        [answer.ids.get(end.index, []) for end in ends],
        [end.cumulative_logprob for end in ends],
        answer,
        sampler.rows if sampler is not None else [],
    )
