"""Models of transformers with layers that keep a state of their own: recurrent layers and short convolutions.

Rows of one step must not mix there. So a step goes through the modules in parts (B, T): sequences with the same number
of tokens in the step are one batch; sequences at their beginning are apart from those that go on. Each part has a cache
object of transformers' own class. It holds the states of its sequences; the keys are in the paged pool. Steps with
drafts have parts of their own (state_passes.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.state_pool import HeldStates, StatePool, StateTensor
from penstock.generation.attention.transformers_interface import PagedStep, UnsupportedAttention, paged
from penstock.generation.models.state_passes import RowRange, rounds, rows_of_step
from penstock.generation.models.transformers_fallback import TransformersModel, recorded_metadata, step_tensors

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.layers.lora import AdapterBatch
    from penstock.generation.models.hidden_keeper import StateKeeper

# Names of the states of a layer of transformers' cache.
_NAMES = ("conv_states", "recurrent_states")
# Their modules hold time steps to a least in a pass over several tokens, and not in one over a single token.
_CLAMPING = ("nemotron_h", "zamba2")
# Number under which ids of rows after a state are kept, those that go through the modules again.
_IDS = 0
# Names of a model's argument that is the cache: the first since transformers 5.24.
_CACHES = ("cache", "cache_params", "past_key_values")


class StatefulModel(TransformersModel):
    """A TransformersModel with states of sequences. The pool that it is given has `states`, and each step's metadata
    the slots in them."""

    # False: its modules go on from a state by only one token, like some of Mamba's first version. The rest of a prompt
    # after its first part is then computed token by token.
    continues = True

    @cached_property
    def _cache_argument(self) -> str:
        return cache_argument(self.causal)

    def by_token(self) -> StatefulModel:
        """Return a model on the same weights that goes on by one token at a time."""
        twin = copy.copy(self)
        twin.continues = False
        return twin

    @torch.inference_mode()
    @override
    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        rows_R: Tensor | None = None,
        *,
        embeds_TI: Tensor | None = None,
        keeper: StateKeeper | None = None,
        attention: Attention | None = None,
        adapters: AdapterBatch | None = None,
    ) -> Tensor:
        """Raises RuntimeError without a pool of states."""
        if adapters is not None or keeper is not None or kv.states is None or metadata.state_slots is None:
            raise RuntimeError("a model with states needs their pool, and gives neither hidden states nor adapters")
        attention = attention or self.attention
        if metadata.state_kept is not None or metadata.state_behind is not None:
            hidden = self._with_drafts(input_ids_T, embeds_TI, metadata, kv, attention, kv.states)
            return hidden if rows_R is None else hidden[rows_R]
        hidden_TI: Tensor | None = None
        for members in _parts(metadata):
            if len(members) == metadata.num_seqs:
                hidden_TI = self._run(input_ids_T, positions_T, embeds_TI, metadata, kv, attention)
                break
            part, rows = metadata.select(members)
            embeds = None if embeds_TI is None else embeds_TI[rows]
            found = self._run(input_ids_T[rows], positions_T[rows], embeds, part, kv, attention)
            if hidden_TI is None:
                hidden_TI = found.new_empty(metadata.num_rows, found.shape[1])
            hidden_TI[rows] = found
        assert hidden_TI is not None, "a step has sequences"
        return hidden_TI if rows_R is None else hidden_TI[rows_R]

    @cached_property
    def _goes_again(self) -> bool:
        """True when a step after drafts goes again through those that were accepted. Behind windows and chunks there
        may be no keys any more that these rows would read."""
        if not self.continues or self.config.model_type in _CLAMPING:
            return False
        return all(call.window is None and call.chunk is None for call in self.calls)

    def _with_drafts(
        self,
        input_ids_T: Tensor,
        embeds_TI: Tensor | None,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        attention: Attention,
        pool: StatePool,
    ) -> Tensor:
        """Return hidden states (T, hidden) of a step that has drafts, or that follows one."""
        slots, again = metadata.state_slots, self._goes_again
        assert slots is not None, "checked before"
        sequences = rows_of_step(metadata)
        # Ids of the rows that go through the modules again: drafts are outputs, which all have ids.
        earlier: dict[int, Tensor] = {}
        for member, rows in enumerate(sequences):
            if rows.behind and again:
                earlier[member] = pool.later(slots[member], _IDS)[0][: rows.behind]
            elif rows.behind:
                pool.take_later(slots[member], rows.behind - 1, rows.behind)
        if again:
            passes = [rows.at_once() for rows in sequences]
        else:
            passes = [rows.draft_by_draft(continues=self.continues) for rows in sequences]
        starts = metadata.query_start.tolist()
        tables_SB = metadata.block_tables.cpu()
        hidden_TI: Tensor | None = None
        for alike in rounds(passes):
            for span, members in alike.items():
                ends = [metadata.kv_lens[one] - sequences[one].count + span.end for one in members]
                part, positions_T = AttentionMetadata.build(
                    [span.count] * len(members), ends, tables_SB[members], kv.block_size, self.device
                )
                own = [slice(starts[one] + max(span.begin, 0), starts[one] + span.end) for one in members]
                ids, embeds = [], []
                for member, place in zip(members, own, strict=True):
                    before = earlier[member][span.begin :] if span.begin < 0 else None
                    ids += [input_ids_T[place]] if before is None else [before, input_ids_T[place]]
                    if embeds_TI is not None:
                        embeds += [embeds_TI[place]] if before is None else [self.embed(before), embeds_TI[place]]
                found = self._run_at_once(
                    torch.cat(ids),
                    positions_T,
                    torch.cat(embeds) if embeds else None,
                    replace(part, state_slots=tuple(slots[one] for one in members)),
                    kv,
                    attention,
                    None if span.advances else span,
                )
                if hidden_TI is None:
                    hidden_TI = found.new_empty(metadata.num_rows, found.shape[1])
                for number, place in enumerate(own):
                    end = (number + 1) * span.count
                    hidden_TI[place] = found[end - (place.stop - place.start) : end]
        assert hidden_TI is not None, "a step has sequences"
        later = []
        for member, own_passes in enumerate(passes):
            lacking = sum(one.count for one in own_passes if not one.advances)
            later.append(lacking)
            if lacking and again:
                own_ids = input_ids_T[starts[member] : starts[member + 1]]
                whole = torch.cat([earlier[member], own_ids]) if member in earlier else own_ids
                pool.keep_later(slots[member], _IDS, (whole[len(whole) - lacking :].clone(),))
        pool.advance(slots, metadata.kv_lens, later)
        return hidden_TI

    def _run(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        embeds_TI: Tensor | None,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        attention: Attention,
    ) -> Tensor:
        """Return hidden states (rows, hidden) of one part."""
        count = metadata.query_lens[0]
        if self.continues or count == 1 or count == metadata.kv_lens[0]:
            return self._run_at_once(input_ids_T, positions_T, embeds_TI, metadata, kv, attention)
        found = []
        for row, token in enumerate(metadata.tokens()):
            own = slice(row, None, count)
            embeds = None if embeds_TI is None else embeds_TI[own]
            found.append(self._run_at_once(input_ids_T[own], positions_T[own], embeds, token, kv, attention))
        return torch.stack(found, 1).flatten(0, 1)

    def _run_at_once(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        embeds_TI: Tensor | None,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        attention: Attention,
        drafts: RowRange | None = None,
    ) -> Tensor:
        """Return hidden states (rows, hidden) of one part, or of one token of each of its sequences. `drafts`: rows
        that leave the state as it was."""
        slots, pool, count = metadata.state_slots, kv.states, metadata.num_seqs
        assert slots is not None, "checked before"
        assert pool is not None, "checked before"
        is_new = metadata.kv_lens[0] == metadata.query_lens[0]
        if drafts is not None:
            states = self._copied(pool, slots, drafts)
        else:
            states = HeldStates(slots, []) if is_new else pool.read(slots)
        decodes = not is_new and metadata.num_rows == count
        # A graph leaves none.
        carrier: Any = None

        def by_modules() -> tuple[Tensor, ...]:
            nonlocal carrier
            carrier = self._carrier(states.tensors) if states.carrier is None else states.carrier
            hidden = self._by_states(input_ids_T, positions_T, embeds_TI, metadata, kv, attention, count, carrier)
            return hidden, *self._left_in(carrier)

        if drafts is not None:
            hidden, *tensors = by_modules()
            if not self._goes_again:
                for place, slot in enumerate(slots):
                    pool.keep_later(slot, drafts.number, tuple(tensor[place].clone() for tensor in tensors))
            return hidden
        if decodes and embeds_TI is None and attention is self.attention and self._is_fixed and kv.is_plain:
            hidden, *tensors = self._decode_by_graph(input_ids_T, positions_T, metadata, kv, states.tensors, by_modules)
        else:
            hidden, *tensors = by_modules()
        # A module may have put a new tensor in its place.
        pool.write(HeldStates(slots, tensors, carrier), metadata.kv_lens, holds=decodes)
        return hidden

    def _by_states(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        embeds_TI: Tensor | None,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        attention: Attention,
        count: int,
        carrier: Any,
    ) -> Tensor:
        """Return hidden states (rows, hidden) of `count` sequences by one call of the decoder, which goes on from the
        states of `carrier` and leaves new ones there."""
        inputs: dict[str, Any] = {
            "position_ids": positions_T.reshape(count, -1),
            self._cache_argument: carrier,
            "use_cache": True,
            "return_dict": True,
        }
        if embeds_TI is None:
            inputs["input_ids"] = input_ids_T.reshape(count, -1)
        else:
            inputs["inputs_embeds"] = embeds_TI.reshape(count, -1, embeds_TI.shape[1])
        step = PagedStep(self.calls, metadata, kv, attention, layers=self._layers)
        with paged(step):
            hidden: Tensor = self._decoder(**inputs).last_hidden_state
        if step.num_calls != len(self.calls):
            raise UnsupportedAttention(f"it attends {step.num_calls} times instead of {len(self.calls)}")
        return hidden.flatten(0, 1)

    def _copied(self, pool: StatePool, slots: tuple[int, ...], drafts: RowRange) -> HeldStates:
        """Return copies of the states before rows of drafts."""
        if drafts.number:
            each = [pool.later(slot, drafts.number - 1) for slot in slots]
            return HeldStates(slots, [torch.stack(alike) for alike in zip(*each, strict=True)])
        return HeldStates(slots, [tensor.clone() for tensor in pool.read(slots).tensors])

    def _carrier(self, tensors: Sequence[Tensor]) -> Any:
        """Return a cache with the states of some sequences; without tensors they begin."""
        carrier = empty_cache(self.causal)
        if tensors:
            _fill(carrier, self._states, tensors)
        return carrier

    def _left_in(self, carrier: Any) -> tuple[Tensor, ...]:
        return tuple(getattr(carrier.layers[one.layer], one.name)[one.number] for one in self._states)

    def _decode_by_graph(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        states: Sequence[Tensor],
        by_modules: Callable[[], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Return hidden states and new states of one token of each sequence, by the graph of a pass where there is
        one."""
        memory = kv.layer_tensors

        def compute(
            ids_T: Tensor,
            positions_T: Tensor,
            query_start: Tensor,
            context_lens: Tensor,
            tables: Tensor,
            slots: Tensor,
            *tensors: Tensor,
        ) -> tuple[Tensor, ...]:
            step = recorded_metadata(query_start, context_lens, tables, slots)
            pool, carrier = kv.over(tensors[: len(memory)]), self._carrier(tensors[len(memory) :])
            hidden = self._by_states(ids_T, positions_T, None, step, pool, self.attention, ids_T.shape[0], carrier)
            return hidden, *self._left_in(carrier)

        return self._pass_graph(
            (kv.geometry, metadata.view_tables is None),
            (input_ids_T, positions_T, *step_tensors(metadata), *memory),
            by_modules,
            compute,
            tuple(states),
        )


