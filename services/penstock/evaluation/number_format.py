"""A number format by the words of the generation service's flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from penstock.generation.config import KV_CACHE_DTYPES
from penstock.generation.layers.linear import QUANTIZATIONS

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_KV = "kv-"
# Of models that are loaded here, on the CPU. A dtype is known by its name.
_VALUES = {"quantization": ("auto", *QUANTIZATIONS), "kv_cache_dtype": KV_CACHE_DTYPES, "dtype": _DTYPES}


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Values of --dtype, --quantization and --kv-cache-dtype."""

    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse words with + between, such as `bfloat16+int8+kv-int8`: a dtype, a quantization, the keys' and values'
        type; what is left out is auto. Raises ValueError for a word that is unknown, missing or there twice."""
        found: dict[str, str] = {}
        for word in text.split("+"):
            name = "kv_cache_dtype" if word.startswith(_KV) else "dtype" if word in _DTYPES else "quantization"
            value = word.removeprefix(_KV)
            if not value:
                raise ValueError("expected words with + between, such as bfloat16+int8+kv-int8")
            if name in found:
                raise ValueError(f"{found[name]} and {value} are both a {name.replace('_', '-')}")
            if value not in _VALUES[name]:
                dtypes = f", {', '.join(_DTYPES[1:])}" if name == "quantization" else ""
                raise ValueError(f"{word}: expected {', '.join(_VALUES[name])}{dtypes}")
            found[name] = value
        return cls(**found)
