"""A tokenizer's decoder as a table of what each id contributes, where that is all there is to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True)
class Table:
    """What each id contributes. Exactly one of the two is set."""

    # Text of an id that stands for whole characters, else None.
    text: list[str | None]
    # Bytes of an id that holds part of a character.
    raw: dict[int, bytes]

    def without(self, ids: Sequence[int]) -> Table:
        """With `ids` contributing nothing: what skip_special_tokens does."""
        text = list(self.text)
        for index in ids:
            text[index] = ""
        return Table(text, {index: raw for index, raw in self.raw.items() if text[index] is None})


@dataclass(frozen=True)
class Plan:
    """How a decoder's work is split into a table and what is left to do between ids."""

    kind: str
    replacements: tuple[tuple[str, str], ...] = ()
    strip: str = ""
    strip_count: int = 0

    def table(self, tokenizer: Tokenizer, limit: int) -> Table:
        """Ids without an entry, up to `limit`, contribute nothing."""
        text: list[str | None] = [""] * limit
        raw: dict[int, bytes] = {}
        contribution = byte_level_bytes if self.kind == "byte_level" else self._piece_bytes
        for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
            piece = contribution(token)
            if isinstance(piece, str):
                text[index] = piece
                continue
            try:
                # A lone byte stays a byte even in ASCII: runs of them are decoded as a whole.
                text[index] = piece.decode() if self.kind == "byte_level" else None
            except UnicodeDecodeError:
                text[index] = None
            if text[index] is None:
                raw[index] = piece
        return Table(text, raw)

    def _piece_bytes(self, token: str) -> str | bytes:
        for old, new in self.replacements:
            token = token.replace(old, new)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token
        return token


def plan_of(decoder: dict[str, Any] | None) -> Plan | None:
    """The plan for a decoder as tokenizer.json describes it; None when it needs the window."""
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


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def byte_level_bytes(token: str) -> bytes:
    """The bytes that ByteLevel decodes `token` to: all its stand-ins, or its own UTF-8 when one is none."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
