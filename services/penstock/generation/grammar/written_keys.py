"""Keys of a JSON answer as it is written: an object in which a key came twice holds nothing more, and a long key ends.

A grammar cannot say the first: keys that the schema does not name may come twice, and a model that repeats one would do
so up to the bound of keys. JSON's readers keep the last of equal keys, so a document loses nothing that its reader
would see. The second llguidance takes only for objects without named keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from penstock.generation.grammar.grammar_limits import JsonBounds
from penstock.generation.grammar.schemas.document import read_json
from penstock.generation.grammar.schemas.settings import NAME, take_settings
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock.text.thoughts import ThoughtGate
    from penstock.text.token_bytes import TokenBytes

_QUOTE, _ESCAPE, _COMMA, _COLON = b'"\\,:'
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{}[]"
# Words of a schema with names of keys, or with values that have keys.
_WITH_NAMES = frozenset({"required", "enum", "const", "dependentRequired"})
_IN_TEXT = re.compile(rb'["\\]')


def written_keys(spec: ConstraintSpec, bounds: JsonBounds) -> WrittenKeys | None:
    """Return the start of an output that is JSON; None: it is not, or nobody knows where it begins.

    The schema of `spec` compiles; its own bounds go before `bounds`.
    """
    is_json = spec.kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT)
    if not is_json or (spec.around and spec.thought is None and not spec.may_be_calls):
        return None
    schema = read_json(spec.text) if spec.text else {}
    if NAME in schema:
        bounds = take_settings(schema, bounds).bounds
    most = min((one for one in (bounds.max_json_key_characters, bounds.max_json_characters) if one), default=0)
    # A key that the schema names comes whole, though another one may end in its middle.
    most = max(most, _longest_name(schema)) if most else 0
    gate = None if spec.thought is None else spec.thought.byte_gate()
    return WrittenKeys(gate, most_characters=most, may_be_calls=spec.may_be_calls)


def _longest_name(schema: object) -> int:
    """Return the most characters that a key named in a schema takes, as JSON writes it."""
    longest = 0
    pending: list[tuple[object, bool]] = [(schema, False)]
    while pending:
        one, is_value = pending.pop()
        if isinstance(one, str) and is_value:
            longest = max(longest, len(json.dumps(one)) - 2)
        elif isinstance(one, list):
            pending += [(part, is_value) for part in one]
        elif isinstance(one, dict):
            pending += [(part, is_value or word in _WITH_NAMES) for word, part in one.items()]
            names = one if is_value else one.get("properties")
            pending += [(name, True) for name in (names if isinstance(names, dict) else ())]
    return longest


class _OpenObject:
    """An object that is not closed. Immutable, for copies share it."""

    __slots__ = ("has_repeated", "keys")

    def __init__(self, keys: frozenset[bytes] = frozenset(), *, has_repeated: bool = False) -> None:
        self.keys, self.has_repeated = keys, has_repeated

    def with_key(self, key: bytes) -> _OpenObject:
        return _OpenObject(self.keys | {key}, has_repeated=self.has_repeated or key in self.keys)


class WrittenKeys:
    """Place in an output that is JSON, perhaps after a thought, and the keys of its open objects."""

    __slots__ = (
        *("_gate", "_is_calls", "_is_escaped", "_is_key", "_is_text", "_key", "_may_be_calls", "_most_characters"),
        *("_open", "num_repeated"),
    )

    def __init__(
        self, gate: ThoughtGate[bytes] | None = None, *, most_characters: int = 0, may_be_calls: bool = False
    ) -> None:
        """`gate`: reader of the thought before the JSON. `most_characters`: of a key; 0: any number. `may_be_calls`:
        an output that begins otherwise than an object or an array of JSON is calls, and has no keys here."""
        self._gate, self._most_characters = gate, most_characters
        # Until the first character, and from then on.
        self._may_be_calls, self._is_calls = may_be_calls, False
        # Objects and arrays (None) that are open, outermost first.
        self._open: tuple[_OpenObject | None, ...] = ()
        self._is_text = self._is_escaped = False
        # The next text of the innermost object is a key, or the present one is.
        self._is_key = False
        self._key = b""
        # Number of open objects in which a key came twice.
        self.num_repeated = 0

    def copy(self) -> WrittenKeys:
        """Return an independent place."""
        gate = None if self._gate is None else self._gate.copy()
        twin = WrittenKeys(gate, most_characters=self._most_characters, may_be_calls=self._may_be_calls)
        twin._is_calls = self._is_calls
        twin._open, twin._key, twin.num_repeated = self._open, self._key, self.num_repeated
        twin._is_text, twin._is_escaped, twin._is_key = self._is_text, self._is_escaped, self._is_key
        return twin

    @property
    def is_in_text(self) -> bool:
        """True within a key, or a value that is a text."""
        return self._is_text

    @property
    def is_in_long_key(self) -> bool:
        """True within a key that has the most characters."""
        if not self._is_text or not self._is_key or not 0 < self._most_characters <= len(self._key):
            return False
        return len(self._key.decode(errors="replace")) >= self._most_characters

    def feed(self, data: bytes) -> bool:
        """Take more of the output; False where it goes on with an object in which a key came twice. O(its length)."""
        if self._gate is not None:
            _, answer = self._gate.feed(data)
            if answer is None:
                return True
            self._gate, data = None, answer
        if self._may_be_calls and (begun := data.lstrip()):
            self._may_be_calls, self._is_calls = False, begun[0] not in (_OPEN_OBJECT, _OPEN_ARRAY)
        if self._is_calls:
            return True
        goes_on, at = False, 0
        while at < len(data):
            if self._is_text:
                at = self._in_text(data, at)
                continue
            goes_on = self._outside(data[at]) or goes_on
            at += 1
        return not goes_on

    def _outside(self, one: int) -> bool:
        """Take a character outside texts; True for one more member of an object in which a key came twice."""
        if one == _QUOTE:
            self._is_text = True
        elif one == _COLON:
            self._is_key = False
        elif one == _COMMA:
            top = self._open[-1] if self._open else None
            self._is_key = top is not None
            return top is not None and top.has_repeated
        elif one in (_OPEN_OBJECT, _OPEN_ARRAY):
            self._is_key = one == _OPEN_OBJECT
            self._open = (*self._open, _OpenObject() if self._is_key else None)
        elif one in (_CLOSE_OBJECT, _CLOSE_ARRAY) and self._open:
            closed = self._open[-1]
            self._open = self._open[:-1]
            self.num_repeated -= closed is not None and closed.has_repeated
        return False

    def _in_text(self, data: bytes, at: int) -> int:
        """Take some of a text, and return the place behind it."""
        found = None if self._is_escaped else _IN_TEXT.search(data, at)
        end = at + 1 if self._is_escaped else len(data) if found is None else found.end()
        self._is_escaped = found is not None and data[end - 1] == _ESCAPE
        is_over = found is not None and not self._is_escaped
        if self._is_key:
            self._key += data[at : end - is_over]
        if is_over:
            self._is_text = False
            if self._is_key:
                self._end_key()
        return end

    def _end_key(self) -> None:
        top = self._open[-1] if self._open else None
        if top is not None:
            made = top.with_key(self._key)
            self.num_repeated += made.has_repeated and not top.has_repeated
            self._open = (*self._open[:-1], made)
        self._key = b""


class KeyTokens:
    """Bytes of a vocabulary's tokens, those with a comma, which alone go on with an object, and those that begin with a
    quote, which alone end a text. Immutable."""

    def __init__(self, table: TokenBytes, vocab_size: int) -> None:
        """Make them for a model of `vocab_size` ids. O(vocabulary)."""
        self._table, self._vocab_size = table, vocab_size
        commas = table.ids_with(_COMMA)
        self._commas = commas[commas < vocab_size]
        # Within a text a comma says nothing unless the text has ended before it: few tokens.
        is_behind = [b'"' in self.bytes_of(number).rpartition(b",")[0] for number in self._commas.tolist()]
        self._commas_behind_quotes = self._commas[np.array(is_behind, dtype=bool)]
        # One bit for each, as in a mask, which has one id more than the model.
        self._quotes_W = np.zeros(vocab_size // 32 + 1, dtype=np.uint32)
        for one in table.ids_with(_QUOTE).tolist():
            if one < vocab_size and self.bytes_of(one)[0] == _QUOTE:
                self._quotes_W[one >> 5] |= 1 << (one & 31)

    def ids_with(self, some: Iterable[int]) -> list[int]:
        """Ids of the model's tokens that have one of these bytes."""
        found = {token_id for byte in some for token_id in self._table.ids_with(byte).tolist()}
        return [token_id for token_id in found if token_id < self._vocab_size]

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of a token, control tokens by their names."""
        return self._table.bytes_of(token_id, skip_special=False)

    def restrict(self, row_W: npt.NDArray[np.uint32], written: WrittenKeys) -> None:
        """Clear the bits of tokens that go on with a key that is long enough, or with an object in which a key came
        twice.

        Where nothing else is allowed, as the schema asks for more, it wins.
        """
        if written.is_in_long_key:
            left_W = row_W & self._quotes_W
            if left_W.any():
                row_W[:] = left_W
        elif written.num_repeated:
            self._forbid_members(row_W, written)

    def _forbid_members(self, row_W: npt.NDArray[np.uint32], written: WrittenKeys) -> None:
        commas = self._commas_behind_quotes if written.is_in_text else self._commas
        allowed = commas[(row_W[commas >> 5] >> (commas & 31)) & 1 == 1]
        going_on = [number for number in allowed.tolist() if not written.copy().feed(self.bytes_of(number))]
        before = row_W.copy()
        for number in going_on:
            row_W[number >> 5] &= ~(1 << (number & 31)) & 0xFFFFFFFF
        if not row_W.any():
            row_W[:] = before
