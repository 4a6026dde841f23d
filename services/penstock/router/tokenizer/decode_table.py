"""The tokenizer's decoder as a table, fetched once: with it the router turns ids into text itself."""

from __future__ import annotations

from collections.abc import AsyncIterable

import grpc

from penstock.common.errors import Internal
from penstock.text.decode_table import Table
from penstock.text.detokenizer import DecodeTable, TableKind
from penstock.v1 import tokenizer_pb2 as pb

_KINDS: dict[int, TableKind] = {
    pb.DECODE_TABLE_KIND_BYTE_LEVEL: "byte_level",
    pb.DECODE_TABLE_KIND_BYTE_FALLBACK: "byte_fallback",
}


async def fetch(parts: AsyncIterable[pb.GetDecodeTableResponse]) -> DecodeTable | None:
    """The table of a GetDecodeTable call; None when the decoder is none, or the tokenizer is too old to know.

    Raises grpc.aio.AioRpcError, and Internal for a table that contradicts itself.
    """
    head: pb.GetDecodeTableResponse | None = None
    pieces: list[bytes] = []
    try:
        async for part in parts:
            head = head or part
            pieces += part.pieces
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise
    kind = _KINDS.get(head.kind) if head is not None else None
    if head is None or kind is None:
        return None
    try:
        table = Table.of(pieces, frozenset(head.lone_byte_ids))
        return DecodeTable(kind, table, list(head.special_token_ids), head.strip, head.strip_count)
    except IndexError:
        raise Internal("the tokenizer's table has ids outside of it", reason="TOKENIZER_PROTOCOL") from None
