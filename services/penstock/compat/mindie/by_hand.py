"""The model and the sampler by hand, as callers of MindIE's GeneratorTorch drive them: blocks and slots are theirs.

A caller's blocks are claimed from the engine's pool under their own numbers (CallerBlocks.claim), so the engine's own
requests neither read nor overwrite them; every call takes its turn on the engine's thread, between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from penstock.common.errors import InvalidArgument
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.core.sampling_params import SamplingParams, derive_seed
from penstock.generation.core.sequence import Sequence as EngineSequence
from penstock.generation.core.step import SampledToken
from penstock.generation.engine.block_commands import BlockCommands
from penstock.generation.engine.engine import Engine
from penstock.generation.sampling.sampler import Sampler
from penstock.generation.startup.loaded_model import LoadedModel

if TYPE_CHECKING:
    from penstock.generation.layers.lora import AdapterBatch, AdapterWeights

# Numbers of a block's copy, and of a swap: [kind, source, destination].
_COPY, _SWAP = 2, 3
_FROM_HOST, _TO_HOST = 0, 1


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Rows of one forward pass: the newest tokens of S sequences, T rows together. Tensors, arrays or lists."""

    # (T): ids, and positions in their sequences.
    input_ids: Any
    position_ids: Any
    # (S, blocks of the longest): numbers of blocks of the pool.
    block_tables: Any
    # (T): block * block_size + offset: the place of each row's key and value. None: by positions and block tables.
    slots: Any = None
    # (S): tokens of each sequence, these rows included.
    context_length: Any = None
    # Longest of them; checked where it is given.
    max_seq_len: int | None = None
    # (N): rows to return logits of. None: the last row of each sequence.
    prefill_head_indices: Any = None
    # True: every sequence begins here, unless query_length says otherwise. False: each has one row.
    is_prefill: bool = True
    # (S): rows of each sequence.
    query_length: Any = None
    # (S): names of adapters; None or "": none.
    adapter_ids: Sequence[str | None] | None = None


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Sequences that draw their next tokens from N rows of logits, one each."""

    # (N): the caller's number of each. State such as counts of tokens is kept under it until clear_cache.
    sequence_ids: Sequence[int]
    # (N): prompt and output so far.
    prompt_token_ids: Sequence[Sequence[int]]
    output_token_ids: Sequence[Sequence[int]] = ()
    # Options by their names, as keywords of generate: of all rows, or of each.
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = field(default_factory=dict)


def whole_numbers(name: str, values: Any) -> np.ndarray:
    """Return `values` as an array of int64. Raises InvalidArgument naming `name`."""
    try:
        numbers = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except ValueError:
        raise InvalidArgument(name, "must be numbers in rows of equal length") from None
    if numbers.size and not np.issubdtype(numbers.dtype, np.integer):
        raise InvalidArgument(name, "must be whole numbers")
    return numbers.astype(np.int64)


@dataclass(frozen=True, slots=True)
class _InputRows:
    """A checked ModelInput."""

    input_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    metadata: AttentionMetadata
    wanted: list[int]
    blocks: frozenset[int]
    adapters: AdapterBatch | None


class ForwardPass:
    """Forward passes over blocks that a caller holds."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.weights.model
        self._kv = loaded.pools.kv
        self._adapters = loaded.weights.adapters
        self._longest = loaded.served.max_context_tokens

    def run(self, engine: Engine, given: ModelInput) -> Tensor:
        """Compute the rows, write their keys and values, and return logits (N, vocabulary) in float32. Engine thread.

        Raises InvalidArgument naming a field, NotFound for an adapter, and what `CallerBlocks.claim` raises.
        """
        rows = self._read(given)
        engine.caller_blocks.claim(rows.blocks, "block_tables")
        device = self._model.device
        hidden = self._model.forward(
            torch.from_numpy(rows.input_ids).to(device),
            torch.from_numpy(rows.positions).to(device),
            rows.metadata,
            self._kv,
            torch.tensor(rows.wanted, dtype=torch.int64, device=device),
            adapters=rows.adapters,
        )
        return self._model.compute_logits(hidden, None if rows.adapters is None else rows.adapters.select(rows.wanted))

    def _read(self, given: ModelInput) -> _InputRows:
        ids = self._flat("input_ids", given.input_ids)
        if not len(ids) or ids.min() < 0 or ids.max() >= self._model.config.vocab_size:
            raise InvalidArgument("input_ids", f"must be ids below {self._model.config.vocab_size}, at least one")
        positions = self._flat("position_ids", given.position_ids, len(ids))
        tables = whole_numbers("block_tables", given.block_tables)
        if tables.ndim != 2 or not len(tables):
            raise InvalidArgument("block_tables", "must have a row of blocks for each sequence")
        lengths = self._lengths(given, len(tables), len(ids))
        contexts = self._contexts(given, lengths)
        size = self._kv.block_size
        if max(contexts) > tables.shape[1] * size:
            raise InvalidArgument("block_tables", f"must have room for {max(contexts)} tokens in blocks of {size}")
        used = frozenset(
            int(block) for row, length in zip(tables, contexts, strict=True) for block in row[: -(-length // size)]
        )
        if any(not 0 <= block < self._kv.num_blocks for block in used):
            raise InvalidArgument("block_tables", f"every block must be from 0 to {self._kv.num_blocks - 1}")
        metadata, expected = AttentionMetadata.build(
            lengths, contexts, torch.from_numpy(tables.astype(np.int32)), size, self._model.device
        )
        if positions.tolist() != expected.tolist():
            raise InvalidArgument("position_ids", "must be those of each sequence's newest tokens, in order")
        places = metadata.slot_mapping.cpu().numpy()
        if given.slots is not None and self._flat("slots", given.slots, len(ids)).tolist() != places.tolist():
            raise InvalidArgument("slots", "must be the places that block_tables give to position_ids")
        if len(set(places.tolist())) < len(places):
            raise InvalidArgument("slots", "no slot may come twice")
        wanted, adapters = self._wanted(given, lengths), self._adapter_batch(given, lengths)
        return _InputRows(ids, positions, places, metadata, wanted, used, adapters)

    def _adapter_batch(self, given: ModelInput, lengths: list[int]) -> AdapterBatch | None:
        """Return the adapters of the rows; None: there are none. One that left memory is read again."""
        names = list(given.adapter_ids or ())
        if not any(names):
            return None
        if len(names) != len(lengths):
            raise InvalidArgument("adapter_ids", f"must have {len(lengths)} entries, one for each sequence")
        found = [self._adapters.get(name) or self._adapters.bring(name) if name else None for name in names]
        weights = [None if one is None else cast("AdapterWeights", one.weights) for one in found]
        return self._model.adapter_batch(weights, lengths)

    @staticmethod
    def _flat(name: str, values: Any, length: int | None = None) -> np.ndarray:
        numbers = whole_numbers(name, values)
        if numbers.ndim != 1 or (length is not None and len(numbers) != length):
            raise InvalidArgument(name, "must have one dimension" if length is None else f"must have {length} entries")
        return numbers

    def _lengths(self, given: ModelInput, count: int, rows: int) -> list[int]:
        """Return the rows of each sequence."""
        if given.query_length is not None:
            lengths = self._flat("query_length", given.query_length, count).tolist()
        elif given.is_prefill:
            if given.context_length is None:
                raise InvalidArgument("context_length", "is needed, or query_length")
            lengths = self._flat("context_length", given.context_length, count).tolist()
        else:
            lengths = [1] * count
        if min(lengths) < 1 or sum(lengths) != rows:
            raise InvalidArgument("query_length", f"must be at least 1 each, and {rows} together as input_ids")
        return list(lengths)

    def _contexts(self, given: ModelInput, lengths: list[int]) -> list[int]:
        """Return the tokens of each sequence, its new rows included."""
        contexts = lengths
        if given.context_length is not None:
            contexts = self._flat("context_length", given.context_length, len(lengths)).tolist()
        if any(context < length for context, length in zip(contexts, lengths, strict=True)):
            raise InvalidArgument("context_length", "must count the rows of this call, too")
        if max(contexts) > self._longest:
            raise InvalidArgument("context_length", f"must be at most {self._longest}", reason="PROMPT_TOO_LONG")
        if given.max_seq_len is not None and given.max_seq_len < max(contexts):
            raise InvalidArgument("max_seq_len", "must not be less than the longest context_length")
        return list(contexts)

    def _wanted(self, given: ModelInput, lengths: list[int]) -> list[int]:
        if given.prefill_head_indices is None:
            lasts: list[int] = (np.cumsum(lengths) - 1).tolist()
            return lasts
        rows: list[int] = self._flat("prefill_head_indices", given.prefill_head_indices).tolist()
        if not rows or rows != sorted(set(rows)) or rows[0] < 0 or rows[-1] >= sum(lengths):
            raise InvalidArgument("prefill_head_indices", "must be rows of input_ids, ascending, at least one")
        return rows


class HandSampler:
    """The engine's sampler on logits of a caller. Engine thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._vocab_size = loaded.served.vocab_size
        self._device = loaded.weights.model.device
        self._sampler = Sampler(self._device, loaded.weights.device.sampling_kernels())
        # The caller's number -> the sequence under which the sampler keeps its state, and the options it began with.
        self._known: dict[int, tuple[EngineSequence, SamplingParams]] = {}
        self._next_id = 0

    def check(self, logits: Any, metadata: SamplingMetadata) -> Tensor:
        """Return the logits (N, vocabulary) as a float32 copy. Raises InvalidArgument for shapes that do not fit."""
        rows = torch.as_tensor(logits)
        count = len(metadata.sequence_ids)
        if rows.ndim != 2 or rows.shape != (count, self._vocab_size) or not rows.is_floating_point():
            raise InvalidArgument("logits", f"must be numbers in {count} rows, one a sequence, of {self._vocab_size}")
        if len(set(metadata.sequence_ids)) < count or not count:
            raise InvalidArgument("sequence_ids", "must be different numbers, at least one")
        if len(metadata.prompt_token_ids) != count or not all(map(len, metadata.prompt_token_ids)):
            raise InvalidArgument("prompt_token_ids", "must hold the ids of each sequence's prompt, none empty")
        if len(metadata.output_token_ids) not in (0, count):
            raise InvalidArgument("output_token_ids", "must be empty, or hold the ids of each sequence's output")
        return rows.detach().to(self._device, torch.float32, copy=True).contiguous()

    def draw(
        self, logits_NV: Tensor, metadata: SamplingMetadata, params: Sequence[SamplingParams], has_seed: Sequence[bool]
    ) -> list[SampledToken]:
        """Draw the next token of each sequence. One without a seed in its options keeps that of its first draw.

        Raises InvalidArgument where a row has no number, or no token left.
        """
        outputs = metadata.output_token_ids or [()] * len(params)
        sequences = [
            self._sequence(number, list(prompt), list(output), one, keeps_seed=not seeded)
            for number, prompt, output, one, seeded in zip(
                metadata.sequence_ids, metadata.prompt_token_ids, outputs, params, has_seed, strict=True
            )
        ]
        try:
            return self._sampler.sample(logits_NV, sequences)
        except FloatingPointError:
            raise InvalidArgument(
                "logits", "a row has no token to draw: NaN, or all that is left is forbidden"
            ) from None

    def clear(self, numbers: Iterable[int]) -> int:
        """Forget sequences by the caller's numbers; unknown ones are ignored. Returns the number of those known."""
        gone = [self._known.pop(number)[0].seq_id for number in numbers if number in self._known]
        self._sampler.release(gone)
        return len(gone)

    def _sequence(
        self, number: int, prompt: list[int], output: list[int], params: SamplingParams, *, keeps_seed: bool
    ) -> EngineSequence:
        known = self._known.get(number)
        if known is not None:
            sequence, began_with = known
            if keeps_seed:
                params = replace(params, seed=began_with.seed)
            token_ids = prompt + output
            # The sampler counts tokens as they are appended: what is not a continuation begins anew.
            if began_with == params and token_ids[: sequence.num_tokens] == sequence.token_ids:
                sequence.token_ids.extend(token_ids[sequence.num_tokens :])
                return sequence
            self.clear((number,))
        self._next_id += 1
        sequence = EngineSequence(
            seq_id=self._next_id,
            index=0,
            params=params,
            seed=derive_seed(params.seed, 0),
            token_ids=prompt + output,
            num_prompt_tokens=len(prompt),
        )
        self._known[number] = (sequence, params)
        return sequence


def copy_blocks(engine: Engine, pairs: Any) -> int:
    """Copy (source, destination) blocks of the pool, in order; they are the caller's from then on. Engine thread.

    Returns the number of pairs. Raises as `BlockCommands.copy`.
    """
    numbers = whole_numbers("pairs", pairs)
    if numbers.ndim != 2 or numbers.shape[1] != _COPY:
        raise InvalidArgument("pairs", "must be pairs of a source and a destination")
    BlockCommands(engine, claims=True).copy([(int(source), int(destination)) for source, destination in numbers])
    return len(numbers)


def swap_blocks(engine: Engine, swaps: Any) -> int:
    """Copy blocks [[kind, source, destination]] between the pools, in order; kind 0: host to device, 1: device to host.
    They are the caller's from then on. Engine thread.

    Returns their number. Raises as `BlockCommands.swap`.
    """
    numbers = whole_numbers("swaps", swaps)
    if numbers.ndim != 2 or numbers.shape[1] != _SWAP or not set(numbers[:, 0].tolist()) <= {_FROM_HOST, _TO_HOST}:
        raise InvalidArgument("swaps", "must be [kind, source, destination] each; kind 0: from the host, 1: to it")
    rows = [(int(kind), int(source), int(destination)) for kind, source, destination in numbers]
    BlockCommands(engine, claims=True).swap(rows)
    return len(rows)
