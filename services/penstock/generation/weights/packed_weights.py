"""Weights from a file that `penstock pack` wrote: mapped, without a copy.

The kernels get pointers into the file. So every offset and size is computed from config.json, and the file must agree.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.common.dtypes import dtype_name
from penstock.common.errors import StartupError
from penstock.common.progress import CountBytes
from penstock.generation.core.model_config import Activation, ModelConfig
from penstock.generation.devices.torch_dtypes import NATIVE_DTYPES
from penstock.generation.host.mapped import MappedFile, populate
from penstock.generation.layers.linear import QUANTIZATIONS
from penstock.generation.layers.linear.native import (
    Format,
    NativeLinear,
    PackedWeight,
    can_read,
    formats,
    kept_format,
    part_sizes,
)
from penstock.generation.weights.files import PACKED_FILE, parse_header
from penstock.generation.weights.packed_layout import ALIGNMENT, HEAD, PackedFacts, entries_of, layout
from penstock.generation.weights.tensor_names import EMBEDDING, LayerLinear, layer_linears

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device


class PackedFile:
    """The mapped file of a folder and the facts of its header, not compared with a model yet."""

    def __init__(self, folder: Path) -> None:
        """Map the file. Raises StartupError naming it when it is unreadable, broken or of another version."""
        self.folder = folder
        self.path = folder / PACKED_FILE
        try:
            self.mapped = MappedFile(self.path)
            self.memory = self.mapped.memory
            entries, self.data_begin = parse_header(self.memory)
            self.facts = _facts(entries.pop("__metadata__"))
            self.kept = {str(name): str(form) for name, form in json.loads(self.facts.kept).items()}
            self.entries: dict[str, Any] = entries
        except OSError as error:
            raise self.error(f"cannot be read ({error.strerror})") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self.error("is not a complete file of packed weights") from error
        self._check_facts()

    def error(self, problem: str) -> StartupError:
        """Return an error that says the problem and the remedy."""
        return StartupError(f"{self.path} {problem}: run `penstock pack` again", flag="MODEL")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation."""
        return NATIVE_DTYPES[self.facts.dtype]

    def _check_facts(self) -> None:
        facts = self.facts
        for one in fields(PackedFacts):
            is_layout, found = one.name == "layout_version", getattr(facts, one.name)
            is_version = is_layout or one.name.startswith("format")
            if is_version and not (can_read(found, facts.quantization) if is_layout else found == one.default):
                raise self.error(f"has {one.name.replace('_', ' ')} {found!r}, and this release {one.default!r}")
        if facts.dtype not in NATIVE_DTYPES or facts.quantization not in QUANTIZATIONS:
            raise self.error(f"names the format {facts.dtype!r} and {facts.quantization!r}, which does not exist")