def empty_cache(causal: Any) -> Any:
    """Return a cache of transformers for the model's layers, without keys."""
    kind = _minimax_cache() if causal.config.model_type == "minimax" else _cache_class()
    return kind(config=causal.config)


def cache_argument(causal: Any) -> str:
    """Name of the model's argument, and of its output, that is the cache."""
    known = signature(causal.forward).parameters
    return next((name for name in _CACHES if name in known), _CACHES[-1])


def takes_cache(causal: Any) -> bool:
    """True when the model can go on from a cache; otherwise it computes every token anew."""
    return any(name in signature(causal.forward).parameters for name in _CACHES)


def is_states_only(cache: object) -> bool:
    """True for a cache by `empty_cache`."""
    return isinstance(cache, _cache_class())


def has_states(config: Any) -> bool:
    """True when transformers' cache for a model of this configuration has layers with a state of their own."""
    try:
        layers = _cache_class()(config=config).layers
    except (AttributeError, KeyError):
        # A model that transformers' cache cannot be made for has none there.
        return False
    return any(_holds_states(layer) for layer in layers)


def read_layout(cache: Any) -> tuple[StateTensor, ...]:
    """Return the tensors that a pass over one sequence left in its cache.

    Raises UnsupportedAttention if a layer keeps them elsewhere, or keeps more.
    """
    from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

    found = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicIndexedLayer) or (isinstance(layer, DynamicLayer) and layer.is_initialized):
            raise UnsupportedAttention(f"its cache keeps more than keys, values and states ({type(layer).__name__})")
        if not _holds_states(layer):
            continue
        own = [
            StateTensor(number, name, index, tuple(tensor.shape[1:]), tensor.dtype)
            for name in _NAMES
            for index, tensor in getattr(layer, name).items()
            if tensor is not None
        ]
        if not own:
            raise UnsupportedAttention(f"layer {number} keeps its state outside of transformers' cache")
        found += own
    return tuple(found)


