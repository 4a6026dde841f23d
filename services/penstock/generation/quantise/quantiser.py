"""`penstock quantize`: a checkpoint's linear layers as 4 bits, layer by layer, fitted to what a text makes of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.common.errors import StartupError
from penstock.generation.quantise.bit_plan import forms_within, unit_costs
from penstock.generation.quantise.gptq_rounding import Covariance, Inputs, round_matrix
from penstock.generation.quantise.layer_stream import LayerStream, whole_tensor
from penstock.generation.quantise.output_folder import (
    BITS,
    OutputFolder,
    Packing,
    form_of,
    quantization_config,
)
from penstock.generation.weights.files import file_names, is_packed
from penstock.generation.weights.safetensors_folder import Checkpoint

# Raise it when the same settings give other weights: an unfinished folder of an earlier version is begun anew.
_VERSION = 3
# Bytes of the checkpoint that are done, in proportion to its layers, and bytes in total.
Progress = Callable[[int, int], None]
# Shares of a layer's time: its inputs' covariances, its matrices, its outputs.
_SEEN, _ROUNDED = 0.45, 0.85
# Share of all the time that a plan of bits takes.
_PLANNED = 0.1
# Smallest groups of four bits: readers' products have a scale for each 32 inputs.
_LEAST_GROUP = 32


@dataclass(frozen=True, slots=True)
class QuantiseSettings:
    """Choices that decide the result, besides the model."""

    # Inputs that share a scale and a zero.
    group: int = 64
    # False: every grid has its zero in the middle.
    has_zeros: bool = True
    # None: the text that ships.
    calibration: Path | None = None
    # Most tokens of the text, and tokens of a document of it.
    tokens: int = 16384
    context: int = 512
    # Most bits of a weight, in the mean: what four leave of them goes to the matrices that lose most, as smaller groups
    # or as eight. None: all have four, in groups of `group`.
    most_bits: float | None = None


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """The model that was written."""

    path: Path
    num_bytes: int
    # Of the matrices that were quantised: their number, bits a weight, and the mean share of their outputs' energy that
    # is lost (of those of this run).
    matrices: int
    bits: float
    loss: float


def calibration_text(path: Path | None) -> str:
    """Return the text of a file, or the one that ships. Raises StartupError naming --calibration."""
    if path is None:
        return (resources.files("penstock") / "assets" / "calibration.txt").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StartupError(f"--calibration {path}: {why}", flag="--calibration") from error


def calibration_documents(folder: Path, text: str, settings: QuantiseSettings) -> Tensor:
    """Return ids (documents, tokens) of the text, each document with the tokens that begin a text.

    Raises StartupError naming what is too short.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise StartupError(f"MODEL {folder} has no tokenizer.json, which reads the calibration text", flag="MODEL")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        raise StartupError(f"MODEL: {file} cannot be read: {error}", flag="MODEL") from error
    first = tokenizer.encode("").ids
    step = settings.context - len(first)
    found = tokenizer.encode(text, add_special_tokens=False).ids
    ids = found[: settings.tokens]
    count = len(ids) // step if step > 0 else 0
    if not count:
        few = "--calibration" if len(ids) == len(found) else "--calibration-tokens"
        given = f"the text has {len(ids)}" if len(ids) == len(found) else f"{settings.tokens}"
        raise StartupError(
            f"{few}: {given} tokens, less than a document of --calibration-context {settings.context}", flag=few
        )
    return torch.tensor([first + ids[at * step : (at + 1) * step] for at in range(count)])


