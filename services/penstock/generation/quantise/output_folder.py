"""The folder that `penstock quantize` writes: compressed-tensors, pack-quantized, a file for each layer.

A file is complete under its name or not there, so a run that was killed goes on behind its last layer. The index comes
last: without it nobody takes the folder for a model.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.common.errors import StartupError
from penstock.common.gguf_parts import GGUF_FILE
from penstock.generation.quantise.gptq_rounding import RoundedMatrix
from penstock.generation.quantise.grid import Grid, GridSettings
from penstock.generation.weights.files import INDEX_FILE, PACKED_FILE, SINGLE_FILE, read_header
from penstock.generation.weights.packed_folder import copy_side_files, sync, unfinished
from penstock.generation.weights.quantised.base import unpacked

# Tells a later run what an unfinished folder is of.
STATE_FILE = ".penstock-quantize.json"
REST_FILE = "model-rest.safetensors"
BITS = 4
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Packing:
    """Tensors of a matrix in the files: whole numbers, scales in the model's dtype, zeros if it has any, the shape."""

    group: int
    has_zeros: bool = True
    # Bits of a whole number: 4 or 8.
    num_bits: int = BITS

    @property
    def bits(self) -> float:
        """Bits of a weight, with its part of the scale and the zero."""
        return self.num_bits + (16 + (self.num_bits if self.has_zeros else 0)) / self.group

    @property
    def least_scale(self) -> float:
        """Least scale that is stored. Readers keep eight bits as blocks with scales in float16, which must be exact
        there: a number of bfloat16 from this one on is."""
        return 2.0**-17 if self.num_bits > BITS else 0.0

    def grid(self, dtype: torch.dtype) -> GridSettings:
        """Return the form of the grids, with scales in `dtype`."""
        return GridSettings(self.group, self.num_bits, dtype, self.has_zeros, self.least_scale)

    def tensors(self, matrix: RoundedMatrix, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return a matrix as tensors, by their names behind the module's."""
        whole, grid = matrix.whole.to(torch.uint8), matrix.grid
        found = {
            "weight_packed": packed_words(whole, self.num_bits),
            "weight_scale": grid.scale.to(dtype).contiguous(),
            "weight_shape": torch.tensor(whole.shape, dtype=torch.int64),
        }
        if self.has_zeros:
            # Along the outputs, which are the last dimension for the packing.
            found["weight_zero_point"] = packed_words(grid.zero.to(torch.uint8).T, self.num_bits).T.contiguous()
        return found

    def dense(self, tensors: Mapping[str, Tensor], module: str) -> Tensor:
        """Return the numbers of a module's tensors, in float32."""
        outputs, inputs = tensors[f"{module}.weight_shape"].tolist()
        whole = unpacked(tensors[f"{module}.weight_packed"], self.num_bits)[:, :inputs].float()
        scale = tensors[f"{module}.weight_scale"].float()
        levels = 1 << self.num_bits
        zero = torch.full(scale.shape, levels / 2)
        if self.has_zeros:
            zero = unpacked(tensors[f"{module}.weight_zero_point"].T, self.num_bits)[:, :outputs].T.float()
        return Grid(scale, zero, self.group, levels).dense(whole)

    def scheme(self, targets: list[str]) -> dict[str, Any]:
        """Return the group of config.json's quantization_config with the modules `targets`."""
        weights = {
            "num_bits": self.num_bits,
            "type": "int",
            "symmetric": not self.has_zeros,
            "strategy": "group",
            "group_size": self.group,
            "dynamic": False,
        }
        return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}


