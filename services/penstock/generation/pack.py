"""`penstock pack`: turns a checkpoint into a folder of weights that can be mapped as they are. Blocking."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import BinaryIO, cast

import torch
from torch import Tensor

from penstock import __version__
from penstock.common.checkpoint import source_name
from penstock.common.dtypes import NATIVE, dtype_name
from penstock.common.errors import StartupError
from penstock.common.units import format_size
from penstock.generation.core.model_config import ModelConfig, ModelRoute
from penstock.generation.devices.device_registry import open_device
from penstock.generation.host.mapped import map_file, populate
from penstock.generation.layers.linear.base import INT8, Linear
from penstock.generation.layers.linear.native import Format, NativeLinear
from penstock.generation.models.registry import checkpoint_weights, read_model_config
from penstock.generation.weights.checkpoint_weights import CheckpointWeights
from penstock.generation.weights.files import PACKED_FILE, file_names, is_packed
from penstock.generation.weights.packed_folder import copy_side_files, sync, unfinished
from penstock.generation.weights.packed_layout import HEAD, PackedFacts, header, layout
from penstock.generation.weights.packed_weights import PackedFile
from penstock.generation.weights.tensor_names import (
    EMBEDDING,
    INPUT_TABLE,
    MODEL_PREFIX,
    NORM,
    choice_biases,
    layer_linears,
    layer_norms,
    layer_prefix,
    model_linears,
    model_norms,
    rounds_once,
    state_tensors,
)

# Bytes between two reports.
_PIECE_BYTES = 2**24
# (task, bytes done, bytes in total)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Packed:
    """A file of packed weights."""

    path: Path
    num_bytes: int
    facts: PackedFacts


def pack(
    folder: Path,
    output: Path,
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    threads: int | None = None,
    force: bool = False,
    progress: Progress = lambda task, done, total: None,
) -> Packed:
    """Write the model of `folder`, packed as `dtype` and `quantization`, to the folder `output`.

    Under its name a file is complete or not there; the weights come last. The written file is read back and compared.
    Embedding, head and one matrix of a layer are in memory at a time. Raises StartupError naming what to change.
    """
    if is_packed(folder):
        raise StartupError(f"{folder} is packed already: MODEL is the checkpoint it was made from", flag="MODEL")
    device = open_device("cpu")
    try:
        # A file is mapped, and has the places that config.json says.
        device.start(num_threads=threads, kernels="native", compact_weights="off")
    except StartupError as error:
        # There is no --kernels to change here.
        raise StartupError(error.message, flag=None if error.flag == "--kernels" else error.flag) from error
    config = read_model_config(folder, ModelRoute("native"))
    if quantization == "auto" and config.checkpoint_format:
        raise StartupError(
            f"{folder} is quantised already ({config.checkpoint_format}), and packed weights have one form throughout: "
            "choose it by --quantization int4, int8 or none",
            flag="--quantization",
        )
    weights = checkpoint_weights(folder, config, device, dtype, quantization, map_embeddings=False)
    name = dtype_name(weights.dtype)
    if name not in NATIVE:
        raise StartupError(f"the kernels have no {name}: choose --dtype bfloat16 or float32", flag="--dtype")
    facts = PackedFacts(
        name, "none" if quantization == "auto" else quantization, source=source_name(folder), written_by=__version__
    )
    try:
        with unfinished(folder, output, force=force) as scratch:
            _write(scratch / PACKED_FILE, folder, config, weights, facts, progress)
            copy_side_files(folder, scratch, output)
            os.replace(scratch / PACKED_FILE, output / PACKED_FILE)
            sync(output)
    except OSError as error:
        raise StartupError(f"OUTPUT {output} cannot be written: {error.strerror or error}", flag="OUTPUT") from error
    return check(output, progress)


def check(folder: Path, progress: Progress = lambda task, done, total: None) -> Packed:
    """Read a packed folder's weights from end to end and compare them with their digest. Raises StartupError."""
    if not is_packed(folder):
        raise StartupError(f"MODEL {folder} has no {PACKED_FILE}: `penstock pack` did not write it", flag="MODEL")
    file = PackedFile(folder)
    size = len(file.memory)
    digest = hashlib.sha256()
    with memoryview(file.memory) as memory:
        for first in range(file.data_begin, size, _PIECE_BYTES):
            digest.update(memory[first : first + _PIECE_BYTES])
            progress("checking", min(first + _PIECE_BYTES, size), size)
    if digest.hexdigest() != file.facts.sha256:
        raise file.error("is damaged: its bytes are not those that were written")
    return Packed(file.path, size, file.facts)


