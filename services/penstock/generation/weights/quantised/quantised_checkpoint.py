"""A folder with quantised matrices behind the interface of one without: `X.weight` exists in any stored format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from penstock.common.errors import StartupError
from penstock.generation.host.mapped import MappedFile
from penstock.generation.layers.linear.base import WholeRows
from penstock.generation.layers.linear.native import PANEL
from penstock.generation.weights.quantised.base import FIELD, Part, QuantFormat, StoredMatrix
from penstock.generation.weights.quantised.gguf import block_numbers
from penstock.generation.weights.safetensors_folder import PIECE_BYTES, Checkpoint

_WEIGHT = ".weight"


class QuantisedCheckpoint:
    """A Checkpoint and checkpoint_weights.TensorSource over the files of a folder. Matrices are opened on demand and
    read in pieces."""

    def __init__(self, files: Checkpoint, format: QuantFormat) -> None:
        self.folder: Path = files.folder
        self._files = files
        self._format = format
        # Names of quantised matrices, with their shape and parts.
        self._matrices: dict[str, tuple[tuple[int, int], dict[str, Part]]] = {}
        # Names of the tensors with all experts' matrices, with their shape and parts.
        self._stacked: dict[str, tuple[tuple[int, ...], dict[str, Part]]] = {}
        # The matrix opened last: callers ask for its format, then for its rows.
        self._open: tuple[str, StoredMatrix] | None = None

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._matrices or tensor in self._stacked or tensor in self._files

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Find the quantised matrices; raise StartupError as Checkpoint.check, for their tensors too."""
        needed, allowed = dict(expected), dict(optional)
        dtypes: dict[str, tuple[str, ...]] = {}
        for name, shape in {**expected, **optional}.items():
            if len(shape) == 3 and (stacked := self._stacked_parts(name, (shape[0], shape[1], shape[2]))):
                self._stacked[name] = shape, stacked
                needed.pop(name, None)
                needed |= {f"{name}{suffix}": part.shape for suffix, part in stacked.items()}
                dtypes |= {f"{name}{suffix}": part.dtypes for suffix, part in stacked.items()}
            if len(shape) != 2 or not name.endswith(_WEIGHT):
                continue
            module = name.removesuffix(_WEIGHT)
            is_needed = name in expected
            if not is_needed and not self._is_there(module):
                continue
            parts = self._parts(module, (shape[0], shape[1]))
            if parts is None:
                continue
            self._matrices[name] = (shape[0], shape[1]), parts
            needed.pop(name, None)
            allowed.pop(name, None)
            for suffix, part in parts.items():
                (needed if part.is_required else allowed)[f"{module}.{suffix}"] = part.shape
                dtypes[f"{module}.{suffix}"] = part.dtypes
        self._files.check(needed, allowed, dtypes, asks=f"config.json with its {FIELD}")

    def leave_out(self, prefix: str) -> None:
        """To be called before `check`."""
        self._files.leave_out(prefix)

    def dtype(self, tensor: str) -> torch.dtype | None:
        """Return the tensor's stored dtype; None: it is a quantised matrix."""
        return None if self.is_quantised(tensor) else self._files.dtype(tensor)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        if tensor in self._stacked:
            return self._stacked[tensor][0]
        return self._matrices[tensor][0] if tensor in self._matrices else self._files.shape(tensor)

    def take(self, tensor: str) -> Tensor:
        return self._files.take(tensor)

    def mapped(self, tensor: str) -> tuple[MappedFile, int]:
        """Only for a tensor that has a `dtype`."""
        return self._files.mapped(tensor)

    def are_equal(self, one: str, other: str) -> bool:
        """A quantised matrix equals no other one."""
        return not {one, other} & self._matrices.keys() and self._files.are_equal(one, other)

    def form(self, tensor: str) -> str:
        """Return the format of a matrix's whole numbers (layers.linear.base); empty: none."""
        return self._matrix(tensor).form if tensor in self._matrices else ""

    def is_quantised(self, tensor: str) -> bool:
        """True for a quantised matrix."""
        return tensor in self._matrices or tensor in self._stacked

    def row(self, tensor: str, number: int) -> Tensor:
        """Rows of tensors that are not quantised; of stacked experts (inputs, outputs) in float32."""
        if tensor not in self._stacked:
            return self._files.row(tensor, number)
        return block_numbers(*self._stacked_rows(tensor, number)).t()

    def pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        """Pieces in the stored dtype; rows of a quantised matrix as float32."""
        if tensor not in self._matrices:
            yield from self._files.pieces(tensor, multiple=multiple)
            return
        matrix = self._matrix(tensor)
        for first, last in self._spans(tensor, multiple):
            yield matrix.rows(first, last)
        self._close()

    def whole_pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[WholeRows]:
        matrix = self._matrix(tensor)
        for first, last in self._spans(tensor, multiple):
            yield matrix.whole_rows(first, last)
        self._close()

    def block_type(self, tensor: str) -> str:
        if tensor in self._stacked:
            return self._stacked_rows(tensor, 0)[0]
        return self._matrix(tensor).block_type if tensor in self._matrices else ""

    def block_row(self, tensor: str, number: int) -> Tensor:
        return self._stacked_rows(tensor, number)[1]

    def block_pieces(self, tensor: str, *, multiple: int = 1) -> Iterator[Tensor]:
        matrix = self._matrix(tensor)
        for first, last in self._spans(tensor, multiple):
            yield matrix.block_rows(first, last)
        self._close()

    def _stacked_parts(self, name: str, shape: tuple[int, int, int]) -> dict[str, Part] | None:
        try:
            return self._format.stacked_parts(name, shape, self._files)
        except StartupError as error:
            raise self._named(error) from error

    def _stacked_rows(self, tensor: str, number: int) -> tuple[str, Tensor]:
        """Return the type and the rows of the matrix `number` of `tensor`."""
        parts = self._stacked[tensor][1]
        return self._format.stacked_blocks({suffix: self._files.row(f"{tensor}{suffix}", number) for suffix in parts})

    def _parts(self, module: str, shape: tuple[int, int]) -> dict[str, Part] | None:
        try:
            return self._format.parts(module, shape, self._files)
        except StartupError as error:
            raise self._named(error) from error

    def _is_there(self, module: str) -> bool:
        """True when the folder has anything of an optional matrix: any format has one of these."""
        return any(
            f"{module}.{name}" in self._files for name in ("weight", "qweight", "weight_packed", "_weight_qdata")
        )

    def _matrix(self, tensor: str) -> StoredMatrix:
        if self._open is None or self._open[0] != tensor:
            shape, parts = self._matrices[tensor]
            module = tensor.removesuffix(_WEIGHT)
            there = [suffix for suffix in parts if f"{module}.{suffix}" in self._files]
            try:
                tensors = {suffix: self._files.take(f"{module}.{suffix}") for suffix in there}
                self._open = tensor, self._format.open(module, shape, tensors)
            except StartupError as error:
                raise self._named(error) from error
        return self._open[1]

    def _close(self) -> None:
        """Drop the tensors."""
        self._open = None

    def _spans(self, tensor: str, multiple: int) -> Iterator[tuple[int, int]]:
        outputs, inputs = self._matrices[tensor][0]
        # Of float32; whole panels of the kernels, where there is room for one.
        unit = math.lcm(PANEL, multiple)
        some = PIECE_BYTES // (4 * max(inputs, 1))
        some = some // unit * unit or max(1, some // multiple) * multiple
        for first in range(0, outputs, some):
            yield first, min(first + some, outputs)

    def _named(self, error: StartupError) -> StartupError:
        folder = str(self.folder)
        text = error.message if error.message.startswith(folder) else f"{folder}: {error.message}"
        return StartupError(text, flag="MODEL")
