"""Messages of rank 0 to the others, between processes of one host: bytes over a pipe, one per call of the model."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.core.step import BlockCopy, CopyKind

_KIND = struct.Struct("<I")
_STEP = struct.Struct("<IIIIII")
_ROWS = struct.Struct("<II")
_PART = struct.Struct("<IiIdIIII")
_NUMBERS = np.dtype(np.int32)
# Most bytes of a piece of a matrix: a step of the engine waits for one at most, about a millisecond.
_PIECE = 1 << 20

# Answers of a rank: done, no memory for an adapter, adapter not taken. Any other text is its error.
READY, NO_MEMORY, FAILED = b"ready", b"no memory", b"failed"
# In place of a rank's first order: the reason why this process is not a rank.
REFUSED = "refused"


class MessageKind(IntEnum):
    """Kinds of messages, by the requested work."""

    POOL = 1
    STEP = 2
    LOGITS = 3
    COPIES = 4
    # Shapes of two matrices of an adapter; then pieces of them, in order; then the adapter is complete.
    ADAPTER_PART = 5
    PIECE = 6
    ADAPTER = 7
    # Adapters that no step uses any more.
    FORGET = 8


# Adapters of the rows of a call: (spans, 2) of an adapter's number, -1 for none, and a count of rows; None: no row has
# one.
Spans = np.ndarray | None


@dataclass(frozen=True, slots=True)
class PoolOrder:
    """Order to make a pool of keys and values of this geometry, and the host's blocks for it; then to join."""

    num_blocks: int
    block_size: int
    dtype: str
    num_host_blocks: int
    # File at which the ranks meet.
    meeting: str

    def encoded(self) -> bytes:
        """Return the message."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return _KIND.pack(MessageKind.POOL) + json.dumps(values).encode()

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
    adapters: Spans = None

    @classmethod
    def of(
        cls,
        num_layers: int,
        ids_T: Tensor,
        metadata: AttentionMetadata,
        embeds_TI: Tensor | None,
        adapters: Spans = None,
    ) -> StepOrder:
        """Describe a step by the model's arguments."""
        return cls(
            num_layers,
            ids_T.numpy(force=True).astype(np.int32),
            np.array(metadata.query_lens, np.int32),
            np.array(metadata.kv_lens, np.int32),
            metadata.block_tables.numpy(force=True),
            embeds_TI,
            adapters,
        )

    def encoded(self) -> bytes:
        """Return the message."""
        has_embeds, spans = self.embeds is not None, _num_spans(self.adapters)
        head = _STEP.pack(self.num_layers, len(self.ids), *self.tables.shape, has_embeds, spans)
        arrays = (self.ids, self.query_lens, self.kv_lens, self.tables, self.adapters)
        parts = (array.tobytes() for array in arrays if array is not None)
        return b"".join((_KIND.pack(MessageKind.STEP), head, *parts, _bytes(self.embeds)))

    @classmethod
    def decoded(cls, body: memoryview, hidden_size: int, dtype: torch.dtype) -> StepOrder:
        """Read the message after its kind."""
        num_layers, rows, sequences, blocks, has_embeds, spans = _STEP.unpack_from(body)
        numbers = rows + sequences * (2 + blocks) + 2 * spans
        whole = np.frombuffer(body, _NUMBERS, numbers, _STEP.size).copy()
        ends = np.cumsum((rows, sequences, sequences, sequences * blocks))
        ids, queries, lengths, tables, adapters = np.split(whole, ends)
        embeds = None
        if has_embeds:
            embeds = _tensor(body[_STEP.size + whole.nbytes :], rows, hidden_size, dtype)
        return cls(num_layers, ids, queries, lengths, tables.reshape(sequences, blocks), embeds, _spans(adapters))


def encode_hidden(hidden_NI: Tensor, adapters: Spans = None) -> bytes:
    """Return the message that asks for the logits of these rows."""
    head = _ROWS.pack(len(hidden_NI), _num_spans(adapters))
    spans = b"" if adapters is None else adapters.tobytes()
    return b"".join((_KIND.pack(MessageKind.LOGITS), head, spans, _bytes(hidden_NI)))


def decode_hidden(body: memoryview, hidden_size: int, dtype: torch.dtype) -> tuple[Tensor, Spans]:
    """Read the message after its kind."""
    rows, spans = _ROWS.unpack_from(body)
    adapters = np.frombuffer(body, _NUMBERS, 2 * spans, _ROWS.size).copy()
    return _tensor(body[_ROWS.size + adapters.nbytes :], rows, hidden_size, dtype), _spans(adapters)