def _write(
    path: Path,
    folder: Path,
    config: ModelConfig,
    weights: CheckpointWeights,
    facts: PackedFacts,
    progress: Progress,
) -> None:
    """Write all of the file. When this returns it is on the disk, and not in memory."""
    head, table = weights.head_and_table()
    kept = _kept_forms(config, weights)
    # Whole numbers of the checkpoint: those that are made here are of blocks that were turned.
    if isinstance(head, NativeLinear) and head.format is Format.INT8:
        kept[HEAD] = INT8
    places = layout(config, weights.dtype, facts.quantization, has_table=table is not None, kept=kept)
    digests_to_come = json.dumps(dict.fromkeys(file_names(folder), "0" * 64))
    facts = replace(facts, source_sha256=digests_to_come, kept=json.dumps(kept))
    start, size = header(places, facts), max(place.end for place in places.values())
    _check_space(path.parent, len(start) + size)
    with path.open("wb") as file, _source_digests(folder) as digests:
        file.write(start)
        writer = _WeightWriter(file, size, progress)
        for name, tensor in _tensors(config, weights, head, table):
            writer.write(bytes(places[name].begin - writer.position))
            writer.write(tensor.contiguous().view(torch.uint8).numpy().data.cast("B"))
        writer.write(bytes(size - writer.position))
        facts = replace(facts, source_sha256=json.dumps(digests()), sha256=writer.digest.hexdigest())
        file.seek(0)
        file.write(header(places, facts))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            # The page cache holds it in small pages. A later mapping reads it again, in large ones.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    populate(map_file(path))


def _kept_forms(config: ModelConfig, weights: CheckpointWeights) -> dict[str, str]:
    """Return name -> format of the layers' matrices that keep whole numbers."""
    forms = {
        f"{layer_prefix(index)}{linear.name}": weights.kept_form(layer_prefix(index), linear)
        for index in range(config.num_layers)
        for linear in layer_linears(config, index)
    }
    for linear in model_linears(config):
        forms[f"{MODEL_PREFIX}{linear.name}"] = weights.kept_form(MODEL_PREFIX, linear)
    return {name: form for name, form in forms.items() if form}


class _WeightWriter:
    """Writer of everything after the header, with its digest."""

    def __init__(self, file: BinaryIO, size: int, progress: Progress) -> None:
        self.position = 0
        self.digest = hashlib.sha256()
        self._file, self._size, self._progress = file, size, progress

    def write(self, data: bytes | memoryview) -> None:
        """Append. Raises OSError."""
        for first in range(0, len(data), _PIECE_BYTES):
            piece = data[first : first + _PIECE_BYTES]
            self._file.write(piece)
            self.digest.update(piece)
            self.position += len(piece)
            self._progress("packing", self.position, self._size)


def _tensors(
    config: ModelConfig, weights: CheckpointWeights, head: Linear, table: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name, in the order of packed_layout.layout. Each is made on demand."""
    is_exact = rounds_once(config)
    yield from _parts(HEAD, head)
    if table is not None:
        yield EMBEDDING, table
    if config.layer_inputs is not None:
        yield INPUT_TABLE, weights.token_table(INPUT_TABLE)
    for name in model_norms(config):
        yield name, weights.tensor(name, is_exact=is_exact)
    for linear in model_linears(config):
        yield from _parts(f"{MODEL_PREFIX}{linear.name}", weights.linear(MODEL_PREFIX, linear))
    for index in range(config.num_layers):
        prefix = layer_prefix(index)
        for name in layer_norms(config, index):
            yield f"{prefix}{name}", weights.tensor(f"{prefix}{name}", is_exact=is_exact)
        for name in (*choice_biases(config, index), *state_tensors(config, index)):
            yield f"{prefix}{name}", weights.tensor(f"{prefix}{name}", is_exact=True)
        for linear in layer_linears(config, index):
            if linear.is_matrix:
                yield f"{prefix}{linear.name}.weight", weights.matrix(prefix, linear)
                continue
            yield from _parts(f"{prefix}{linear.name}", weights.linear(prefix, linear))
        weights.layer_is_complete()
    yield NORM, weights.tensor(NORM, is_exact=is_exact)


def _parts(name: str, linear: Linear) -> Iterator[tuple[str, Tensor]]:
    for part, tensor in cast(NativeLinear, linear).packed.parts().items():
        yield f"{name}.{part}", tensor


@contextmanager
def _source_digests(folder: Path) -> Iterator[Callable[[], dict[str, str]]]:
    """Compute SHA-256 of every file of the checkpoint's weights on a thread.

    Yields a function that waits for the digests by file name, and raises StartupError for a file that cannot be read.
    Leaving without a call does not wait for them.
    """
    is_given_up = Event()
    with ThreadPoolExecutor(1, "digests") as beside:
        found = beside.submit(lambda: {name: _digest(folder / name, is_given_up) for name in file_names(folder)})
        try:
            yield found.result
        finally:
            is_given_up.set()


def _digest(path: Path, is_given_up: Event) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while not is_given_up.is_set() and (piece := file.read(_PIECE_BYTES)):
                digest.update(piece)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}", flag="MODEL") from error
    return digest.hexdigest()


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StartupError(
            f"the packed weights take {format_size(needed)}, and where OUTPUT is {format_size(free)} is free",
            flag="OUTPUT",
        )
