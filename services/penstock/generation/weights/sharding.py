"""Part of a model's weights, and of an adapter's matrices, that one rank of a tensor-parallel group has.

The cut is by columns and rows as in Megatron-LM (Shoeybi et al., 2019): q, k, v, gate and up give some of their
outputs, the output projection and down take these as some of their inputs, and the results are added up. A rank has
whole heads; if there are fewer key/value heads than ranks, several ranks have the same one. The head is cut by the
vocabulary; every rank has the whole embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from penstock.common.errors import StartupError
from penstock.generation.layers.lora import GATED, OUTPUT, QKV, SITES_A_LAYER, LoraPart
from penstock.generation.weights.plain_tensors import PlainTensors
from penstock.generation.weights.tensor_names import EMBEDDING, LM_HEAD, LayerLinear, layer_linears, layer_prefix

if TYPE_CHECKING:
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.host.mapped import MappedFile
    from penstock.generation.weights.checkpoint_weights import TensorSource

FLAG = "--tensor-parallel"
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shard:
    """Place of a process in its group: `rank` of `count`."""

    rank: int
    count: int

    def check(self, config: ModelConfig) -> None:
        """Raise StartupError for a model that cannot be spread over `count` processes."""
        kv = config.num_kv_heads
        faults = (
            (config.route == "fallback", "transformers' modules run it, in one process"),
            (config.experts is not None, "it has a mixture of experts, which runs in one process"),
            (config.qk_norm_is_whole, "it norms all heads together, which takes one process"),
            (config.latent is not None, "its heads share one compressed row a token, which takes one process"),
            (config.delta is not None, "its layers keep a state of each sequence, which takes one process"),
            (bool(config.layer_shapes), "its layers have heads of several sizes, which take one process"),
            (config.has_gates, "its heads have gates, which take one process"),
            (config.has_sinks, "its heads have sinks, which take one process"),
            (config.num_heads % self.count != 0, f"its {config.num_heads} heads cannot be divided evenly"),
            (
                kv % self.count != 0 and self.count % kv != 0,
                f"its {kv} key/value heads can be neither divided nor repeated evenly",
            ),
            (
                config.intermediate_size % self.count != 0,
                f"the {config.intermediate_size} inner numbers of its MLP cannot be divided evenly",
            ),
        )
        for is_there, fault in faults:
            if is_there:
                raise StartupError(f"{FLAG} {self.count} is not possible for this model: {fault}", flag=FLAG)

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the configuration of this rank's part."""
        return replace(
            whole,
            num_heads=whole.num_heads // self.count,
            num_kv_heads=max(1, whole.num_kv_heads // self.count),
            intermediate_size=whole.intermediate_size // self.count,
        )

    def part(self, size: int) -> Range:
        """Return this rank's part of `size` things; all parts except the last are equally long."""
        each = -(-size // self.count)
        return min(self.rank * each, size), min((self.rank + 1) * each, size)

    def vocabulary(self, vocab_size: int) -> Range:
        """Return the ids of this rank's rows of the head."""
        return self.part(vocab_size)

    def kv_heads(self, whole: ModelConfig) -> Range:
        """Return this rank's key/value heads."""
        if whole.num_kv_heads % self.count == 0:
            return self.part(whole.num_kv_heads)
        head = self.rank * whole.num_kv_heads // self.count
        return head, head + 1


@dataclass(frozen=True, slots=True)
class _ShardCut:
    """Part of one tensor: some rows, in order, of some columns; None: all. `is_zero`: another rank adds the bias."""

    rows: tuple[Range, ...] | None = None
    columns: Range | None = None
    is_zero: bool = False


class ShardedSource(PlainTensors):
    """TensorSource of one rank's part of a checkpoint. Quantised matrices of the checkpoint become numbers here."""

    def __init__(self, whole: TensorSource, config: ModelConfig, shard: Shard) -> None:
        """Take the whole checkpoint of `config`, after its names and shapes were checked."""
        self.folder: Path = whole.folder
        self._whole = whole
        self._cuts = {LM_HEAD: _ShardCut(rows=(shard.vocabulary(config.vocab_size),))}
        for layer in range(config.num_layers):
            qkv, output, gated, down = layer_linears(config, layer)
            prefix = layer_prefix(layer)
            self._cut_outputs(prefix, qkv, _qkv_rows(config, shard))
            self._cut_outputs(prefix, gated, _gated_rows(config, shard))
            self._cut_inputs(prefix, output, _output_columns(config, shard), shard)
            self._cut_inputs(prefix, down, shard.part(config.intermediate_size), shard)

    def _cut_outputs(self, prefix: str, linear: LayerLinear, rows: tuple[Range, ...]) -> None:
        """Cut the parts of a product by its joined rows."""
        first = 0
        for part, count in zip(linear.parts, linear.rows, strict=True):
            own = tuple(_moved(one, -first) for one in rows if first <= one[0] < first + count)
            self._cuts[f"{prefix}{part}.weight"] = self._cuts[f"{prefix}{part}.bias"] = _ShardCut(rows=own)
            first += count

    def _cut_inputs(self, prefix: str, linear: LayerLinear, columns: Range, shard: Shard) -> None:
        (part,) = linear.parts
        self._cuts[f"{prefix}{part}.weight"] = _ShardCut(columns=columns)
        self._cuts[f"{prefix}{part}.bias"] = _ShardCut(is_zero=shard.rank > 0)

    def __contains__(self, tensor: str) -> bool:
        # As for a model with a head apart from the embedding: the head is cut, and the embedding is whole.
        return tensor in (EMBEDDING, LM_HEAD) or tensor in self._whole

    def dtype(self, tensor: str) -> torch.dtype | None:
        return self._whole.dtype(self._stored(tensor))

    def shape(self, tensor: str) -> tuple[int, ...]:
        rows, *columns = self._whole.shape(self._stored(tensor))
        cut = self._cuts.get(tensor, _ShardCut())
        if cut.rows is not None:
            rows = sum(end - begin for begin, end in cut.rows)
        if cut.columns is not None:
            columns = [cut.columns[1] - cut.columns[0]]
        return (rows, *columns)

    def take(self, tensor: str) -> Tensor:
        value, cut = self._whole.take(self._stored(tensor)), self._cuts.get(tensor, _ShardCut())
        if cut.is_zero:
            return torch.zeros_like(value)
        return value if cut.rows is None else torch.cat([value[begin:end] for begin, end in cut.rows])

    def row(self, tensor: str, number: int) -> Tensor:
        raise TypeError(f"{tensor} has all experts")

    def pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        """Rows of other ranks are not read."""
        cut, first = self._cuts.get(tensor, _ShardCut()), 0
        for piece in self._whole.pieces(self._stored(tensor), multiple=multiple):
            last = first + piece.shape[0]
            for begin, end in ((first, last),) if cut.rows is None else cut.rows:
                part = piece[max(begin - first, 0) : max(min(end, last) - first, 0)]
                if part.shape[0]:
                    yield part if cut.columns is None else part[:, slice(*cut.columns)]
            first = last

    def mapped(self, tensor: str) -> tuple[MappedFile, int]:
        return self._whole.mapped(self._stored(tensor))

    def are_equal(self, one: str, other: str) -> bool:
        """Embedding and head are never equal."""
        return False

    @override
    def is_quantised(self, tensor: str) -> bool:
        return self._whole.is_quantised(self._stored(tensor))

    def _stored(self, tensor: str) -> str:
        """Return the checkpoint's name of a tensor: a tied one has one name."""
        other = {EMBEDDING: LM_HEAD, LM_HEAD: EMBEDDING}.get(tensor)
        return tensor if other is None or tensor in self._whole else other


def own_inputs(of_inputs: Mapping[str, Tensor], config: ModelConfig, shard: Shard) -> dict[str, Tensor]:
    """Return of every matrix's numbers, one for each input of the whole model, those of a rank's inputs. What is no
    vector is left out: the numbers may come from a file."""
    found = {name: numbers for name, numbers in of_inputs.items() if numbers.dim() == 1}
    for layer in range(config.num_layers):
        _, output, _, down = layer_linears(config, layer)
        columns = {output.name: _output_columns(config, shard), down.name: shard.part(config.intermediate_size)}
        for name, own in columns.items():
            key = f"{layer_prefix(layer)}{name}"
            if key in found:
                found[key] = found[key][slice(*own)].clone()
    return found


def adapter_parts(site: int, parts: Sequence[LoraPart], config: ModelConfig, shard: Shard) -> tuple[LoraPart, ...]:
    """Return a rank's matrices of an adapter at one site (layers.lora); none: it has no output there.
    `config` is that of the whole model; the parts fit its sites.

    They are cut as the weights are: rows of B with the outputs, columns of A with the inputs. The other matrix is whole
    in every rank: where results are summed over the ranks, B A x is the sum of B times the parts of A x. A part of a
    matrix is a copy, so that nothing keeps the whole in memory.
    """
    if site == config.num_layers * SITES_A_LAYER:
        return _cut_b(parts, (shard.vocabulary(config.vocab_size),))
    kind = site % SITES_A_LAYER
    if kind in (QKV, GATED):
        return _cut_b(parts, _qkv_rows(config, shard) if kind == QKV else _gated_rows(config, shard))
    columns = _output_columns(config, shard) if kind == OUTPUT else shard.part(config.intermediate_size)
    return tuple(replace(part, a_RI=torch.cat([part.a_RI[:, slice(*columns)]])) for part in parts)


def _cut_b(parts: Sequence[LoraPart], rows: tuple[Range, ...]) -> tuple[LoraPart, ...]:
    """Return the parts with outputs among `rows`; the rows ascend and are adjacent in the rank."""
    found = []
    for part in parts:
        last, place, first = part.first + part.b_OR.shape[0], 0, None
        pieces = []
        for begin, end in rows:
            low, high = max(begin, part.first), min(end, last)
            if low < high:
                # What follows is adjacent in the rank, too: a part has all outputs between its first and last.
                first = place + low - begin if first is None else first
                pieces.append(part.b_OR[low - part.first : high - part.first])
            place += end - begin
        if first is not None:
            found.append(LoraPart(first, part.a_RI, torch.cat(pieces), part.scale))
    return tuple(found)


def adapter_copies(site: int | None, config: ModelConfig, count: int) -> tuple[int, int]:
    """Return the numbers of A and of B that `count` ranks have together, in wholes, of an adapter's matrices at a site;
    None: of the embedding. Approximate: several ranks may have the same rows of key/value heads."""
    if site is None:
        return count, count
    takes_outputs = site == config.num_layers * SITES_A_LAYER or site % SITES_A_LAYER in (QKV, GATED)
    return (count, 1) if takes_outputs else (1, count)


def _qkv_rows(config: ModelConfig, shard: Shard) -> tuple[Range, ...]:
    """Return the rows of q, k and v in their joined product."""
    query, kv = (_times(part, config.head_dim) for part in (shard.part(config.num_heads), shard.kv_heads(config)))
    keys, values = config.num_heads * config.head_dim, (config.num_heads + config.num_kv_heads) * config.head_dim
    return query, _moved(kv, keys), _moved(kv, values)


def _gated_rows(config: ModelConfig, shard: Shard) -> tuple[Range, ...]:
    """Return the rows of gate and up in their joined product."""
    inner = shard.part(config.intermediate_size)
    return inner, _moved(inner, config.intermediate_size)


def _output_columns(config: ModelConfig, shard: Shard) -> Range:
    """Return the columns of the output projection: those of this rank's heads."""
    return _times(shard.part(config.num_heads), config.head_dim)


def _times(part: Range, factor: int) -> Range:
    return part[0] * factor, part[1] * factor


def _moved(part: Range, by: int) -> Range:
    return part[0] + by, part[1] + by
