"""Check of a model of transformers at its start, with the weights that will serve: its own eager attention and cache,
against a paged run of chunks and decode steps of two sequences side by side.

Windows, chunks and the lengths from which scores are scaled are cut during the check, so that short sequences exceed
them.

In a reduced format the two ways round differently, and some models make much of that: of Gemma 4's random weights the
modules' own answer in bfloat16 is 70 % away from that in float32. So where a reduced format differs, each layer is
judged by itself as well: it gets the very rows that transformers' way had there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.index_keys import index_rows
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.state_pool import new_states
from penstock.generation.attention.transformers_interface import UnsupportedAttention
from penstock.generation.models.layer_inputs import decoder_layers, given_inputs
from penstock.generation.models.module_states import first_cache
from penstock.generation.models.recording import Recording, record
from penstock.generation.models.transformers_fallback import TransformersModel, attending_by
from penstock.generation.models.transformers_states import StatefulModel, cache_argument, takes_cache

_log = get_logger("penstock.generation")
_BLOCK_SIZE = 4
# Tokens of the longer sequence and decode steps of both, for most models and for slow ones.
_USUAL, _SHORT = (48, 6), (24, 2)
# A model is slow if a pass of a few tokens takes more seconds than this.
_SLOW_SECONDS = 0.1
# Largest window of the check, in parts of the longer sequence.
_WINDOWS = 3
# Median relative error of a stretch of rows at which a layer differs. Reduced formats round differently for other
# numbers of rows, and a router may then choose another expert now and then; a wrong mask changes nearly all rows by far
# more.
_TOLERANCE = {torch.float32: 2e-3}
_REDUCED_TOLERANCE = 0.15
# The same where a layer has the rows of transformers' way, in parts of what it changes of them. Layers that were right
# had at most 0.03, those with a wrong window 0.2 to 1.
_LAYER_TOLERANCE = 0.05
# Least change of a layer, in parts of its result: a smaller one would be lost in the rounding of the result.
_LEAST_CHANGE = 1 / 32
# Numbers of positions, in configurations and in modules: masks are made from the first two, an indexer chooses a third
# one, and scores are scaled by how often a position has the others (Llama 4, Inkling).
_SIZES = ("sliding_window", "attention_chunk_size", "index_topk", "floor_scale", "log_scaling_n_floor")
# Of rotary embeddings with the first of these fields, by which queries are scaled, too (Mistral 4, Ministral 3).
_ROPE_SCALING, _ROPE_LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"

_DOES_NOT_RUN = (UnsupportedAttention, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)


def check_paged(model: TransformersModel, recording: Recording, *, is_quantised: bool) -> TransformersModel:
    """Compare the two ways. Return the model, or the same model by token (see StatefulModel) if only that agrees.

    Raises StartupError naming MODEL and the first layer that differs.
    """
    began = time.perf_counter()
    length, steps = _SHORT if recording.seconds > _SLOW_SECONDS else _USUAL
    length = min(length, model.config.max_position_embeddings - 1)
    steps = max(1, min(steps, length // 4))
    vocab = model.config.vocab_size
    draw = torch.Generator().manual_seed(length)
    sequences = [torch.randint(min(3, vocab - 1), vocab, (count,), generator=draw) for count in (length, length // 2)]
    tolerance = _REDUCED_TOLERANCE if is_quantised else _TOLERANCE.get(model.dtype, _REDUCED_TOLERANCE)
    try:
        with torch.inference_mode(), _small_sizes(model.causal, max(2, length // _WINDOWS)):
            calls = record(
                model.causal,
                model.config.num_layers,
                model.config.max_position_embeddings,
                has_indexers=model.config.index is not None,
            ).calls
            wanted = [_eager(model, ids, steps, recording) for ids in sequences]
            found = _paged(model.with_calls(calls), sequences, steps, tracks_layers=wanted[0].tracks_layers)
            worst = _worst(found, wanted, steps, tolerance)
            if worst is not None and isinstance(model, StatefulModel):
                again = model.by_token()
                found = _paged(again.with_calls(calls), sequences, steps, tracks_layers=wanted[0].tracks_layers)
                if _worst(found, wanted, steps, tolerance) is None:
                    model, worst = again, None
                    _log.warning(
                        "modules of this model go on from a state by one token only: what follows a prompt's first "
                        "chunk (--max-batch-tokens) is computed token by token",
                        model_type=model.config.model_type,
                    )
            if worst is not None and tolerance == _REDUCED_TOLERANCE and wanted[0].tracks_layers:
                worst = _worst_by_itself(model.with_calls(calls), sequences, wanted, steps, worst)
    except _DOES_NOT_RUN as error:
        raise _refused(model, f"transformers' modules cannot run it on the paged pool ({error})") from error
    if worst is not None:
        place, distance = worst
        name = _name(place, model.config.num_layers) if wanted[0].tracks_layers else "its output"
        raise _refused(model, f"{name} differs from transformers' own by {distance:.2g}")
    _log.info(
        "self-check passed",
        model_type=model.config.model_type,
        tokens=length,
        windows_up_to=max((call.window or call.chunk or 0 for call in calls), default=0),
        seconds=round(time.perf_counter() - began, 3),
    )
    return model


def _worst(found: list[_Run], wanted: list[_Run], num_steps: int, tolerance: float) -> tuple[int, float] | None:
    """Return the first layer that differs in any sequence: see `_first_difference`."""
    errors = [_first_difference(*pair, num_steps, tolerance) for pair in zip(found, wanted, strict=True)]
    return min((one for one in errors if one is not None), default=None)


def _worst_by_itself(
    model: TransformersModel, sequences: list[Tensor], wanted: list[_Run], num_steps: int, worst: tuple[int, float]
) -> tuple[int, float] | None:
    """Return the first layer that differs although it has the rows of `wanted` before it; `worst` where the model's
    layers take no others."""
    layers = decoder_layers(model.causal, model.config.num_layers)
    try:
        found = _paged(model, sequences, num_steps, tracks_layers=True, layers=layers, given=wanted)
    except _DOES_NOT_RUN:
        return worst
    errors = [
        _first_difference(*pair, num_steps, _LAYER_TOLERANCE, of_changes=True)
        for pair in zip(found, wanted, strict=True)
    ]
    return min((one for one in errors if one is not None), default=None)


@dataclass
class _Run:
    """Hidden states (rows, hidden) by layer and logits (rows, vocabulary) of one sequence, in order; the logits are the
    last entry."""

    states: list[list[Tensor]] = field(default_factory=list)
    tracks_layers: bool = True

    def add(self, states: list[Tensor]) -> None:
        """Append rows."""
        self.states.append(states)

    def joined(self) -> list[Tensor]:
        """Return the rows of each layer."""
        return [torch.cat(rows) for rows in zip(*self.states, strict=True)]


def _eager(model: TransformersModel, ids: Tensor, num_steps: int, recording: Recording) -> _Run:
    """Run a sequence as generate() does: its prompt at once, then token by token over the cache of its own."""
    ids = ids.to(model.device).unsqueeze(0)
    positions = torch.arange(ids.shape[1], device=model.device).unsqueeze(0)
    begin, cache, run = 0, first_cache(model.causal), _Run()
    argument = cache_argument(model.causal)
    length = ids.shape[1]
    # Some compute every token anew.
    ends = range(length - num_steps, length + 1) if takes_cache(model.causal) else [length]
    with attending_by(model.causal, "eager"):
        for end in ends:
            output = model.causal(
                input_ids=ids[:, begin:end],
                position_ids=positions[:, begin:end],
                use_cache=True,
                return_dict=True,
                output_hidden_states=True,
                **({} if cache is None else {argument: cache}),
            )
            begin, cache = end, getattr(output, argument, cache)
            given = output.hidden_states if recording.has_hidden_states else None
            run.tracks_layers = given is not None
            run.add([*(() if given is None else (state[0] for state in given)), output.logits[0].float()])
    return run


class _EveryState:
    """Keeps all rows of all layers: a StateKeeper."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def wants(self, layer: int) -> bool:
        return True

    def take(self, layer: int, hidden_TI: Tensor) -> None:
        self.states.append(hidden_TI)


