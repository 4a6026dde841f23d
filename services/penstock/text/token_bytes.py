"""Bytes of text that each token stands for, read from a tokenizer.json without a tokenizer library.

It covers the decoders of byte-level BPE (GPT-2, Llama 3, Qwen) and of SentencePiece models (Llama 2, Mistral, Gemma:
`▁` for space, `<0xNN>` bytes). The bytes that `TextCursor.feed` returns for a sequence of ids, joined and with invalid
UTF-8 replaced, are the tokenizer's own decoding of these ids (with clean_up_tokenization_spaces off).
"""

from __future__ import annotations

import codecs
import enum
import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.text.tokenizer_json import read_tokenizer_json

if TYPE_CHECKING:
    # Routers read this file, and have no numpy.
    import numpy as np
    import numpy.typing as npt

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_TOKEN_ID = 1 << 24
_MAX_CHARACTER_BYTES = 4
# A byte that no UTF-8 text holds; it stands for a U+FFFD of the decoded text.
_NOT_TEXT = b"\xff"


class UnsupportedTokenizer(Exception):
    """Error: the folder has no tokenizer.json, or its decoder cannot be split by token; the message says which."""


class Leading(enum.Enum):
    """Treatment of spaces at the very start of a decoded text."""

    KEEP = 0
    # Remove one.
    STRIP_ONE = 1
    # Remove every `▁` of the first token.
    DROP_ALL = 2


