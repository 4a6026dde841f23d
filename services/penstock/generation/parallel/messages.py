"""Messages of rank 0 to the others: bytes over a pipe, one a call of the model. No token says anything outside."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.core.step import BlockCopy, CopyKind

_KIND = struct.Struct("<I")
_STEP = struct.Struct("<IIIII")


class Kind(IntEnum):
    """Kinds of messages, by the work that they ask for."""

    POOL = 1
    STEP = 2
    LOGITS = 3
    COPIES = 4


@dataclass(frozen=True, slots=True)
class PoolOrder:
    """Order of a pool of keys and values of this geometry, and of the host's blocks beside it; then to join."""

    num_blocks: int
    block_size: int
    dtype: str
    num_host_blocks: int
    # File at which the ranks meet.
    meeting: str

    def encoded(self) -> bytes:
        """Return the message."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return _KIND.pack(Kind.POOL) + json.dumps(values).encode()

    @classmethod
    def decoded(cls, body: memoryview) -> PoolOrder:
        """Read the message after its kind."""
        return cls(**json.loads(bytes(body)))


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Rows of one forward pass."""

    # Layers that compute, the first ones.
    num_layers: int
    # (T)
    ids: np.ndarray
    # (S) each.
    query_lens: np.ndarray
    kv_lens: np.ndarray
    # (S, blocks)
    tables: np.ndarray
    # (T, hidden) in the model's dtype; None: those of the ids.
    embeds: Tensor | None

    @classmethod
    def of(cls, num_layers: int, ids_T: Tensor, metadata: AttentionMetadata, embeds_TI: Tensor | None) -> StepOrder:
        """Describe a step as a model gets it."""
        return cls(
            num_layers,
            ids_T.numpy(force=True).astype(np.int32),
            np.array(metadata.query_lens, np.int32),
            np.array(metadata.kv_lens, np.int32),
            metadata.block_tables.numpy(force=True),
            embeds_TI,
        )

    def encoded(self) -> bytes:
        """Return the message."""
        head = _STEP.pack(self.num_layers, len(self.ids), *self.tables.shape, self.embeds is not None)
        arrays = (self.ids, self.query_lens, self.kv_lens, self.tables)
        return b"".join((_KIND.pack(Kind.STEP), head, *(array.tobytes() for array in arrays), _bytes(self.embeds)))

    @classmethod
    def decoded(cls, body: memoryview, hidden_size: int, dtype: torch.dtype) -> StepOrder:
        """Read the message after its kind."""
        num_layers, rows, sequences, blocks, has_embeds = _STEP.unpack_from(body)
        numbers = rows + sequences * (2 + blocks)
        whole = np.frombuffer(body, np.int32, numbers, _STEP.size).copy()
        ids, queries, lengths, tables = np.split(whole, np.cumsum((rows, sequences, sequences)))
        embeds = None
        if has_embeds:
            embeds = _tensor(body[_STEP.size + whole.nbytes :], rows, hidden_size, dtype)
        return cls(num_layers, ids, queries, lengths, tables.reshape(sequences, blocks), embeds)


def encode_hidden(hidden_NI: Tensor) -> bytes:
    """Return the message that asks for the logits of these rows."""
    return _KIND.pack(Kind.LOGITS) + _KIND.pack(len(hidden_NI)) + _bytes(hidden_NI)


def decode_hidden(body: memoryview, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """Read the message after its kind."""
    (rows,) = _KIND.unpack_from(body)
    return _tensor(body[_KIND.size :], rows, hidden_size, dtype)


def encode_copies(copies: Sequence[BlockCopy]) -> bytes:
    """Return the message that asks for copies of blocks, each after those before it."""
    return _KIND.pack(Kind.COPIES) + np.array(copies, np.int32).tobytes()


def decode_copies(body: memoryview) -> list[BlockCopy]:
    """Read the message after its kind."""
    rows = np.frombuffer(body, np.int32).reshape(-1, 3).tolist()
    return [BlockCopy(source, destination, CopyKind(kind)) for source, destination, kind in rows]


def kind_of(message: bytes) -> tuple[Kind, memoryview]:
    """Return the kind of a message, and the rest."""
    return Kind(_KIND.unpack_from(message)[0]), memoryview(message)[_KIND.size :]


def _bytes(x: Tensor | None) -> bytes:
    return b"" if x is None else x.contiguous().view(torch.uint8).numpy(force=True).tobytes()


def _tensor(body: memoryview, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(body), dtype=dtype).view(rows, columns)