def _paged(
    model: TransformersModel,
    sequences: list[Tensor],
    num_steps: int,
    *,
    tracks_layers: bool,
    layers: Sequence[nn.Module] = (),
    given: Sequence[_Run] = (),
) -> list[_Run]:
    """Run the sequences in chunks of different sizes, then token by token. `layers`: the model's; each gets
    its rows of `given`, runs of the same sequences. Raises ValueError where a pass does not call each of them once."""
    config, counts = model.config, [-(-len(ids) // _BLOCK_SIZE) for ids in sequences]
    inputs = [run.joined() for run in given]
    kv = KVCachePool(
        config.num_layers,
        sum(counts),
        _BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        model.dtype,
        model.device,
        index=index_rows(config, model.dtype),
    )
    kv.states = new_states(model.state_layout, len(sequences), model.device)
    # No block beside the one before it.
    free = list(range(0, sum(counts), 2)) + list(range(1, sum(counts), 2))
    tables = torch.zeros((len(sequences), max(counts)), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    runs = [_Run(tracks_layers=tracks_layers) for _ in sequences]
    done = [0] * len(sequences)
    chunks = [[len(ids) // 3, 2, len(ids) - len(ids) // 3 - 2 - num_steps] for ids in sequences]
    for row, plan in enumerate(chunks):
        # The second sequence begins one step later.
        plan[:] = [0] * row + [count for count in plan if count > 0] + [1] * num_steps
    for number in range(max(map(len, chunks))):
        work = [(row, plan[number]) for row, plan in enumerate(chunks) if number < len(plan) and plan[number]]
        ids = torch.cat([sequences[row][done[row] : done[row] + count] for row, count in work]).to(model.device)
        lengths = [done[row] + count for row, count in work]
        metadata, positions = AttentionMetadata.build(
            [count for _, count in work], lengths, tables[[row for row, _ in work]], _BLOCK_SIZE, model.device
        )
        if kv.states is not None:
            slots = kv.states.place((row, done[row]) for row, _ in work)
            metadata = replace(metadata, state_slots=slots)
        keeper = _EveryState() if tracks_layers else None
        rows_LTI = [
            torch.cat([inputs[row][layer][done[row] : done[row] + count] for row, count in work])
            for layer in range(len(layers))
        ]
        with given_inputs(layers, rows_LTI) as results:
            hidden = model.forward(ids, positions, metadata, kv, keeper=keeper)
        states = [*(keeper.states if keeper is not None else ()), model.compute_logits(hidden)]
        if given:
            if len(results) != config.num_layers:
                raise ValueError(f"a pass calls {len(results)} of {config.num_layers} layers")
            # What follows the last layer is a norm, and the head.
            states[1:-2] = results[:-1]
        first = 0
        for row, count in work:
            runs[row].add([state[first : first + count] for state in states])
            done[row] += count
            first += count
    return runs


def _first_difference(
    found: _Run, wanted: _Run, num_steps: int, tolerance: float, *, of_changes: bool = False
) -> tuple[int, float] | None:
    """Return place and relative error of the first layer that differs; None: none does. The last place is the logits'.
    `of_changes`: errors of layers are relative to what the layer changes, not to its result.

    The first chunk, later ones and decoded tokens are judged each by its median row.
    """
    wanted_states = wanted.joined()
    for place, (ours, theirs) in enumerate(zip(found.joined(), wanted_states, strict=True)):
        size_T = theirs.float().norm(dim=-1)
        if of_changes and 0 < place < len(wanted_states) - 2:
            change_T = (theirs.float() - wanted_states[place - 1].float()).norm(dim=-1)
            size_T = torch.maximum(change_T, _LEAST_CHANGE * size_T)
        error_T = (ours.float() - theirs.float()).norm(dim=-1) / size_T.clamp_min(1e-12)
        length = len(error_T)
        for begin, end in ((0, length // 3), (length // 3, length - num_steps), (length - num_steps, length)):
            if begin < end:
                error = float(error_T[begin:end].median())
                # A NaN differs, too.
                if not error <= tolerance:
                    return place, error
    return None


def _name(place: int, num_layers: int) -> str:
    if place == 0:
        return "its embedding"
    return f"layer {place - 1}" if place <= num_layers else "its head"


@contextmanager
def _small_sizes(causal: Any, largest: int) -> Iterator[None]:
    """Cut the windows and chunks that masks are made from, and the lengths by which scores are scaled, to `largest`
    positions inside the block."""
    configs = {id(module.config): module.config for module in causal.modules() if hasattr(module, "config")}
    for config in list(configs.values()):
        if hasattr(config, "get_text_config"):
            text = config.get_text_config()
            configs[id(text)] = text
    old: list[tuple[Any, str, float]] = []
    for owner in (*configs.values(), *causal.modules()):
        sizes = ((name, getattr(owner, name, None)) for name in _SIZES)
        old += [(owner, name, size) for name, size in sizes if _is_above(size, largest)]
    ropes = {id(rope): rope for config in configs.values() for rope in _scaling_ropes(config)}
    lengths = [(rope, rope[_ROPE_LENGTH]) for rope in ropes.values() if _is_above(rope.get(_ROPE_LENGTH), largest)]
    try:
        for owner, name, _ in old:
            setattr(owner, name, largest)
        for rope, _ in lengths:
            rope[_ROPE_LENGTH] = largest
        yield
    finally:
        for owner, name, size in old:
            setattr(owner, name, size)
        for rope, length in lengths:
            rope[_ROPE_LENGTH] = length


def _is_above(size: object, largest: int) -> TypeGuard[float]:
    return isinstance(size, int | float) and not isinstance(size, bool) and size > largest


def _scaling_ropes(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary embeddings of a configuration by which attention also scales its queries."""
    found = getattr(config, "rope_parameters", None)
    if isinstance(found, dict):
        yield from (one for one in (found, *found.values()) if isinstance(one, dict) and _ROPE_SCALING in one)


def _refused(model: TransformersModel, why: str) -> StartupError:
    return StartupError(
        f"MODEL: the self-check of model_type {model.config.model_type!r} failed: {why}; it is not served", flag="MODEL"
    )