class PackedWeights:
    """loader.Weights of a packed folder."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        device: Device,
        dtype: str,
        quantization: str,
        progress: CountBytes | None = None,
    ) -> None:
        """Check everything, then bring the file into memory. `dtype` and `quantization` are the flags' values; "auto"
        takes the file's. Raises StartupError naming the flag, or the file and its fault."""
        file = PackedFile(folder)
        _check_wanted(file, device, dtype, quantization)
        data = device.mapped_weights(file.mapped, str(folder))
        self.dtype = file.dtype
        self.num_bytes = 0
        self.forms: dict[str, int] = {}
        self._config = config
        self._layers, self._head = formats(file.dtype, file.facts.quantization)
        self._exact = formats(file.dtype, "none")[0]
        # Rows can be looked up only in a matrix that is not quantised.
        has_table = EMBEDDING in file.entries or file.facts.quantization != "none"
        _check_scale(file, config)
        self._kept = file.kept
        self._places = layout(config, file.dtype, file.facts.quantization, has_table=has_table, kept=file.kept)
        _check_places(file, entries_of(self._places))
        size = max(place.end for place in self._places.values())
        if len(file.memory) != file.data_begin + size:
            raise file.error(f"has {len(file.memory)} bytes and should have {file.data_begin + size}")
        self._data = data[file.data_begin :]
        populate(file.memory, progress)

    def head_and_table(self) -> tuple[NativeLinear, Tensor | None]:
        shape = (self._config.vocab_size, self._config.hidden_size)
        head = self._linear(HEAD, shape, self._head, gated=False, has_bias=False)
        return head, self.tensor(EMBEDDING) if EMBEDDING in self._places else None

    @property
    def mapped_bytes(self) -> int:
        return self.num_bytes

    def linear(self, prefix: str, linear: LayerLinear, activation: Activation = Activation.SILU) -> NativeLinear:
        format = self._exact if linear.is_exact else self._layers
        if linear.is_float32:
            format = formats(torch.float32, "none")[0]
        name = f"{prefix}{linear.name}"
        return self._linear(
            name,
            linear.shape,
            format,
            gated=linear.gated,
            has_bias=linear.has_bias,
            activation=activation,
            dtype=torch.float32 if linear.is_float32 else self.dtype,
        )

    def matrix(self, prefix: str, linear: LayerLinear) -> Tensor:
        return self.tensor(f"{prefix}{linear.name}.weight")

    def token_table(self, name: str) -> Tensor:
        return self.tensor(name)

    def tensor(self, name: str, *, is_exact: bool = False) -> Tensor:
        """A view of the file, in the layout's dtype."""
        place = self._places[name]
        found = self._data[place.begin : place.end].view(place.dtype).view(place.shape)
        self.num_bytes += found.nbytes
        return found

    def layer_is_complete(self) -> None:
        """Nothing was made on the way."""

    def _linear(
        self,
        name: str,
        shape: tuple[int, int],
        format: Format,
        *,
        gated: bool,
        has_bias: bool,
        activation: Activation = Activation.SILU,
        dtype: torch.dtype | None = None,
    ) -> NativeLinear:
        kept = self._kept.get(name, "")
        sizes = part_sizes(shape, format, gated=gated, has_bias=has_bias, kept=kept)
        parts = {part: self.tensor(f"{name}.{part}") for part in sizes}
        format = kept_format(format, kept, shape[1])
        return NativeLinear(PackedWeight(shape, dtype or self.dtype, format, gated, **parts), activation)


def _facts(metadata: dict[str, str]) -> PackedFacts:
    """Read the facts of a header; a later release may add some. Raises LookupError, TypeError, ValueError."""
    versions = ("format", "format_version", "layout_version")
    known = {
        one.name: metadata[one.name] for one in fields(PackedFacts) if one.name in metadata or one.name in versions
    }
    if not all(isinstance(value, str) for value in known.values()):
        raise ValueError("metadata is text")
    return PackedFacts(**known)


def _check_wanted(file: PackedFile, device: Device, dtype: str, quantization: str) -> None:
    facts = file.facts
    wanted = {
        "--dtype": (dtype, dtype_name(device.compute_dtype(dtype, file.dtype)), facts.dtype),
        "--quantization": (quantization, quantization, facts.quantization),
    }
    for flag, (given, meant, found) in wanted.items():
        if given != "auto" and meant != found:
            raise StartupError(
                f"{flag} {given}: {file.folder} was packed as {facts.dtype} with --quantization {facts.quantization}; "
                f"leave {flag} out, or run `penstock pack` with it",
                flag=flag,
            )


def _check_scale(file: PackedFile, config: ModelConfig) -> None:
    """Raise StartupError when the file is too small for the model's numbers at half a byte each.

    Python's integers decide it: the kernels' sizes, computed from config.json, could overflow and then seem to fit.
    """
    shapes = (linear.shape for layer in range(config.num_layers) for linear in layer_linears(config, layer))
    numbers = config.vocab_size * config.hidden_size + sum(map(math.prod, shapes))
    if numbers > 2 * len(file.memory):
        raise file.error(f"does not fit {file.folder / 'config.json'}: it is too small for such a model")


def _check_places(file: PackedFile, expected: dict[str, object]) -> None:
    """Raise StartupError unless the entries are exactly those of config.json, with vectors at aligned offsets."""
    for name, entry in expected.items():
        if file.entries.get(name) != entry:
            raise file.error(f"does not fit {file.folder / 'config.json'} in tensor {name}")
    if extra := [name for name in file.entries if name not in expected]:
        raise file.error(f"has unexpected tensor {extra[0]!r}")
    if file.data_begin % ALIGNMENT:
        raise file.error(f"has a header of {file.data_begin} bytes, which is not a multiple of {ALIGNMENT}")