class TokenBytes:
    """Bytes of every token, in one buffer (about 8 bytes a token)."""

    def __init__(
        self,
        tokens: Mapping[int, bytes],
        *,
        special: Iterable[int],
        byte_tokens: Iterable[int] = (),
        leading: Leading = Leading.KEEP,
        first: Mapping[int, bytes] | None = None,
        beyond: Iterable[int] = (),
    ) -> None:
        """Make it. `tokens`: bytes by id, gaps allowed. `special` are skipped on request; `byte_tokens` are `<0xNN>`.

        `first` has the tokens with bytes at the start of a text that do not follow from `leading`; `beyond` are ids
        that were left out because a model has no rows for them.
        """
        self.beyond = tuple(sorted(beyond))
        self.leading = leading
        self.byte_tokens = frozenset(byte_tokens)
        self._first = dict(first or {})
        self._special = frozenset(special)
        parts = [tokens.get(token_id, b"") for token_id in range(max(tokens, default=-1) + 1)]
        self._buffer = b"".join(parts)
        self._offsets = array("I", accumulate(map(len, parts), initial=0))

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int | None = None) -> TokenBytes:
        """Read `folder`/tokenizer.json (and tokenizer_config.json's added tokens). Raises UnsupportedTokenizer.

        Added tokens without a row in a model of `vocab_size` are left out, such as image tokens in a text model.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedTokenizer(f"no tokenizer.json in {folder}")
        document = read_tokenizer_json(path)
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        return _build(document, config, vocab_size)

    @classmethod
    def from_parts(cls, facts: Mapping[str, Any], offsets: array[int], buffer: bytes) -> TokenBytes:
        """Make a table of the `parts` of another. Raises LookupError, TypeError or ValueError for facts of none."""
        table = cls(
            {},
            special=facts["special"],
            byte_tokens=facts["byte_tokens"],
            leading=Leading(facts["leading"]),
            first={int(token_id): bytes.fromhex(data) for token_id, data in facts["first"].items()},
            beyond=facts["beyond"],
        )
        table._buffer, table._offsets = buffer, offsets
        return table

    def parts(self) -> tuple[dict[str, Any], array[int], bytes]:
        """Return all that the table is, for a file: facts for JSON, each token's begin and the last one's end in the
        buffer, in 32 bits, and the buffer."""
        facts = {
            "special": sorted(self._special),
            "byte_tokens": sorted(self.byte_tokens),
            "leading": self.leading.value,
            "first": {str(token_id): data.hex() for token_id, data in self._first.items()},
            "beyond": list(self.beyond),
        }
        return facts, self._offsets, self._buffer

    def __len__(self) -> int:
        """Return one more than the largest id."""
        return len(self._offsets) - 1

    def bytes_of(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Bytes of a token inside a text. Empty for unknown ids and for skipped special ones."""
        if token_id >= len(self._offsets) - 1 or self.skipped(token_id, skip_special=skip_special):
            return b""
        return self._buffer[self._offsets[token_id] : self._offsets[token_id + 1]]

    def texts(self) -> Iterator[tuple[int, bytes]]:
        """Yield id and bytes of every token that has any and is not special."""
        for token_id, (first, end) in enumerate(pairwise(self._offsets)):
            if first < end and token_id not in self._special:
                yield token_id, self._buffer[first:end]

    def first_bytes(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """Return the first eight bytes of each token as a number, padded with zeros.

        The numbers have the order of the bytes.
        """
        import numpy as np

        buffer = np.frombuffer(self._buffer, dtype=np.uint8)
        offsets = np.frombuffer(self._offsets, dtype=np.uint32)
        place, end = offsets[ids], offsets[ids + 1]
        numbers = np.zeros(len(ids), dtype=np.uint64)
        for _ in range(8):
            is_inside = place < end
            numbers <<= np.uint64(8)
            numbers[is_inside] |= buffer[place[is_inside]]
            place += is_inside
        return numbers

    def ids_with(self, byte: int) -> npt.NDArray[np.uint32]:
        """Return the ids of the tokens that have this byte, in order."""
        import numpy as np

        places = np.flatnonzero(np.frombuffer(self._buffer, dtype=np.uint8) == byte)
        # Tokens without bytes begin where the next one does: the last of these has it.
        ids = np.searchsorted(np.frombuffer(self._offsets, dtype=np.uint32), places, side="right") - 1
        # Not np.unique: they are in order, and it imports masked arrays.
        is_first = np.ones(len(ids), dtype=bool)
        is_first[1:] = ids[1:] != ids[:-1]
        return ids[is_first].astype(np.uint32)

    def bytes_at_start(self, token_id: int, data: bytes) -> bytes:
        """Bytes of the token's `data` when it is the first token of a text that is not skipped."""
        match self.leading:
            case Leading.STRIP_ONE:
                return data.removeprefix(b" ")
            case Leading.DROP_ALL:
                return self._first.get(token_id, data.replace(b" ", b""))
            case _:
                return data

    def skipped(self, token_id: int, *, skip_special: bool) -> bool:
        """True when decoding leaves this token out."""
        return skip_special and token_id in self._special


class TextCursor:
    """Cursor over one text: it returns the bytes that each token adds."""

    __slots__ = ("_at_start", "_invalid", "_partial", "_skip_special", "_table")

    def __init__(self, table: TokenBytes, *, skip_special: bool) -> None:
        self._table = table
        self._skip_special = skip_special
        self._at_start = table.leading is not Leading.KEEP
        # The current run of byte tokens: its unfinished character, and a flag that the run can be text at all.
        self._partial = b""
        self._invalid = False

    def copy(self) -> TextCursor:
        """Return a cursor at the same place."""
        twin = TextCursor(self._table, skip_special=self._skip_special)
        twin._at_start, twin._partial, twin._invalid = self._at_start, self._partial, self._invalid
        return twin

    def begin(self, context: Sequence[int]) -> bytes:
        """Continue after `context`, before any other call. Return the bytes of a character that it does not complete.

        The text of a context is that of all its ids. O(length of its last whole character).
        """
        table, begin, found = self._table, len(context), 0
        # As far back as the state depends: to a piece of text before the last run, or to a character of bytes.
        while begin and found < _MAX_CHARACTER_BYTES:
            begin -= 1
            if context[begin] not in table.byte_tokens:
                data = table.bytes_of(context[begin], skip_special=self._skip_special)
                found += _MAX_CHARACTER_BYTES if data and table.byte_tokens else len(data)
        end = b"".join([self.feed(token_id) for token_id in context[begin:]])[1 - _MAX_CHARACTER_BYTES :]
        return end[codecs.utf_8_decode(end, "replace", False)[1] :]

    def feed(self, token_id: int) -> bytes:
        """Return the bytes that the token adds. O(length of the token)."""
        table = self._table
        if table.skipped(token_id, skip_special=self._skip_special):
            return b""
        data = table.bytes_of(token_id, skip_special=False)
        if table.byte_tokens:
            data = self._in_run(token_id, data)
        if self._at_start and data:
            self._at_start = False
            data = table.bytes_at_start(token_id, data)
        return data

    def _in_run(self, token_id: int, data: bytes) -> bytes:
        """Take a byte token. ByteFallback decodes a run as a whole: with one bad byte, none of the run is text."""
        if token_id not in self._table.byte_tokens:
            self._partial, self._invalid = b"", False
            return data
        if not self._invalid:
            self._partial += data
            try:
                self._partial.decode()
            except UnicodeDecodeError as error:
                self._invalid = error.reason != "unexpected end of data"
            else:
                self._partial = b""
        return _NOT_TEXT if self._invalid else data


@dataclass(slots=True)
class _Decoder:
    """Decoder of a tokenizer.json that works token by token."""

    byte_level: bool = False
    byte_fallback: bool = False
    # True once later steps act on the whole text instead of each token.
    fused: bool = False
    replacements: list[tuple[str, str]] = field(default_factory=list)
    leading: Leading = Leading.KEEP


def _build(document: dict[str, Any], config: dict[str, Any], vocab_size: int | None) -> TokenBytes:
    decoder = _read_decoder(document.get("decoder"))
    texts = _vocabulary(document["model"])
    special: set[int] = set()
    added = [*document.get("added_tokens", ()), *_added_by_config(config)]
    for entry in added:
        texts[entry["id"]] = entry["content"]
        if entry.get("special"):
            special.add(entry["id"])
    beyond = {entry["id"] for entry in added if vocab_size is not None and entry["id"] >= vocab_size}
    # They may also be entries of the vocabulary.
    texts = {token_id: text for token_id, text in texts.items() if token_id not in beyond} if beyond else texts
    if texts and max(texts) > _MAX_TOKEN_ID:
        raise UnsupportedTokenizer("tokenizer.json has a token id above 2^24")
    to_bytes = _byte_level_bytes if decoder.byte_level else _replacing(decoder.replacements)
    tokens = {token_id: to_bytes(text) for token_id, text in texts.items()}
    byte_tokens: dict[int, bytes] = {}
    if decoder.byte_fallback:
        byte_tokens = {
            token_id: bytes([int(text[3:5], 16)]) for token_id, text in texts.items() if _BYTE_TOKEN.fullmatch(text)
        }
    first: dict[int, bytes] = {}
    if decoder.leading is Leading.DROP_ALL:
        # Only the replacement is dropped, not a space of the token's own.
        dropping = _replacing([(old, "") for old, _ in decoder.replacements])
        first = {token_id: dropping(text) for token_id, text in texts.items() if " " in text}
    return TokenBytes(
        tokens | byte_tokens,
        special=special,
        byte_tokens=byte_tokens,
        leading=decoder.leading,
        first=first,
        beyond=beyond,
    )


def _vocabulary(model: dict[str, Any]) -> dict[int, str]:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        return {token_id: text for text, token_id in vocabulary.items()}
    if isinstance(vocabulary, list):
        return {token_id: piece[0] for token_id, piece in enumerate(vocabulary)}
    raise UnsupportedTokenizer("tokenizer.json has no vocabulary")


def _added_by_config(config: dict[str, Any]) -> list[dict[str, Any]]:
    decoder = config.get("added_tokens_decoder") or {}
    return [{**entry, "id": int(token_id)} for token_id, entry in decoder.items()]


def _read_decoder(document: dict[str, Any] | None) -> _Decoder:
    if document is None:
        raise UnsupportedTokenizer("tokenizer.json has no decoder")
    result = _Decoder()
    steps = document["decoders"] if document["type"] == "Sequence" else [document]
    for step in steps:
        if not _read_step(step, result):
            raise UnsupportedTokenizer(f"tokenizer.json has a {step['type']} decoder that cannot be split by token")
    if result.byte_level and len(steps) > 1:
        raise UnsupportedTokenizer("tokenizer.json combines ByteLevel with other decoders")
    return result


def _read_step(step: dict[str, Any], result: _Decoder) -> bool:
    """Add one decoder step; False when it does not act on each token alone or on the start of the text."""
    if result.fused and step["type"] not in ("Fuse", "Strip"):
        return False
    match step:
        case {"type": "ByteLevel"}:
            result.byte_level = True
        case {"type": "ByteFallback"}:
            result.byte_fallback = True
        case {"type": "Fuse"}:
            result.fused = True
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            result.replacements.append((pattern, content))
        case {"type": "Metaspace", "replacement": replacement}:
            result.replacements.append((replacement, " "))
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            result.leading = Leading.KEEP if scheme == "never" else Leading.DROP_ALL
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if result.fused:
            result.leading = Leading.STRIP_ONE
        case {"type": "Strip", "start": 0, "stop": 0}:
            pass
        case _:
            return False
    return True


def _replacing(replacements: list[tuple[str, str]]) -> Callable[[str], bytes]:
    def to_bytes(text: str) -> bytes:
        for old, new in replacements:
            text = text.replace(old, new)
        return text.encode()

    return to_bytes


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for every byte: its own if printable, else the next free one from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(0x100 + position): byte for position, byte in enumerate(hidden)}