@dataclass(frozen=True, slots=True)
class AdapterPartOrder:
    """Whole matrices of one module of an adapter, in the model's dtype: of an EmbeddingPart, or of a LoraPart."""

    adapter: int
    # None: of the embedding; its `first` is 0.
    site: int | None
    first: int
    scale: float
    a: Tensor
    b: Tensor

    def encoded(self) -> Iterator[bytes]:
        """Yield its messages: the shapes, then pieces of the matrices. Only one piece is copied at a time."""
        site = -1 if self.site is None else self.site
        head = _PART.pack(self.adapter, site, self.first, self.scale, *self.a.shape, *self.b.shape)
        yield _KIND.pack(MessageKind.ADAPTER_PART) + head
        for matrix in (self.a, self.b):
            whole = _view(matrix)
            for begin in range(0, len(whole), _PIECE):
                yield b"".join((_KIND.pack(MessageKind.PIECE), whole[begin : begin + _PIECE]))


class IncomingPart:
    """Matrices of one module of an adapter while their pieces come."""

    def __init__(self, body: memoryview, dtype: torch.dtype) -> None:
        """Take the first message after its kind, and allocate memory. Raises RuntimeError if there is none."""
        adapter, site, first, scale, *shapes = _PART.unpack_from(body)
        a, b = (torch.empty(rows, columns, dtype=dtype) for rows, columns in (shapes[:2], shapes[2:]))
        self._part = AdapterPartOrder(adapter, None if site < 0 else site, first, scale, a, b)
        # The unwritten rest of each.
        self._left = [_view(a), _view(b)]

    def add(self, body: memoryview) -> AdapterPartOrder | None:
        """Take a piece after its kind; return the part if this was its last piece."""
        self._left[0][: len(body)] = body
        self._left[0] = self._left[0][len(body) :]
        if not self._left[0]:
            del self._left[0]
        return None if self._left else self._part


def adapter_of_part(body: memoryview) -> int:
    """Read the adapter's number in the first message of a part, after its kind."""
    number: int = _PART.unpack_from(body)[0]
    return number


def encode_adapter(number: int) -> bytes:
    """Return the message that completes an adapter: all its parts are sent."""
    return _KIND.pack(MessageKind.ADAPTER) + _KIND.pack(number)


def decode_adapter(body: memoryview) -> int:
    """Read the message after its kind."""
    number: int = _KIND.unpack(body)[0]
    return number


def encode_forget(numbers: Sequence[int]) -> bytes:
    """Return the message that drops these adapters, complete or not."""
    return _KIND.pack(MessageKind.FORGET) + np.array(numbers, _NUMBERS).tobytes()


def decode_forget(body: memoryview) -> list[int]:
    """Read the message after its kind."""
    numbers: list[int] = np.frombuffer(body, _NUMBERS).tolist()
    return numbers


def encode_copies(copies: Sequence[BlockCopy]) -> bytes:
    """Return the message that asks for copies of blocks, each after those before it."""
    return _KIND.pack(MessageKind.COPIES) + np.array(copies, np.int32).tobytes()


def decode_copies(body: memoryview) -> list[BlockCopy]:
    """Read the message after its kind."""
    rows = np.frombuffer(body, np.int32).reshape(-1, 3).tolist()
    return [BlockCopy(source, destination, CopyKind(kind)) for source, destination, kind in rows]


def kind_of(message: bytes) -> tuple[MessageKind, memoryview]:
    """Return the kind of a message, and the rest."""
    return MessageKind(_KIND.unpack_from(message)[0]), memoryview(message)[_KIND.size :]


def _num_spans(adapters: Spans) -> int:
    return 0 if adapters is None else len(adapters)


def _spans(numbers: np.ndarray) -> Spans:
    return numbers.reshape(-1, 2) if len(numbers) else None


def _bytes(x: Tensor | None) -> bytes:
    return b"" if x is None else _view(x).tobytes()


def _view(x: Tensor) -> memoryview:
    """Return the bytes of a tensor: its own if it is contiguous and in the host's memory."""
    return x.contiguous().view(torch.uint8).numpy(force=True).reshape(-1).data


def _tensor(body: memoryview, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(body), dtype=dtype).view(rows, columns)
