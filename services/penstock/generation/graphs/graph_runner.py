"""Computation of a graph's call, on the engine's thread between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.common.errors import InvalidArgument
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.devices.torch_dtypes import COMPUTED_DTYPES
from penstock.generation.graphs.blocks import read_mask, run_block, run_block_in_pool
from penstock.generation.graphs.graph import BATCH, SAMPLE_CANDIDATES, GraphKind
from penstock.generation.sampling.sampler import Sampler

if TYPE_CHECKING:
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.core.step import SampledToken
    from penstock.generation.graphs.graph import Graph
    from penstock.generation.graphs.sequences import PoolSequence, SequenceBlocks
    from penstock.generation.models.decoder import CausalLM
    from penstock.generation.sampling.sampling_kernels import SamplingKernels

# Those of inputs, outputs and tensors at the server.
GRAPH_DTYPES = {**COMPUTED_DTYPES, "int8": torch.int8, "int32": torch.int32}
# Ids of rows that are shorter than others.
_PADDING = -1
# Inputs of sample_head: index, the option that it is, its largest value.
_ROW_OPTIONS: tuple[tuple[int, str, float], ...] = (
    (2, "top_p", 1.0),
    (3, "temperature", 1e6),
    (4, "repetition_penalty", 1e6),
)


@dataclass(slots=True)
class GraphCall:
    """One call. Its inputs have the graph's shapes and dtypes."""

    graph: Graph
    # Sizes, as Graph.bind returns them.
    sizes: dict[str, int]
    inputs: dict[int, Tensor]
    # Of block graphs: keys and values are in the pool.
    sequence: PoolSequence | None = None
    # Tokens of it to go on after; None: all, or none for block_i.
    start: int | None = None
    # Outputs that are written into tensors, by index; the others are returned.
    targets: dict[int, Tensor] = field(default_factory=dict)


