"""torch's dtypes by the names of `common.dtypes`."""

from __future__ import annotations

import torch

from penstock.common.dtypes import BY_NAME, COMPUTED, FLOATS, NATIVE, Dtype, dtype_name
from penstock.common.errors import StartupError


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return torch's dtype."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def stored_name(dtype: torch.dtype) -> str:
    """Return safetensors' name."""
    return BY_NAME[dtype_name(dtype)].stored


# What models compute in, and what the C++ kernels do, by name; what plain tensors are stored in, by safetensors' name.
COMPUTED_DTYPES = {name: torch_dtype(one) for name, one in COMPUTED.items()}
NATIVE_DTYPES = {name: torch_dtype(one) for name, one in NATIVE.items()}
STORED_DTYPES = {one.stored: torch_dtype(one) for one in FLOATS.values()}
_NAMED = {name: torch_dtype(one) for one in COMPUTED.values() for name in (one.name, one.short)}


def named_dtype(name: str) -> torch.dtype:
    """Return the dtype that --dtype names. Raises StartupError naming --dtype."""
    if name not in _NAMED:
        raise StartupError(f"--dtype must be auto or one of {', '.join(_NAMED)}", flag="--dtype")
    return _NAMED[name]