def form_of(tensors: Mapping[str, Tensor], module: str) -> tuple[int, int]:
    """Return the bits of the whole numbers in a module's tensors, and the inputs of a group."""
    inputs = int(tensors[f"{module}.weight_shape"][1])
    is_wide = tensors[f"{module}.weight_packed"].shape[1] > -(-inputs * BITS // 32)
    return 2 * BITS if is_wide else BITS, inputs // tensors[f"{module}.weight_scale"].shape[1]


def quantization_config(schemes: list[dict[str, Any]], ignored: list[str]) -> dict[str, Any]:
    """Return config.json's quantization_config; `ignored` are the modules that stay as they are."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": scheme for number, scheme in enumerate(schemes)},
        "ignore": ignored,
    }


def packed_words(whole: Tensor, bits: int = BITS) -> Tensor:
    """Pack the last dimension of numbers of 4 or 8 bits (uint8) into int32 words, the lowest first, filled up with
    0."""
    short = -whole.shape[-1] % (32 // bits)
    numbers = torch.nn.functional.pad(whole, (0, short)) if short else whole
    octets = numbers if bits > BITS else numbers[..., 0::2] | numbers[..., 1::2] << BITS
    # Flat first: a single row may have any stride.
    return octets.flatten().view(torch.int32).view(*octets.shape[:-1], -1)


class OutputFolder:
    """OUTPUT of one run, new or gone on with."""

    def __init__(self, source: Path, output: Path, about: Mapping[str, Any], *, force: bool) -> None:
        """Open it. `about`: what decides the result, in JSON's types. Raises StartupError naming OUTPUT."""
        self.path = output
        self._source = source
        # As a later run reads it.
        self._about = json.loads(json.dumps(about))
        state = output / STATE_FILE
        try:
            if not force and state.is_file():
                if json.loads(state.read_text(encoding="utf-8")) == self._about:
                    return
                raise StartupError(
                    f"OUTPUT {output} has the layers of an unfinished run with another MODEL, text or option: --force "
                    "begins anew",
                    flag="OUTPUT",
                )
            # With the checks that `penstock pack` has, and its words.
            with unfinished(source, output, force=force) as scratch:
                # All that a reader would take before the index, or with it.
                taken = (INDEX_FILE, SINGLE_FILE, PACKED_FILE, GGUF_FILE)
                for file in (*output.glob("model-*.safetensors"), *(output / name for name in taken)):
                    file.unlink(missing_ok=True)
                self._replace(scratch, STATE_FILE, json.dumps(self._about, indent=2) + "\n")
        except (OSError, ValueError) as error:
            raise self._cannot_write(error) from error

    def layer(self, index: int) -> dict[str, Tensor] | None:
        """Return the tensors of a layer that an earlier run wrote; None: there are none."""
        path = self.path / _layer_file(index)
        try:
            return load_file(path) if path.is_file() else None
        except (SafetensorError, OSError) as error:
            raise StartupError(f"OUTPUT: {path} cannot be read: remove it and run again", flag="OUTPUT") from error

    def write_layer(self, index: int, tensors: dict[str, Tensor]) -> None:
        """Write a layer. Raises StartupError naming OUTPUT."""
        self._write(_layer_file(index), tensors)

    def write_rest(self, tensors: dict[str, Tensor]) -> None:
        """Write the tensors of no layer. Raises StartupError naming OUTPUT."""
        self._write(REST_FILE, tensors)

    def finish(self, quantization: dict[str, Any]) -> int:
        """Write the configuration, tokenizer and index: the folder is a model. Return the bytes of its weights.

        Raises StartupError naming OUTPUT.
        """
        try:
            with unfinished(self._source, self.path, force=True) as scratch:
                copy_side_files(self._source, scratch, self.path)
                config = json.loads((self._source / _CONFIG).read_text(encoding="utf-8"))
                config["quantization_config"] = quantization
                self._replace(scratch, _CONFIG, json.dumps(config, indent=2) + "\n")
                self._replace(scratch, INDEX_FILE, json.dumps(self._index(), indent=2) + "\n")
                sync(self.path)
                (self.path / STATE_FILE).unlink()
        except OSError as error:
            raise self._cannot_write(error) from error
        return sum(file.stat().st_size for file in self.path.glob("model-*.safetensors"))

    def _index(self) -> dict[str, Any]:
        places, size = {}, 0
        for file in sorted(self.path.glob("model-*.safetensors")):
            for name, tensor in read_header(file).items():
                places[name] = file.name
                size += tensor.end - tensor.begin
        return {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        part = self.path / f".{name}.part"
        try:
            save_file(tensors, part, metadata={"format": "pt"})
            # The library lets nobody else read it; a service may be another user.
            part.chmod((self.path / STATE_FILE).stat().st_mode)
            sync(part)
            os.replace(part, self.path / name)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise self._cannot_write(error) from error

    def _replace(self, scratch: Path, name: str, text: str) -> None:
        (scratch / name).write_text(text, encoding="utf-8")
        sync(scratch / name)
        os.replace(scratch / name, self.path / name)

    def _cannot_write(self, error: Exception) -> StartupError:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return StartupError(f"OUTPUT {self.path} cannot be written: {why}", flag="OUTPUT")


def _layer_file(index: int) -> str:
    return f"model-layer-{index:05}.safetensors"
