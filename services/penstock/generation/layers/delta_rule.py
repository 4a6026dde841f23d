"""The gated delta rule over rows of several sequences, in torch's operators: single rows step by step, runs of rows in
chunks.

As in transformers' qwen3_5 (5.24), in float32. A row t fades the state S of a value head, corrects it, and reads it:

    S = exp(-exp(A) * softplus(a_t + dt)) * S;  S = S + k_t (sigmoid(b_t) * (v_t - k_t S));  o_t = q_t S

with keys and queries of length 1, and queries times key_dim ** -0.5. Chunks are by the UT transform of Yang et al.,
2024 (Parallelizing Linear Transformers with the Delta Rule).

Shape suffixes: T rows, N sequences, C channels, H value heads, K key dims, V value dims, W rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from penstock.generation.core.delta_heads import DeltaHeads
    from penstock.generation.layers.step_states import StateBatch, StepStates

# Rows that are computed together, as in transformers.
_CHUNK = 64
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Tensors of a layer, all in float32."""

    # (kernel, channels): of the row itself last.
    conv: Tensor
    # (H): exp(A_log), and what is added to `a`.
    decay: Tensor
    bias: Tensor
    # (V)
    norm: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRows:
    """Results of a layer's first products for a step's rows."""

    # (T, channels + values): what the convolution reads, and the gates of the result.
    mixed: Tensor
    # (T, 2 H): b and a of every value head.
    numbers: Tensor
    states: StepStates


class DeltaRule:
    """The reference. Stateless."""

    name = "torch"

    def __call__(
        self, rows: DeltaRows, weights: DeltaWeights, heads: DeltaHeads, conv_SXC: Tensor, state_SHKV: Tensor
    ) -> Tensor:
        """Return the gated result (T, values) in the rows' dtype; leave in each sequence's slot the state after its
        last row. `conv` (slots, kernel - 1, channels) are the rows before, in the rows' dtype, and `state` the heads'
        matrices. What slots of new sequences hold does not matter.
        """
        out_TE = rows.mixed.new_empty((rows.mixed.shape[0], heads.values))
        for batch in rows.states.batches:
            out_TE[batch.rows.flatten()] = _batch_results(rows, weights, heads, (conv_SXC, state_SHKV), batch)
        return out_TE


class NativeDeltaRule(DeltaRule):
    """The C++ kernels (csrc/decoder/delta.cpp): row by row in any chunk, with the same bits. The library must be
    loaded."""

    name = "native"

    @override
    def __call__(
        self, rows: DeltaRows, weights: DeltaWeights, heads: DeltaHeads, conv_SXC: Tensor, state_SHKV: Tensor
    ) -> Tensor:
        own = rows.states
        out_TE: Tensor = torch.ops.penstock.delta_rule(
            rows.mixed,
            rows.numbers,
            weights.conv,
            weights.decay,
            weights.bias,
            weights.norm,
            weights.eps,
            heads.key_heads,
            conv_SXC,
            state_SHKV,
            own.slots,
            own.query_start,
            own.kept,
            own.is_new,
        )
        return out_TE