_ALPHABET = {ord(character): byte for character, byte in _byte_level_alphabet().items()}


def _byte_level_bytes(text: str) -> bytes:
    """Bytes of a token. With a character outside the alphabet it stands for itself, as in the tokenizers library."""
    try:
        return codecs.charmap_encode(text, "strict", _ALPHABET)[0]
    except UnicodeEncodeError:
        return text.encode()


class TokenPrefixes:
    """Tokens of a table sorted by their bytes (4 bytes a token): tokens with a common beginning are neighbours.

    It is immutable. Making it takes a fraction of a second for a large vocabulary.
    """

    def __init__(self, table: TokenBytes, ids: array[int] | None = None) -> None:
        """Make it from whole texts only: no special tokens, and none that begin or end inside a character. `ids`: those
        of another one of this table."""
        self._bytes_of = table.bytes_of
        if ids is None:
            import numpy as np

            whole = array("I", (token_id for token_id, data in table.texts() if _is_text(data)))
            ids = _sorted(np.frombuffer(whole, dtype=np.uint32), table)
        # Sorted by their bytes, in 32 bits.
        self.ids = ids

    def extensions(self, token_id: int) -> frozenset[int]:
        """Return ids with a text that begins with that of `token_id`, itself included; none if it is not whole text."""
        beginning = self._bytes_of(token_id)
        if not _is_text(beginning):
            return frozenset()
        # The end of the range: no byte of UTF-8 is 0xff.
        end = beginning[:-1] + bytes([beginning[-1] + 1])
        first = bisect_left(self.ids, beginning, key=self._bytes_of)
        return frozenset(self.ids[first : bisect_left(self.ids, end, lo=first, key=self._bytes_of)])

    def added_text(self, token_id: int, extension: int) -> str:
        """Return the rest of the text of `extension`, an extension of `token_id`, after the text of `token_id`."""
        return self._bytes_of(extension)[len(self._bytes_of(token_id)) :].decode()


def _sorted(ids: npt.NDArray[np.uint32], table: TokenBytes) -> array[int]:
    """Sort tokens by their bytes, without an object for each: such objects would cost the process megabytes for ever.

    The first eight bytes as one number decide nearly everything.
    """
    import numpy as np

    first_bytes = table.first_bytes(ids)
    order = np.argsort(first_bytes, kind="stable")
    result = array("I", ids[order].tobytes())
    is_tie = np.diff(first_bytes[order]) == 0
    # Starts and ends of runs of equal numbers.
    edges = np.flatnonzero(np.diff(is_tie, prepend=False, append=False)).reshape(-1, 2)
    for first, last in edges.tolist():
        result[first : last + 1] = array("I", sorted(result[first : last + 1], key=table.bytes_of))
    return result


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False