class GraphRunner:
    """Runs graphs over one model and its pool."""

    def __init__(self, model: CausalLM, kv: KVCachePool, blocks: SequenceBlocks, kernels: SamplingKernels) -> None:
        self._model = model
        self._kv = kv
        self._blocks = blocks
        self._kernels = kernels

    @torch.inference_mode()
    def run(self, call: GraphCall) -> dict[int, Tensor]:
        """Run a call: write the outputs that have targets, return the others by index.

        It changes only these and the call's sequence. Raises InvalidArgument, NotFound and ResourceExhausted.
        """
        # Ids and positions are checked before they are used: nobody may write into a tensor at the server in between.
        call.inputs = {index: one.clone() if one.dtype is torch.int32 else one for index, one in call.inputs.items()}
        outputs = dict(enumerate(self._run(call)))
        for index, target in call.targets.items():
            target.view(-1).copy_(outputs.pop(index).reshape(-1))
        return outputs

    @torch.inference_mode()
    def sample(self, logits_NV: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """Draw a token for each row as the engine does. Raises InvalidArgument naming `logits` for a NaN, and
        NO_TOKEN_LEFT."""
        return self._draw(logits_NV, sequences, "logits")

    def _run(self, call: GraphCall) -> tuple[Tensor, ...]:
        kind, inputs = call.graph.kind, call.inputs
        if kind in (GraphKind.EMBEDDING, GraphKind.EMBEDDING_CACHE):
            return (self._embed(inputs[0]),)
        if kind in (GraphKind.BLOCK, GraphKind.BLOCK_CACHE):
            return self._block(call) if call.sequence is None else self._block_in_pool(call, call.sequence)
        if kind is GraphKind.LM_HEAD:
            return (self._model.compute_logits(self._model.normed(inputs[0])),)
        if kind is GraphKind.GREEDY_HEAD:
            return (self._greedy(inputs[0]),)
        return self._candidates(call)

    def _embed(self, ids_BT: Tensor) -> Tensor:
        vocab = self._model.config.vocab_size
        if not bool(((ids_BT >= 0) & (ids_BT < vocab)).all()):
            raise InvalidArgument("inputs[0]", f"ids must be from 0 to {vocab - 1}", reason="TOKEN_OUT_OF_VOCABULARY")
        return self._model.embed(ids_BT.reshape(-1).long()).view(*ids_BT.shape, -1)

    def _block(self, call: GraphCall) -> tuple[Tensor, ...]:
        inputs, batch = call.inputs, call.sizes[BATCH]
        hidden_BRI = inputs[0]
        rows = hidden_BRI.shape[1]
        keys, values = inputs.get(3), inputs.get(4)
        if (keys is None) != (values is None):
            raise InvalidArgument("inputs", "must have both history_k and history_v, or neither")
        columns = 0 if keys is None else keys.shape[1]
        lengths = [(columns, rows)] * batch if 2 not in inputs else read_mask(inputs[2], rows)
        self._check_positions(inputs.get(1), lengths)
        history = None if keys is None or values is None else (keys, values)
        return run_block(self._model, call.graph.layer, self._kv, hidden_BRI, lengths, inputs.get(1), history)

    def _block_in_pool(self, call: GraphCall, sequence: PoolSequence) -> tuple[Tensor, ...]:
        graph, rows = call.graph, call.inputs[0].shape[1]
        known = sequence.num_tokens[graph.layer]
        start = call.start if call.start is not None else known if graph.kind is GraphKind.BLOCK_CACHE else 0
        if start > known:
            raise InvalidArgument("start", f"must be at most the {known} tokens that the layer has")
        self._check_positions(call.inputs.get(1), [(start, rows)])
        self._blocks.grow(sequence, start + rows)
        positions = call.inputs.get(1)
        found = run_block_in_pool(
            self._model,
            graph.layer,
            self._kv,
            call.inputs[0][0],
            start,
            sequence.blocks,
            None if positions is None else positions[0],
        )
        sequence.num_tokens[graph.layer] = start + rows
        return tuple(one[None] for one in found)

    def _check_positions(self, positions_BR: Tensor | None, lengths: list[tuple[int, int]]) -> None:
        if positions_BR is None:
            return
        most = self._model.config.max_position_embeddings
        for position_R, (_, rows) in zip(positions_BR, lengths, strict=True):
            if not bool(((position_R[:rows] >= 0) & (position_R[:rows] < most)).all()):
                raise InvalidArgument("inputs[1]", f"positions must be from 0 to {most - 1}")

    def _greedy(self, logits_BV: Tensor) -> Tensor:
        sequences = [_sequence(row, SamplingParams(1), []) for row in range(len(logits_BV))]
        drawn = self._draw(logits_BV, sequences, "inputs[0]")
        return torch.tensor([[token.token_id] for token in drawn], dtype=torch.int32, device=self._model.device)

    def _candidates(self, call: GraphCall) -> tuple[Tensor, Tensor]:
        """Return the highest processed scores of each row as probabilities (B, K), and their ids."""
        logits_BV, vocab = call.inputs[0], self._model.config.vocab_size
        sequences = []
        for row in range(len(logits_BV)):
            given = [] if 1 not in call.inputs else call.inputs[1][row].tolist()
            ids = [token for token in given if token != _PADDING]
            if any(not 0 <= token < vocab for token in ids):
                raise InvalidArgument(
                    "inputs[1]", f"ids must be from 0 to {vocab - 1}, or {_PADDING}", reason="TOKEN_OUT_OF_VOCABULARY"
                )
            sequences.append(_sequence(row, _row_params(call.inputs, row), ids))
        scores_BV = self._sampler().processed_scores(logits_BV, sequences)
        if bool(scores_BV.isnan().any()):
            raise _no_number(logits_BV, "inputs[0]")
        top = scores_BV.topk(min(SAMPLE_CANDIDATES, vocab), dim=-1)
        return top.values.softmax(-1), top.indices.to(torch.int32)

    def _draw(self, logits_NV: Tensor, sequences: list[Sequence], field: str) -> list[SampledToken]:
        try:
            # The sampler works in place.
            return self._sampler().sample(logits_NV.clone(memory_format=torch.contiguous_format), sequences)
        except FloatingPointError:
            raise _no_number(logits_NV, field) from None

    def _sampler(self) -> Sampler:
        return Sampler(self._model.device, self._kernels)


def _row_params(inputs: dict[int, Tensor], row: int) -> SamplingParams:
    options: dict[str, Any] = {}
    for index, name, most in _ROW_OPTIONS:
        if index not in inputs:
            continue
        value = float(inputs[index][row])
        # NaN fails every comparison.
        if not 0.0 < value <= most:
            raise InvalidArgument(f"inputs[{index}]", f"must be above 0 and at most {most:g}")
        options[name] = value
    return SamplingParams(1, do_sample=True, top_k=SAMPLE_CANDIDATES, **options)


def _sequence(number: int, params: SamplingParams, prompt: list[int]) -> Sequence:
    # No sequence of the engine has a negative id; a sampler of this call alone keeps it.
    return Sequence(-1 - number, 0, params, 0, prompt, len(prompt))


def _no_number(logits_NV: Tensor, field: str) -> InvalidArgument:
    if bool(logits_NV.isnan().any()):
        return InvalidArgument(field, "must hold numbers only")
    return InvalidArgument(field, "leaves no token to draw with these options", reason="NO_TOKEN_LEFT")