def _batch_results(
    rows: DeltaRows, weights: DeltaWeights, heads: DeltaHeads, states: tuple[Tensor, Tensor], batch: StateBatch
) -> Tensor:
    """Return the results of a batch's rows, sequence by sequence, and store its states."""
    conv_SXC, state_SHKV = states
    count, width = batch.rows.shape
    mixed_NWX = rows.mixed[batch.rows]
    b_NWH, a_NWH = rows.numbers[batch.rows].float().chunk(2, dim=-1)
    before_NXC, state_NHKV = conv_SXC[batch.slots], state_SHKV[batch.slots]
    if batch.is_new:
        before_NXC, state_NHKV = torch.zeros_like(before_NXC), torch.zeros_like(state_NHKV)
    all_NXC = torch.cat((before_NXC, mixed_NWX[..., : heads.channels]), dim=1)
    conv_SXC[batch.slots] = all_NXC[:, batch.kept : batch.kept + heads.kernel - 1]
    turned_NWC = _convolved(all_NXC.float(), weights.conv)
    query, key, value = turned_NWC.tensor_split((heads.keys, 2 * heads.keys), dim=-1)
    share = heads.value_heads // heads.key_heads

    def by_head(x: Tensor) -> Tensor:
        normed = x.reshape(count, width, heads.key_heads, heads.key_dim)
        normed = normed * torch.rsqrt(normed.square().sum(-1, keepdim=True) + _EPS)
        return normed.repeat_interleave(share, dim=2).transpose(1, 2)

    query_NHWK, key_NHWK = by_head(query) * heads.key_dim**-0.5, by_head(key)
    value_NHWV = value.reshape(count, width, heads.value_heads, heads.value_dim).transpose(1, 2)
    decay_NHW = (-weights.decay * F.softplus(a_NWH + weights.bias)).transpose(1, 2)
    beta_NHW = b_NWH.sigmoid().transpose(1, 2)
    out_NHWV = torch.empty_like(value_NHWV)
    ends = sorted({*range(_CHUNK, width, _CHUNK), batch.kept, width})
    for first, last in zip([0, *ends], ends, strict=False):
        own = slice(first, last)
        query, key, value = (one[:, :, own] for one in (query_NHWK, key_NHWK, value_NHWV))
        found = _chunk(query, key, value, decay_NHW[:, :, own], beta_NHW[:, :, own], state_NHKV)
        out_NHWV[:, :, own], state_NHKV = found
        if last == batch.kept:
            state_SHKV[batch.slots] = state_NHKV
    normed = F.rms_norm(out_NHWV.transpose(1, 2), (heads.value_dim,), weights.norm, weights.eps)
    gates = F.silu(mixed_NWX[..., heads.channels :].float()).view_as(normed)
    return (normed * gates).flatten(2).flatten(0, 1).to(rows.mixed.dtype)


def _convolved(all_NXC: Tensor, weight_KC: Tensor) -> Tensor:
    """Return silu of the short convolution of rows after the `kernel - 1` that come before them."""
    kernel = weight_KC.shape[0]
    width = all_NXC.shape[1] - kernel + 1
    total = all_NXC[:, :width] * weight_KC[0]
    for tap in range(1, kernel):
        total = total + all_NXC[:, tap : tap + width] * weight_KC[tap]
    return F.silu(total)


def _chunk(
    query_NHWK: Tensor, key_NHWK: Tensor, value_NHWV: Tensor, decay_NHW: Tensor, beta_NHW: Tensor, state_NHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the results (N, H, W, V) of some rows in turn, and the state after them. `decay` is a logarithm."""
    width = query_NHWK.shape[2]
    if width == 1:
        state_NHKV = state_NHKV * decay_NHW.exp().unsqueeze(-1)
        known_NHWV = key_NHWK @ state_NHKV
        change_NHWV = (value_NHWV - known_NHWV) * beta_NHW.unsqueeze(-1)
        state_NHKV = state_NHKV + key_NHWK.transpose(-1, -2) @ change_NHWV
        return query_NHWK @ state_NHKV, state_NHKV
    total_NHW = decay_NHW.cumsum(-1)
    between_NHWW = (total_NHW.unsqueeze(-1) - total_NHW.unsqueeze(-2)).masked_fill(
        torch.ones(width, width, dtype=torch.bool, device=query_NHWK.device).triu(1), -torch.inf
    )
    between_NHWW = between_NHWW.exp()
    faded_NHW1 = total_NHW.exp().unsqueeze(-1)
    scaled_NHWK = key_NHWK * beta_NHW.unsqueeze(-1)
    system_NHWW = (scaled_NHWK @ key_NHWK.transpose(-1, -2)) * between_NHWW
    both = torch.cat((value_NHWV * beta_NHW.unsqueeze(-1), scaled_NHWK * faded_NHW1), dim=-1)
    solved = torch.linalg.solve_triangular(system_NHWW, both, upper=False, unitriangular=True)
    count = value_NHWV.shape[-1]
    values = solved[..., :count] - solved[..., count:] @ state_NHKV
    scores_NHWW = (query_NHWK @ key_NHWK.transpose(-1, -2)) * between_NHWW
    out_NHWV = (query_NHWK * faded_NHW1) @ state_NHKV + scores_NHWW @ values
    left_NHW1 = (total_NHW[..., -1:] - total_NHW).exp().unsqueeze(-1)
    state_NHKV = state_NHKV * faded_NHW1[..., -1:, :] + (key_NHWK * left_NHW1).transpose(-1, -2) @ values
    return out_NHWV, state_NHKV
