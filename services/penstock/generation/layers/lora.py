"""LoRA adapters in the linear layers: an adapter's matrices, and those of a step's rows (Hu et al. 2021).

A row's product gets scale * B (A x) added, in the dtype of x, for any format of the weight. A model has four sites per
layer, in the order of `weights.tensor_names.layer_linears`, and one for the head. Several modules of an adapter can be
parts of one site.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

# Sites of a layer.
QKV, OUTPUT, GATED, DOWN = range(4)
SITES_A_LAYER = 4
# csrc/linear/linear.h: outputs of a panel, and of half of one.
_PANEL, _HALF = 32, 16


@dataclass(frozen=True, slots=True)
class LoraPart:
    """Matrices of one module; it adds to the outputs of its site from `first` on."""

    first: int
    a_RI: Tensor
    b_OR: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class EmbeddingPart:
    """Matrices of the embedding: its rows get scale * B (column of A)."""

    # (vocabulary, rank): A, transposed.
    a_VR: Tensor
    b_IR: Tensor
    scale: float

    def rows(self, ids_T: Tensor) -> Tensor:
        """Return (T, hidden) to add to the embeddings of `ids_T`."""
        return (F.embedding(ids_T, self.a_VR) @ self.b_IR.T) * self.scale


class AdapterWeights(ABC):
    """An adapter's matrices in the format of the model's linear layers. Immutable."""

    num_bytes: int
    embedding: EmbeddingPart | None


class DenseAdapter(AdapterWeights):
    """Unchanged matrices, for torch's operators."""

    def __init__(self, sites: Mapping[int, Sequence[LoraPart]], embedding: EmbeddingPart | None) -> None:
        self.sites = {site: tuple(parts) for site, parts in sites.items()}
        self.embedding = embedding
        self.num_bytes = sum(part.a_RI.nbytes + part.b_OR.nbytes for parts in self.sites.values() for part in parts)
        self.num_bytes += _embedding_bytes(embedding)


class NativeAdapter(AdapterWeights):
    """Matrices as the C++ kernels read them (csrc/linear/adapters.h), which must be loaded."""

    def __init__(
        self,
        sites: Mapping[int, Sequence[LoraPart]],
        embedding: EmbeddingPart | None,
        *,
        shapes: Sequence[tuple[int, bool]],
        dtype: torch.dtype,
    ) -> None:
        """`shapes`: outputs of every site, and whether the first half of them gates the second."""
        self.embedding = embedding
        self.sites = frozenset(sites)
        tensors: list[Tensor] = []
        for site, (outputs, gated) in enumerate(shapes):
            parts = sites.get(site, ())
            tensors += _packed(parts, outputs, dtype, gated=gated) if parts else [torch.empty(0)] * 4
        self.num_bytes = sum(tensor.nbytes for tensor in tensors) + _embedding_bytes(embedding)
        self.handle: Any = torch.classes.penstock.Adapter(tensors, dtype is torch.bfloat16)


def _embedding_bytes(embedding: EmbeddingPart | None) -> int:
    return 0 if embedding is None else embedding.a_VR.nbytes + embedding.b_IR.nbytes


