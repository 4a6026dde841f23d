"""The operators of torch-npu that a model needs, each behind a check of its documented limits.

The operators check little themselves: with a wrong block id or length they silently read another sequence's keys. A
refusal is an error of this program, not of a request, and names the operator and its argument. Schemas are those of
torch-npu 2.14; tests/data/npu_schemas.json has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows and columns of the mask that the causal and the band mode are given.
MASK_SIZE = 2048
_CAUSAL, _BAND = 3, 4
_UNBOUNDED = 2**31 - 1
_MOST_ROTARY_DIM = 896
_NORM_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class OperatorLimit(ValueError):
    """Error for a call outside an operator's limits. Its text names the operator and the argument."""

    def __init__(self, operator: str, problem: str) -> None:
        super().__init__(f"{operator}: {problem}")


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """Shapes and dtypes that npu_fused_infer_attention_score computes. An emulation may have wider ones."""

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    # 256 is documented, and fails. None: any.
    head_dims: tuple[int, ...] | None = (64, 128, 192)
    # None: any.
    block_size: int | None = 128

    def fits(self, dtype: torch.dtype, head_dim: int) -> bool:
        """True when heads of this size and dtype can be attended."""
        return dtype in self.dtypes and (self.head_dims is None or head_dim in self.head_dims)


