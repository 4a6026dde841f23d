"""Kernels of attention.gpu_operators in Triton: it compiles these functions for the GPU on their first call.

Arguments that are tensors arrive as pointers. Triton reads annotations, so that only its own are here.
"""

import triton
import triton.language as tl

# A float32 plus and minus this is rounded to a whole number, halves to even ones, as torch rounds.
_ROUNDS = tl.constexpr(12582912.0)


@triton.jit
def norm_rows(
    hidden,
    x,
    weight,
    out,
    width,
    eps,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of a norm."""
    places = tl.arange(0, BLOCK)
    is_there = places < width
    row = tl.program_id(0).to(tl.int64) * width + places
    dtype = out.dtype.element_ty
    total = tl.load(hidden + row, mask=is_there, other=0.0).to(tl.float32)
    if ADDS:
        summed = (total + tl.load(x + row, mask=is_there, other=0.0).to(tl.float32)).to(dtype)
        tl.store(hidden + row, summed, mask=is_there)
        total = summed.to(tl.float32)
    normed = total * tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    factor = tl.load(weight + places, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row, (normed * factor).to(dtype), mask=is_there)


@triton.jit
def gate_rows(gate_up, out, width, BLOCK: tl.constexpr):
    """A piece of a row of `silu_mul`."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < width
    first = gate_up + row * 2 * width + places
    dtype = out.dtype.element_ty
    gate = tl.load(first, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(first + width, mask=is_there, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * width + places, (gate * up).to(dtype), mask=is_there)


@triton.jit
def turn_rows(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    slots,
    q,
    keys,
    values,
    num_heads,
    num_kv_heads,
    half,
    eps,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one row: a query's goes to `q`, others to the pool."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    places = tl.arange(0, BLOCK)
    is_there = places < half
    dtype = q.dtype.element_ty
    source = qkv + (row * (num_heads + 2 * num_kv_heads) + head) * 2 * half + places
    first = tl.load(source, mask=is_there, other=0.0)
    second = tl.load(source + half, mask=is_there, other=0.0)
    slot = tl.load(slots + row).to(tl.int64) * num_kv_heads
    if head >= num_heads + num_kv_heads:
        place = values + (slot + head - num_heads - num_kv_heads) * 2 * half + places
        tl.store(place, first, mask=is_there)
        tl.store(place + half, second, mask=is_there)
    else:
        is_query = head < num_heads
        if HAS_NORM:
            norm = q_norm if is_query else k_norm
            kind = norm.dtype.element_ty
            one, two = first.to(tl.float32), second.to(tl.float32)
            factor = tl.rsqrt((tl.sum(one * one, axis=0) + tl.sum(two * two, axis=0)) / (2 * half) + eps)
            weight = tl.load(norm + places, mask=is_there, other=0.0).to(tl.float32)
            other = tl.load(norm + half + places, mask=is_there, other=0.0).to(tl.float32)
            first = ((one * factor).to(kind).to(tl.float32) * weight).to(kind).to(dtype)
            second = ((two * factor).to(kind).to(tl.float32) * other).to(kind).to(dtype)
        c = tl.load(cos + row * half + places, mask=is_there, other=0.0).to(tl.float32)
        s = tl.load(sin + row * half + places, mask=is_there, other=0.0).to(tl.float32)
        one, two = first.to(tl.float32), second.to(tl.float32)
        # Each product is rounded, as those of two operators are.
        turned = (one * c).to(dtype).to(tl.float32) - (two * s).to(dtype).to(tl.float32)
        across = (two * c).to(dtype).to(tl.float32) + (one * s).to(dtype).to(tl.float32)
        if is_query:
            place = q + (row * num_heads + head) * 2 * half + places
        else:
            place = keys + (slot + head - num_heads) * 2 * half + places
        tl.store(place, turned.to(dtype), mask=is_there)
        tl.store(place + half, across.to(dtype), mask=is_there)


@triton.jit
def multiply_row(
    x,
    weight,
    bias,
    out,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some outputs of a row's product."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < outputs
    places = tl.arange(0, BLOCK)
    first = weight + rows[:, None].to(tl.int64) * inputs + places[None, :]
    second = weight + (rows + outputs)[:, None].to(tl.int64) * inputs + places[None, :]
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    others = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, inputs, BLOCK):
        is_place = start + places < inputs
        is_there = is_row[:, None] & is_place[None, :]
        numbers = tl.load(x + start + places, mask=is_place, other=0.0).to(tl.float32)[None, :]
        sums += tl.load(first + start, mask=is_there, other=0.0).to(tl.float32) * numbers
        if GATED:
            others += tl.load(second + start, mask=is_there, other=0.0).to(tl.float32) * numbers
    found = tl.sum(sums, axis=1)
    dtype = out.dtype.element_ty
    if HAS_BIAS:
        found += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(others, axis=1)
        if HAS_BIAS:
            up += tl.load(bias + outputs + rows, mask=is_row, other=0.0).to(tl.float32)
        gate = found.to(dtype).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        found = gate * up.to(dtype).to(tl.float32)
    tl.store(out + rows, found.to(dtype), mask=is_row)


@triton.jit
def quantise_row(
    x, values, scales, width, padded, MOST: tl.constexpr, LEAST: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """One row as numbers of one byte, and its scale: int8.quantize_rows where `WHOLE`, else fp8.quantize_rows_fp8."""
    places = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.load(x + row * width + places, mask=places < width, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(numbers), axis=0)
    if WHOLE:
        inverse = tl.where(largest > 0, tl.div_rn(MOST, largest), 0.0)
        found = numbers * inverse + _ROUNDS - _ROUNDS
        scale = tl.div_rn(largest, MOST)
    else:
        scale = tl.div_rn(tl.maximum(largest, LEAST), MOST)
        found = tl.minimum(tl.maximum(tl.div_rn(numbers, scale), -MOST), MOST)
    tl.store(values + row * padded + places, found.to(values.dtype.element_ty), mask=places < padded)
    # A NaN is in none of the results: the maximum ignores it.
    tl.store(scales + row, scale + tl.sum(numbers * 0.0, axis=0))


@triton.jit
def rescale_row(
    sums, weight_scales, row_scales, bias, out, outputs, padded, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """A piece of a row of sums times the scales, plus the bias."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < outputs
    found = tl.load(sums + row * padded + places, mask=is_there, other=0).to(tl.float32)
    found = found * tl.load(weight_scales + places, mask=is_there, other=0.0) * tl.load(row_scales + row)
    if HAS_BIAS:
        found += tl.load(bias + places, mask=is_there, other=0.0)
    tl.store(out + row * outputs + places, found.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def multiply_whole_row(
    x,
    row_scale,
    weight,
    weight_scales,
    bias,
    out,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some outputs of the product of a row of int8; the sums are whole numbers."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < outputs
    places = tl.arange(0, BLOCK)
    first = weight + rows[:, None].to(tl.int64) * inputs + places[None, :]
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    for start in range(0, inputs, BLOCK):
        is_place = start + places < inputs
        numbers = tl.load(x + start + places, mask=is_place, other=0).to(tl.int32)[None, :]
        sums += tl.load(first + start, mask=is_row[:, None] & is_place[None, :], other=0).to(tl.int32) * numbers
    found = tl.sum(sums, axis=1).to(tl.float32)
    found = found * tl.load(weight_scales + rows, mask=is_row, other=0.0) * tl.load(row_scale)
    if HAS_BIAS:
        found += tl.load(bias + rows, mask=is_row, other=0.0)
    tl.store(out + rows, found.to(out.dtype.element_ty), mask=is_row)