def _packed(parts: Sequence[LoraPart], outputs: int, dtype: torch.dtype, *, gated: bool) -> list[Tensor]:
    """Return A, B, its halves and the scales of a site, as csrc/linear/adapters.h has them."""
    granule = 2 if dtype is torch.bfloat16 else 1
    widths = [-(-part.a_RI.shape[0] // granule) * granule for part in parts]
    ranks = sum(widths)
    a_RI = torch.zeros(ranks, parts[0].a_RI.shape[1], dtype=dtype)
    scale_R = torch.zeros(ranks, dtype=torch.float32)
    b_OR = torch.zeros(outputs, ranks, dtype=dtype)
    # Ranks that the outputs of each part use.
    spans: list[tuple[int, int, int, int]] = []
    first = 0
    for part, width in zip(parts, widths, strict=True):
        rank, last = part.a_RI.shape[0], part.first + part.b_OR.shape[0]
        a_RI[first : first + rank] = part.a_RI
        scale_R[first : first + rank] = part.scale
        b_OR[part.first : last, first : first + rank] = part.b_OR
        spans.append((part.first, last, first // granule, (first + width) // granule))
        first += width
    ranges = _half_ranges(outputs, gated=gated)
    halves: list[tuple[int, int, int]] = []
    pieces: list[Tensor] = []
    offset = 0
    for low, high in ranges:
        used = [span for span in spans if span[0] < high and low < span[1]]
        begin = min((span[2] for span in used), default=0)
        end = max((span[3] for span in used), default=0)
        halves.append((offset, begin, end - begin))
        if begin < end:
            rows = b_OR[low:high, begin * granule : end * granule]
            rows = F.pad(rows, (0, 0, 0, _HALF - rows.shape[0]))
            pieces.append(rows.view(_HALF, end - begin, granule).transpose(0, 1).flatten())
            offset += pieces[-1].nbytes
    packed = torch.cat(pieces).contiguous() if pieces else b_OR.new_empty(0)
    return [a_RI, packed.view(torch.uint8), torch.tensor(halves, dtype=torch.int64), scale_R]


def _half_ranges(outputs: int, *, gated: bool) -> list[tuple[int, int]]:
    """Return the outputs [first, last) of each half of each panel."""
    if not gated:
        places = range(0, -(-outputs // _PANEL) * _PANEL, _HALF)
        return [(min(place, outputs), min(place + _HALF, outputs)) for place in places]
    half = outputs // 2
    ranges = []
    for place in range(0, half, _HALF):
        last = min(place + _HALF, half)
        ranges += [(place, last), (half + place, half + last)]
    return ranges


class AdapterBatch(ABC):
    """Adapters of the rows of one forward pass, each row's own or none. Immutable."""

    # A batch of the C++ kernels; None: torch's operators.
    native: Any

    def __init__(self, adapters: Sequence[AdapterWeights | None], counts: Sequence[int]) -> None:
        """Row by row: `counts[i]` rows have `adapters[i]`."""
        self._spans = list(zip(adapters, counts, strict=True))
        self.changes_embedding = any(one is not None and one.embedding is not None for one in adapters)

    @abstractmethod
    def changes_site(self, site: int) -> bool:
        """True when some adapter has matrices there."""

    def select(self, rows: Sequence[int]) -> AdapterBatch:
        """Return the batch of these rows, in this order."""
        by_row = [adapter for adapter, count in self._spans for _ in range(count)]
        return type(self)([by_row[row] for row in rows], [1] * len(rows))

    def add_to_embedding(self, hidden_TI: Tensor, ids_T: Tensor) -> None:
        """Add the adapters' parts to the embeddings of `ids_T`, in place."""
        first = 0
        for adapter, count in self._spans:
            if adapter is not None and adapter.embedding is not None:
                hidden_TI[first : first + count] += adapter.embedding.rows(ids_T[first : first + count])
            first += count


@dataclass(frozen=True, slots=True)
class SiteAdapters:
    """The adapters of a batch at one site."""

    batch: AdapterBatch
    site: int

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Add the adapters' parts to the product `y` of `x`, in place, by torch's operators. Return `y`."""
        cast(DenseBatch, self.batch).add_to(self.site, y_TO, x_TI)
        return y_TO


class DenseBatch(AdapterBatch):
    """Adapters of a batch, by torch's operators: one product for all rows of an adapter."""

    native = None

    def __init__(self, adapters: Sequence[AdapterWeights | None], counts: Sequence[int]) -> None:
        super().__init__(adapters, counts)
        rows: dict[DenseAdapter, list[int]] = {}
        first = 0
        for adapter, count in self._spans:
            if adapter is not None:
                rows.setdefault(cast(DenseAdapter, adapter), []).extend(range(first, first + count))
            first += count
        self._rows = {adapter: torch.tensor(numbers) for adapter, numbers in rows.items()}

    @override
    def changes_site(self, site: int) -> bool:
        return any(site in adapter.sites for adapter in self._rows)

    def add_to(self, site: int, y_TO: Tensor, x_TI: Tensor) -> None:
        """Add every adapter's part of `site` to the product `y` of `x`, in place."""
        for adapter, numbers in self._rows.items():
            parts = adapter.sites.get(site, ())
            if not parts:
                continue
            rows_R = numbers.to(x_TI.device)
            x_RI = x_TI[rows_R]
            for part in parts:
                added_RO = F.linear(F.linear(x_RI, part.a_RI), part.b_OR) * part.scale
                last = part.first + part.b_OR.shape[0]
                y_TO[rows_R, part.first : last] += added_RO.to(y_TO.dtype)


class NativeBatch(AdapterBatch):
    """Adapters of a batch on the C++ kernels. A row's result has the same bits with any rows beside it."""

    def __init__(self, adapters: Sequence[AdapterWeights | None], counts: Sequence[int]) -> None:
        super().__init__(adapters, counts)
        numbers: dict[NativeAdapter, int] = {}
        for adapter in adapters:
            if adapter is not None:
                numbers.setdefault(cast(NativeAdapter, adapter), len(numbers))
        self._sites = frozenset().union(*(adapter.sites for adapter in numbers))
        self.native = torch.classes.penstock.AdapterBatch(
            [adapter.handle for adapter in numbers],
            [-1 if adapter is None else numbers[cast(NativeAdapter, adapter)] for adapter in adapters],
            list(counts),
        )

    @override
    def changes_site(self, site: int) -> bool:
        return site in self._sites
