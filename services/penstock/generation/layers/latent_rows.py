"""The rows of a step in a layer with compressed keys and values: their queries, and what the pool keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.generation.attention.base import rotate
from penstock.generation.layers.layer_kernels import NativeKernels

if TYPE_CHECKING:
    from penstock.generation.core.latent_heads import LatentHeads
    from penstock.generation.layers.decoder_layer import RMSNorm


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Rows of a step in one layer: both parts of their queries, and what the pool keeps of them."""

    plain_THX: Tensor
    turned_THX: Tensor
    row_T1E: Tensor

    def turned_queries(self) -> Tensor:
        """Return both parts of the queries together, (T, H, dims of a query)."""
        return torch.cat((self.plain_THX, self.turned_THX), dim=-1)

    def select(self, rows: Tensor | slice) -> LatentRows:
        """Return some of the rows."""
        return LatentRows(self.plain_THX[rows], self.turned_THX[rows], self.row_T1E[rows])


# Of queries (T, H, dims of a query) and rows (T, dims of a row) as their products give them, and of cos and sin
# (T, 1, turned dims / 2). It may change the first two in place.
FinishedRows = Callable[[Tensor, Tensor, Tensor, Tensor], LatentRows]


def finished_rows(sizes: LatentHeads, norm: RMSNorm) -> FinishedRows:
    """Return what turns queries and rows and norms the rows' latents, by the kernels that `norm` has."""
    return _NativeFinish(sizes, norm) if isinstance(norm.kernels, NativeKernels) else _TorchFinish(sizes, norm)


class _TorchFinish:
    """Torch's operators."""

    def __init__(self, sizes: LatentHeads, norm: RMSNorm) -> None:
        self._sizes, self._norm = sizes, norm

    def __call__(self, q_THX: Tensor, row_TE: Tensor, cos: Tensor, sin: Tensor) -> LatentRows:
        plain, rank = self._sizes.plain_dim, self._sizes.rank
        latent_TR = self._norm(row_TE[:, :rank].contiguous())
        turned_T1X = rotate(row_TE[:, None, rank:], cos, sin)
        row_T1E = torch.cat((latent_TR.unsqueeze(1), turned_T1X), dim=-1)
        return LatentRows(q_THX[..., :plain], rotate(q_THX[..., plain:], cos, sin), row_T1E)


class _NativeFinish:
    """One call of the C++ kernels (csrc/decoder/ops_latent.cpp)."""

    def __init__(self, sizes: LatentHeads, norm: RMSNorm) -> None:
        self._plain, self._norm = sizes.plain_dim, norm
        self._finish = torch.ops.penstock.finish_latent_rows.default

    def __call__(self, q_THX: Tensor, row_TE: Tensor, cos: Tensor, sin: Tensor) -> LatentRows:
        norm = self._norm
        self._finish(q_THX.flatten(1), row_TE, norm.weight, cos, sin, q_THX.shape[1], norm.eps)
        return LatentRows(q_THX[..., : self._plain], q_THX[..., self._plain :], row_TE.unsqueeze(1))