@dataclass(frozen=True, slots=True)
class PagedCall:
    """Arguments of npu_fused_infer_attention_score that all layers of a step with the same window share.

    `query_ends`: cumulative rows, the last one is T. `kv_lens`: keys of each sequence. Both are on the host.
    """

    query_ends: list[int]
    kv_lens: list[int]
    # (S, blocks) int32.
    block_tables: Tensor
    # (MASK_SIZE, MASK_SIZE) int8, 1 where a key is hidden: above the diagonal.
    mask: Tensor
    # Positions that a row sees, its own included; None: all before it.
    window: int | None

    def check(self, q_THD: Tensor, keys: Tensor, values: Tensor, limits: AttentionLimits) -> None:
        """Raise OperatorLimit for a call over pools `keys` and `values` (blocks, block_size, kv_heads, D) outside the
        limits. Block ids are checked only in the host's memory: reading those of a device means waiting for it."""
        _check_pool(q_THD, keys, values, limits)
        self._check_lengths(q_THD.shape[0], keys)
        self._check_mask()

    def _check_lengths(self, num_rows: int, keys: Tensor) -> None:
        tables, ends = self.block_tables, self.query_ends
        if not self.kv_lens:
            raise _attention_limit("actual_seq_lengths_kv is mandatory for a paged pool")
        if tables.dim() != 2 or tables.dtype is not torch.int32:
            raise _attention_limit(f"block_table must be 2-D int32, found {tables.dim()}-D {tables.dtype}")
        if not len(ends) == len(self.kv_lens) == tables.shape[0]:
            raise _attention_limit(
                f"actual_seq_lengths, actual_seq_lengths_kv and block_table must describe the same sequences, found "
                f"{len(ends)}, {len(self.kv_lens)} and {tables.shape[0]}"
            )
        if ends[-1] != num_rows:
            raise _attention_limit(
                f"actual_seq_lengths must be cumulative and end with {num_rows} rows, found {ends[-1]}"
            )
        for begin, end, kv_len in zip((0, *ends[:-1]), ends, self.kv_lens, strict=True):
            if not 1 <= end - begin <= kv_len:
                raise _attention_limit(
                    "actual_seq_lengths must be cumulative: a sequence has at least one row, and no more than keys, "
                    f"found {end - begin} rows and {kv_len} keys"
                )
        if (longest := max(self.kv_lens)) > tables.shape[1] * keys.shape[1]:
            raise _attention_limit(f"actual_seq_lengths_kv of {longest} is more than block_table has blocks for")
        if _is_readable(tables):
            used = [table[: -(-length // keys.shape[1])] for table, length in zip(tables, self.kv_lens, strict=True)]
            ids = torch.cat(used)
            if int(ids.min()) < 0 or int(ids.max()) >= keys.shape[0]:
                raise _attention_limit(f"block_table must name blocks of the pool, which has {keys.shape[0]}")

    def _check_mask(self) -> None:
        if self.mask.shape != (MASK_SIZE, MASK_SIZE) or self.mask.dtype not in (torch.int8, torch.uint8, torch.bool):
            raise _attention_limit(
                f"atten_mask must be {MASK_SIZE} x {MASK_SIZE} int8 for sparse_mode {_CAUSAL} and {_BAND}, "
                f"found {tuple(self.mask.shape)} {self.mask.dtype}"
            )
        if self.window is not None and not 1 <= self.window <= _UNBOUNDED:
            raise _attention_limit(f"pre_tokens needs a window of 1 to {_UNBOUNDED} positions, found {self.window}")

    def attend(self, q_THD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return the attention (T, H, D) of contiguous queries over a pool; `check` comes before it, once a step."""
        blocks, block_size, num_kv_heads, _ = keys.shape
        found: tuple[Tensor, Tensor] = torch.ops.npu.npu_fused_infer_attention_score(
            q_THD,
            keys.view(blocks, block_size, -1),
            values.view(blocks, block_size, -1),
            atten_mask=self.mask,
            actual_seq_lengths=self.query_ends,
            actual_seq_lengths_kv=self.kv_lens,
            block_table=self.block_tables,
            num_heads=q_THD.shape[1],
            num_key_value_heads=num_kv_heads,
            scale=scale,
            input_layout="TND",
            block_size=block_size,
            sparse_mode=_CAUSAL if self.window is None else _BAND,
            # Positions before the row's own: torch-npu's own tests hide those below the diagonal -pre_tokens - 1.
            pre_tokens=_UNBOUNDED if self.window is None else self.window - 1,
            next_tokens=_UNBOUNDED if self.window is None else 0,
        )
        return found[0]


def causal_mask(device: torch.device) -> Tensor:
    """Return the mask of PagedCall."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8, device=device).triu_(1)


def _is_readable(tensor: Tensor) -> bool:
    """True when numbers can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def _attention_limit(problem: str) -> OperatorLimit:
    return OperatorLimit("npu_fused_infer_attention_score", problem)


def _check_pool(q_THD: Tensor, keys: Tensor, values: Tensor, limits: AttentionLimits) -> None:
    if q_THD.dim() != 3 or keys.dim() != 4 or keys.shape != values.shape:
        raise _attention_limit(
            "query must be (T, heads, D), key and value (blocks, block, kv heads, D) of one shape, found "
            f"{tuple(q_THD.shape)}, {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    if not (q_THD.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        raise _attention_limit("query, key and value must be contiguous")
    if q_THD.dtype not in limits.dtypes or not q_THD.dtype == keys.dtype == values.dtype:
        raise _attention_limit(
            f"query, key and value must have one dtype of {', '.join(map(str, limits.dtypes))}, found "
            f"{q_THD.dtype}, {keys.dtype} and {values.dtype}"
        )
    _, num_heads, head_dim = q_THD.shape
    if head_dim != keys.shape[3] or (limits.head_dims is not None and head_dim not in limits.head_dims):
        raise _attention_limit(
            f"D must be {' or '.join(map(str, limits.head_dims or ('that of the keys',)))}, found {head_dim} in query "
            f"and {keys.shape[3]} in key"
        )
    if num_heads % keys.shape[2]:
        raise _attention_limit(f"num_heads must be a multiple of {keys.shape[2]} key/value heads, found {num_heads}")
    if limits.block_size is not None and keys.shape[1] != limits.block_size:
        raise _attention_limit(f"block_size must be {limits.block_size}, found {keys.shape[1]}")


def check_scatter(k_TKD: Tensor, v_TKD: Tensor, keys: Tensor, values: Tensor, slots_T: Tensor) -> None:
    """Raise OperatorLimit for arguments outside npu_scatter_pa_kv_cache's limits. Slots must be distinct and in the
    pool; that is checked only in the host's memory, as in PagedCall.check."""
    operator = "npu_scatter_pa_kv_cache"
    if keys.dim() != 4 or keys.shape != values.shape or not (keys.is_contiguous() and values.is_contiguous()):
        raise OperatorLimit(operator, "key_cache and value_cache must be contiguous (blocks, block, kv heads, D)")
    if k_TKD.shape != v_TKD.shape or k_TKD.shape[1:] != keys.shape[2:]:
        raise OperatorLimit(
            operator, f"key and value must be (T, {keys.shape[2]}, {keys.shape[3]}), found {tuple(k_TKD.shape)}"
        )
    if not k_TKD.dtype == v_TKD.dtype == keys.dtype == values.dtype:
        raise OperatorLimit(operator, f"key and value must have the caches' dtype {keys.dtype}, found {k_TKD.dtype}")
    if slots_T.shape != k_TKD.shape[:1] or slots_T.dtype not in (torch.int32, torch.int64):
        raise OperatorLimit(operator, f"slot_mapping must be int32 or int64 of {len(k_TKD)} rows")
    if not slots_T.is_contiguous():
        raise OperatorLimit(operator, "slot_mapping must be contiguous")
    if _is_readable(slots_T):
        if len(set(slots_T.tolist())) != len(slots_T):
            raise OperatorLimit(operator, "slot_mapping must not name a slot twice")
        if int(slots_T.min()) < 0 or int(slots_T.max()) >= keys.shape[0] * keys.shape[1]:
            raise OperatorLimit(operator, f"slot_mapping must be below {keys.shape[0] * keys.shape[1]}")


def scatter(k_TKD: Tensor, v_TKD: Tensor, keys: Tensor, values: Tensor, slots_T: Tensor) -> None:
    """Write rows into the pool at their slots; `check_scatter` comes before it, once a step."""
    torch.ops.npu.npu_scatter_pa_kv_cache(
        k_TKD.contiguous(), v_TKD.contiguous(), keys, values, slots_T, cache_mode="Norm"
    )


def check_rotary(x_THD: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise OperatorLimit for arguments of `rotary_mul` outside npu_rotary_mul's limits."""
    operator, dim = "npu_rotary_mul", x_THD.shape[-1]
    if x_THD.dim() != 3:
        raise OperatorLimit(operator, f"self must be 4-D with its batch of one, found {x_THD.dim() + 1}-D")
    if dim % 2 or not 0 < dim < _MOST_ROTARY_DIM:
        raise OperatorLimit(operator, f"D must be even and less than {_MOST_ROTARY_DIM}, found {dim}")
    if not cos.shape == sin.shape == (1, len(x_THD), 1, dim):
        raise OperatorLimit(operator, f"r1 and r2 must be (1, {len(x_THD)}, 1, {dim}), found {tuple(cos.shape)}")
    if not x_THD.dtype == cos.dtype == sin.dtype:
        raise OperatorLimit(operator, f"r1 and r2 must have the dtype {x_THD.dtype}, found {cos.dtype}")


def rotary_mul(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x turned (half rotation) by cos and sin (1, T, 1, D), both halves given; `check_rotary` comes before it,
    once a step."""
    turned: Tensor = torch.ops.npu.npu_rotary_mul(x_THD.unsqueeze(0), cos, sin, "half")
    return turned.squeeze(0)


def rms_norm(x_TI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm over the last dimension. Raises OperatorLimit."""
    _check_norm("npu_rms_norm", x_TI, weight_I, eps)
    found: tuple[Tensor, Tensor] = torch.ops.npu.npu_rms_norm(x_TI, weight_I, eps)
    return found[0]


def add_rms_norm(hidden_TI: Tensor, x_TI: Tensor, weight_I: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of the sum, and the sum. Raises OperatorLimit."""
    _check_norm("npu_add_rms_norm", hidden_TI, weight_I, eps)
    if hidden_TI.shape != x_TI.shape or hidden_TI.dtype is not x_TI.dtype:
        raise OperatorLimit("npu_add_rms_norm", "x1 and x2 must have one shape and dtype")
    normed, _, total = torch.ops.npu.npu_add_rms_norm(hidden_TI, x_TI, weight_I, eps)
    return normed, total


def _check_norm(operator: str, x_TI: Tensor, weight_I: Tensor, eps: float) -> None:
    if x_TI.dtype not in _NORM_DTYPES or weight_I.dtype is not x_TI.dtype:
        raise OperatorLimit(
            operator,
            f"gamma must have the rows' dtype, which is float16, bfloat16 or float32, found {weight_I.dtype} and "
            f"{x_TI.dtype}",
        )
    if weight_I.shape != x_TI.shape[-1:]:
        raise OperatorLimit(operator, f"gamma must be ({x_TI.shape[-1]},), found {tuple(weight_I.shape)}")
    if not eps > 0:
        raise OperatorLimit(operator, f"epsilon must be positive, found {eps}")


def swiglu(gate_up_TF: Tensor) -> Tensor:
    """Return silu(first half) * second half of every row. Raises OperatorLimit."""
    if gate_up_TF.shape[-1] % 2 or gate_up_TF.dtype not in _NORM_DTYPES:
        raise OperatorLimit(
            "npu_swiglu",
            f"self must have an even last dimension and be float16, bfloat16 or float32, found "
            f"{tuple(gate_up_TF.shape)} {gate_up_TF.dtype}",
        )
    found: Tensor = torch.ops.npu.npu_swiglu(gate_up_TF, -1)
    return found
