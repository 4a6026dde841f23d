"""Number formats of tensors by all of their names: torch's, safetensors', numpy's, --dtype's, and what a number takes.

Without torch, so that every process may read it; `generation.devices.torch_dtypes` is torch's half, and
`generation.wire.dtypes` the protos', with torch's names. GGUF's formats of single numbers have safetensors' names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dtype:
    """A number format."""

    # torch's name without `torch.`, which config.json and the protos have, too.
    name: str
    # safetensors' name.
    stored: str
    # numpy's type of its bits.
    bits: str
    num_bytes: int
    # Other name that --dtype takes.
    short: str = ""


DTYPES = (
    Dtype("float64", "F64", "<f8", 8),
    Dtype("float32", "F32", "<f4", 4, "fp32"),
    Dtype("bfloat16", "BF16", "<u2", 2, "bf16"),
    Dtype("float16", "F16", "<f2", 2, "fp16"),
    Dtype("int64", "I64", "<i8", 8),
    Dtype("int32", "I32", "<i4", 4),
    Dtype("int16", "I16", "<i2", 2),
    Dtype("int8", "I8", "i1", 1),
    Dtype("uint8", "U8", "u1", 1),
    Dtype("bool", "BOOL", "?", 1),
    Dtype("float8_e4m3fn", "F8_E4M3", "u1", 1),
    Dtype("float8_e5m2", "F8_E5M2", "u1", 1),
    Dtype("float8_e8m0fnu", "F8_E8M0", "u1", 1),
)
BY_NAME = {one.name: one for one in DTYPES}
BY_STORED = {one.stored: one for one in DTYPES}
# What models compute in, by name; what the C++ kernels do; what a checkpoint's plain tensors may be stored in.
COMPUTED = {name: BY_NAME[name] for name in ("float32", "bfloat16", "float16")}
NATIVE = {name: BY_NAME[name] for name in ("bfloat16", "float32")}
# Names that --dtype takes, besides auto.
DTYPE_NAMES = tuple(name for one in COMPUTED.values() for name in (one.name, one.short))
FLOATS = {name: BY_NAME[name] for name in ("float64", *COMPUTED)}


def dtype_name(dtype: object) -> str:
    """Return the name of torch's dtype, or that in a text such as `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def stored_bytes(stored: str, default: int) -> int:
    """Return the bytes of a number by safetensors' name; `default` for a name that is not in the table."""
    found = BY_STORED.get(stored)
    return default if found is None else found.num_bytes