@torch.inference_mode()
def quantise(
    folder: Path,
    output: Path,
    settings: QuantiseSettings,
    *,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> WrittenModel:
    """Write the model of `folder` to the folder `output`. A killed run with the same settings goes on.

    A layer in float32 and the documents' states are in memory at a time. Raises StartupError naming what to change.
    """
    _check_source(folder)
    _check_bits(settings)
    text = calibration_text(settings.calibration)
    documents = calibration_documents(folder, text, settings)
    checkpoint = Checkpoint(folder)
    stream = LayerStream(folder, checkpoint, documents)
    _check_layers(stream)
    target = OutputFolder(folder, output, _about(folder, text, settings), force=force)
    work = _Work(checkpoint, stream, target, settings, len(documents), progress)
    if settings.most_bits is not None:
        work.plan_bits(settings.most_bits)
    for index in range(len(stream.layers)):
        work.do_layer(index)
    if not work.matrices:
        raise StartupError(
            f"MODEL has no linear layer with inputs in groups of {settings.group}: choose a smaller --group-size",
            flag="--group-size",
        )
    in_layers = tuple(stream.prefixes)
    rest = [name for name in checkpoint.names if not name.startswith(in_layers)]
    target.write_rest({name: whole_tensor(checkpoint, name) for name in rest})
    heads = [name.removesuffix(".weight") for name in rest if name.endswith("head.weight")]
    size = target.finish(quantization_config(work.schemes(), sorted({*heads, "lm_head", *work.ignored})))
    mean = sum(work.losses) / max(len(work.losses), 1)
    return WrittenModel(output, size, work.matrices, work.bits, mean)


class _Work:
    """The way through the layers."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stream: LayerStream,
        target: OutputFolder,
        settings: QuantiseSettings,
        documents: int,
        progress: Progress,
    ) -> None:
        self._checkpoint, self._stream, self._target = checkpoint, stream, target
        self._documents, self._progress = documents, progress
        self._packings = _packings(settings)
        self._few = self._packings[0]
        # Modules with another form than that of the fewest bits.
        self._planned: dict[str, Packing] = {}
        # Modules that were written, and their weights.
        self._written: dict[Packing, list[str]] = {one: [] for one in self._packings}
        self._weights = dict.fromkeys(self._packings, 0)
        # Share of the progress that is done before the first layer.
        self._begin = 0.0
        self.ignored: list[str] = []
        self.losses: list[float] = []
        self.matrices = 0

    @property
    def bits(self) -> float:
        """Mean bits of a weight of the matrices that are done."""
        bits = sum(packing.bits * count for packing, count in self._weights.items())
        return bits / max(sum(self._weights.values()), 1)

    def schemes(self) -> list[dict[str, Any]]:
        """Return the groups of config.json's quantization_config."""
        used = [packing for packing in self._packings if self._written[packing]]
        if used in ([], [self._few]):
            return [self._few.scheme(["Linear"])]
        # vLLM takes a class before the names of modules that it joins.
        return [packing.scheme(self._written[packing]) for packing in used]

    def plan_bits(self, most_bits: float) -> None:
        """Choose the form of each matrix."""

        def units_of(index: int) -> list[list[str]]:
            names = self._linears(self._stream.layers[index])[0]
            return self._stream.shared_inputs(index, names) if names else []

        layers = len(self._stream.layers)
        units = unit_costs(
            self._stream,
            units_of,
            # Eight bits lose so little beside four that it counts as nothing.
            [packing.grid(torch.bfloat16) for packing in self._packings if packing.num_bits == BITS],
            lambda done: self._show(_PLANNED * done / layers),
        )
        self._begin = _PLANNED
        chosen = forms_within(units, [packing.bits for packing in self._packings], most_bits)
        self._planned = {
            name: self._packings[form] for unit, form in zip(units, chosen, strict=True) for name in unit.modules
        }

    def do_layer(self, index: int) -> None:
        """Quantise a layer, or read it from an earlier run; write it, and take the states behind it."""
        layer, prefix = self._stream.load(index), self._stream.prefixes[index]
        names, others = self._linears(layer)
        self.ignored += [prefix + name for name in others]
        self.matrices += len(names)
        written = self._target.layer(index)
        if written is None:
            written = self._quantised(index, layer, names)
            self._target.write_layer(index, written)
        for name in names:
            # What was written counts: a run that goes on may have planned otherwise.
            num_bits, group = form_of(written, prefix + name)
            packing = next(one for one in self._packings if (one.num_bits, one.group) == (num_bits, group))
            weight = packing.dense(written, prefix + name)
            self._weights[packing] += weight.numel()
            self._written[packing].append(prefix + name)
            layer.get_submodule(name).register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        self._stream.advance(index, lambda done: self._report(index, _ROUNDED, 1.0, done, self._documents))
        self._stream.unload(index)

    def _linears(self, layer: nn.Module) -> tuple[list[str], list[str]]:
        """Return the names of the layer's matrices that are quantised, and of those of other widths."""
        taken: list[str] = []
        others: list[str] = []
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                (others if module.in_features % self._few.group else taken).append(name)
        return taken, others

    def _quantised(self, index: int, layer: nn.Module, names: list[str]) -> dict[str, Tensor]:
        prefix = self._stream.prefixes[index]
        seen = self._stream.covariances(
            index, names, lambda done: self._report(index, 0.0, _SEEN, done, self._documents)
        )
        tensors = {
            prefix + name: whole_tensor(self._checkpoint, prefix + name)
            for name in layer.state_dict()
            if name.removesuffix(".weight") not in names
        }
        inputs: dict[int, Inputs] = {}
        for done, name in enumerate(names, 1):
            covariance = seen[name]
            if id(covariance) not in inputs:
                inputs[id(covariance)] = _made(covariance, prefix + name)
            dtype = _scale_dtype(self._checkpoint.dtype(f"{prefix}{name}.weight"))
            weight = layer.get_submodule(name).get_parameter("weight").data
            packing = self._planned.get(prefix + name, self._few)
            matrix = round_matrix(weight, inputs[id(covariance)], packing.grid(dtype))
            self.losses.append(matrix.loss)
            packed = packing.tensors(matrix, dtype)
            tensors |= {f"{prefix}{name}.{part}": value for part, value in packed.items()}
            self._report(index, _SEEN, _ROUNDED, done, len(names))
        return tensors

    def _report(self, index: int, low: float, high: float, done: int, total: int) -> None:
        share = (index + low + (high - low) * done / total) / len(self._stream.layers)
        self._show(self._begin + (1.0 - self._begin) * share)

    def _show(self, share: float) -> None:
        total = self._checkpoint.total_bytes
        self._progress(int(share * total), total)


def _made(covariance: Covariance, name: str) -> Inputs:
    """Return what is made of a module's inputs. Raises StartupError naming it."""
    try:
        return covariance.inputs()
    except ValueError as error:
        raise StartupError(f"MODEL: {name}: {error}", flag="MODEL") from error


def _packings(settings: QuantiseSettings) -> list[Packing]:
    """Return the forms that matrices may have, from the fewest bits: four in groups of each size, then eight, where 256
    whole numbers need no zero."""
    groups = [settings.group]
    while groups[-1] % (2 * _LEAST_GROUP) == 0:
        groups.append(groups[-1] // 2)
    return [*(Packing(group, settings.has_zeros) for group in groups), Packing(settings.group, False, 2 * BITS)]


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scales: that of the weights, or bfloat16 for float32: no reader needs more."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def _check_layers(stream: LayerStream) -> None:
    """Refuse experts, which transformers keeps in one tensor. Raises StartupError naming it."""
    for layer, prefix in zip(stream.layers, stream.prefixes, strict=True):
        for name, parameter in layer.named_parameters():
            if parameter.dim() > 2:
                raise StartupError(
                    f"MODEL has experts ({prefix}{name}), which `penstock quantize` does not take: `penstock serve "
                    "--quantization int4` quantises them as they load",
                    flag="MODEL",
                )


def _check_source(folder: Path) -> None:
    """Refuse what is quantised already. Raises StartupError naming MODEL."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"MODEL {folder}: config.json cannot be read", flag="MODEL") from error
    if is_packed(folder) or "quantization_config" in config:
        raise StartupError(
            f"MODEL {folder} is quantised or packed already: give the checkpoint that it was made from", flag="MODEL"
        )


def _check_bits(settings: QuantiseSettings) -> None:
    """Refuse fewer bits than all matrices take with the fewest. Raises StartupError naming --bits."""
    least = Packing(settings.group, settings.has_zeros).bits
    if settings.most_bits is not None and settings.most_bits < least:
        raise StartupError(
            f"--bits {settings.most_bits}: matrices of {BITS} bits take {least:.2f} with their scales in groups of "
            f"{settings.group}: give --bits that much, or a larger --group-size",
            flag="--bits",
        )


def _about(folder: Path, text: str, settings: QuantiseSettings) -> dict[str, object]:
    """Return what a run depends on."""
    files = {name: [(folder / name).stat().st_size, (folder / name).stat().st_mtime_ns] for name in file_names(folder)}
    return {
        "version": _VERSION,
        "source": str(folder.resolve()),
        "files": files,
        "calibration_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "group": settings.group,
        "has_zeros": settings.has_zeros,
        "tokens": settings.tokens,
        "context": settings.context,
        "most_bits": settings.most_bits,
    }
