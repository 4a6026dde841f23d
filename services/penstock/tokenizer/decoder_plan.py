"""Decoder of a tokenizer as a table of each id's contribution, if it is nothing more."""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from penstock.text.decode_table import Table
from penstock.text.detokenizer import DecodeTable, TableKind


@dataclass(frozen=True)
class Plan:
    """Split of a decoder's work into a table and the work between ids."""

    kind: TableKind
    replacements: tuple[tuple[str, str], ...] = ()
    strip: str = ""
    strip_count: int = 0

    def table(self, tokenizer: Tokenizer, limit: int, special_ids: Sequence[int]) -> DecodeTable:
        """Make the table. Ids below `limit` without an entry contribute nothing; nor do `special_ids` where skipped."""
        # The decoder's text of each, which is normalized where an added token is. By id: a dictionary of all tokens
        # would be made for this alone.
        tokens = [token or "" for token in map(tokenizer.id_to_token, range(limit))]
        text: list[str | None] = []
        raw: dict[int, bytes] = {}
        pieces = map(byte_level_text, tokens) if self.kind == "byte_level" else self._pieces(tokens)
        for index, piece in enumerate(pieces):
            if isinstance(piece, str):
                text.append(piece)
            else:
                # Part of a character; under byte fallback a lone byte, which stays one even in ASCII: runs of them are
                # decoded as a whole.
                text.append(None)
                raw[index] = piece
        return DecodeTable(self.kind, Table(text, raw), special_ids, self.strip, self.strip_count)

    def _pieces(self, tokens: list[str]) -> Iterator[str | bytes]:
        """Make what each token contributes under byte fallback."""
        for old, new in self.replacements:
            tokens = [token.replace(old, new) for token in tokens]
        for token in tokens:
            byte = _lone_byte(token) if token.startswith("<0x") else None
            yield token if byte is None else byte


def plan_of(decoder: dict[str, Any] | None) -> Plan | None:
    """Make the plan for a decoder of tokenizer.json; None when it needs the window."""
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Plan("byte_level")
    replacements: list[tuple[str, str]] = []
    while kinds[:1] == ["Replace"]:
        pattern = steps[0]["pattern"].get("String")
        if pattern is None:
            return None
        replacements.append((pattern, steps[0]["content"]))
        steps, kinds = steps[1:], kinds[1:]
    if kinds == ["ByteFallback", "Fuse"]:
        return Plan("byte_fallback", tuple(replacements))
    if kinds == ["ByteFallback", "Fuse", "Strip"] and steps[2]["stop"] == 0:
        return Plan("byte_fallback", tuple(replacements), steps[2]["content"], steps[2]["start"])
    return None


def piece_of(tokenizer: Tokenizer, decoder: dict[str, Any] | None, added: Container[int], index: int) -> bytes:
    """Bytes that an id contributes inside a text, for a decoder without a table: its output for this token alone.

    `added`: ids of added tokens. Empty for an id without a token.
    """
    token = tokenizer.id_to_token(index)
    if token is None:
        return b""
    if index in added:
        return str(token).encode("utf-8", "replace")
    for step in _steps(decoder):
        if step["type"] == "ByteLevel":
            return byte_level_bytes(token)
        if step["type"] == "ByteFallback" and (byte := _lone_byte(token)) is not None:
            return byte
        if step["type"] == "Metaspace":
            return str(token).replace(step["replacement"], " ").encode()
        if step["type"] == "Replace" and (pattern := step["pattern"].get("String")) is not None:
            token = token.replace(pattern, step["content"])
    if any(step["type"] == "WordPiece" for step in _steps(decoder)):
        return str(tokenizer.decode([index], skip_special_tokens=False)).encode()
    return str(token).encode()


def _lone_byte(token: str) -> bytes | None:
    """Return the byte that a piece such as <0xE4> stands for."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return None


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable characters for bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = {ord(character): byte for character, byte in _byte_characters().items()}


def byte_level_bytes(token: str) -> bytes:
    """Bytes of `token` decoded by ByteLevel: one for each character, or its UTF-8 if a character stands for no byte."""
    try:
        return codecs.charmap_encode(token, "strict", _BYTE_OF)[0]
    except UnicodeEncodeError:
        return token.encode()


def byte_level_text(token: str) -> str | bytes:
    """Text of `token` decoded by ByteLevel, or its bytes if they are not whole characters."""
    piece = byte_level_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece
