"""Folders that `penstock quantize` makes of a model: compressed-tensors, which vLLM loads as well."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engines.base import Settings, Unsupported

# A format is this and the size of groups, such as quantize-64.
QUANTIZED_BY_US = "quantize-"


def quantised_by_us(settings: Settings, *, may_make: bool) -> Path:
    """Return the folder of the format `settings.dtype`. Raises Unsupported for another dtype, and where it is not
    there and cannot be made here: another engine's Python has no Penstock."""
    size = settings.dtype.removeprefix(QUANTIZED_BY_US)
    if not settings.dtype.startswith(QUANTIZED_BY_US) or not size.isdigit():
        raise Unsupported(f"{settings.dtype}: {QUANTIZED_BY_US} and the size of groups is meant")
    model, cache = Path(settings.model), Path(settings.cache)
    if not may_make and not _is_whole(_folder(model, int(size), cache)):
        raise Unsupported(f"{settings.dtype}: penstock makes it; name penstock:{settings.dtype} first")
    return quantised_folder(model, int(size), cache)


def quantised_folder(model: Path, group: int, cache: Path) -> Path:
    """Return the folder that `penstock quantize --group-size GROUP` makes of `model`, made when it is not there."""
    folder = _folder(model, group, cache)
    if not _is_whole(folder):
        from penstock.generation.quantise.quantiser import QuantiseSettings, quantise

        quantise(model, folder, QuantiseSettings(group))
    return folder


def _folder(model: Path, group: int, cache: Path) -> Path:
    return cache / f"{model.resolve().name}.{QUANTIZED_BY_US}{group}"


def _is_whole(folder: Path) -> bool:
    return (folder / "model.safetensors.index.json").is_file()
