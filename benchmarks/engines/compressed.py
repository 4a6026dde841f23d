"""Folders that `penstock quantize` makes of a model: compressed-tensors, which vLLM loads as well."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.engines.base import Settings, Unsupported

# A format is this and the size of groups, such as quantize-64, and --bits where it is given: quantize-64-5.5.
QUANTIZED_BY_US = "quantize-"
_FORMAT = re.compile(r"quantize-(?P<group>\d+)(-(?P<bits>\d+(\.\d+)?))?")


def quantised_by_us(settings: Settings, *, may_make: bool) -> Path:
    """Return the folder of the format `settings.dtype`. Raises Unsupported for another dtype, and where it is not
    there and cannot be made here: another engine's Python has no Penstock."""
    found = _FORMAT.fullmatch(settings.dtype)
    if found is None:
        raise Unsupported(f"{settings.dtype}: quantize-GROUP or quantize-GROUP-BITS is meant, such as quantize-64-5.5")
    model, cache, group = Path(settings.model), Path(settings.cache), int(found["group"])
    most_bits = float(found["bits"]) if found["bits"] else None
    if not may_make and not _is_whole(_folder(model, group, most_bits, cache)):
        raise Unsupported(f"{settings.dtype}: penstock makes it; name penstock:{settings.dtype} first")
    return quantised_folder(model, group, cache, most_bits)


def quantised_folder(model: Path, group: int, cache: Path, most_bits: float | None = None) -> Path:
    """Return the folder that `penstock quantize --group-size GROUP --bits MOST_BITS` makes of `model`, made when it is
    not there."""
    folder = _folder(model, group, most_bits, cache)
    if not _is_whole(folder):
        from penstock.generation.quantise.quantiser import QuantiseSettings, quantise

        quantise(model, folder, QuantiseSettings(group, most_bits=most_bits))
    return folder


def _folder(model: Path, group: int, most_bits: float | None, cache: Path) -> Path:
    bits = "" if most_bits is None else f"-{most_bits:g}"
    return cache / f"{model.resolve().name}.{QUANTIZED_BY_US}{group}{bits}"


def _is_whole(folder: Path) -> bool:
    return (folder / "model.safetensors.index.json").is_file()