def _holds_states(layer: object) -> bool:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _fill(carrier: Any, layout: Iterable[StateTensor], tensors: Iterable[Tensor]) -> None:
    """Put states into an empty cache, as if it had computed them."""
    for one, tensor in zip(layout, tensors, strict=True):
        layer = carrier.layers[one.layer]
        getattr(layer, one.name)[one.number] = tensor
        getattr(layer, f"is_{one.name}_initialized")[one.number] = True
        layer.has_previous_state[one.number] = True
        if one.name == _NAMES[0]:
            layer.conv_kernel_size[one.number] = tensor.shape[-1]
            layer.dtype, layer.device = tensor.dtype, tensor.device


@cache
def _cache_class() -> Any:
    from transformers import DynamicCache

    base: Any = DynamicCache

    class StatesOnly(base):  # type: ignore[misc]
        """Cache that keeps states; keys and values pass through."""

        def update(self, keys: Tensor, values: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
            return keys, values

        def get_seq_length(self, layer_idx: int = 0) -> int:
            """Return 0: positions are given, and masks are not made."""
            return 0

    return StatesOnly


@cache
def _minimax_cache() -> Any:
    from transformers import DynamicCache
    from transformers.models.minimax import modeling_minimax

    own: Any = getattr(modeling_minimax, "MiniMaxCache")  # noqa: B009

    class MiniMaxStates(_cache_class(), own):  # type: ignore[misc]
        """The cache that MiniMax insists on, with its states where those of other models are."""

        def __init__(self, config: Any) -> None:
            DynamicCache.__init__(self, config=config)
            self.linear_cache: list[Tensor] = []

        def get_linear_cache(self, layer_idx: int) -> Tensor | None:
            """Return the state of a layer; None: it has none yet."""
            state: Tensor | None = self.layers[layer_idx].recurrent_states[0]
            return state

        def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
            """Keep the state of a layer."""
            self.layers[layer_idx].recurrent_states[0] = linear_cache

    return MiniMaxStates


def _parts(metadata: AttentionMetadata) -> list[list[int]]:
    """Return the sequences that go through the modules together."""
    parts: dict[tuple[int, bool], list[int]] = {}
    for index, (count, length) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        parts.setdefault((count, count == length), []).append(index)
    return list(parts.values())
