"""Keys of a JSON answer as it is written: an object in which a key came twice holds nothing more.

A grammar cannot say so: keys that the schema does not name may come twice, and a model that repeats one would do so up
to the bound of keys. JSON's readers keep the last of equal keys, so a document loses nothing that its reader would see.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.text.thoughts import ThoughtGate
    from penstock.text.token_bytes import TokenBytes

_QUOTE, _ESCAPE, _COMMA, _COLON = b'"\\,:'
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{}[]"
_IN_TEXT = re.compile(rb'["\\]')


def written_keys(spec: ConstraintSpec) -> WrittenKeys | None:
    """Return the start of an output that is JSON; None: it is not, or nobody knows where it begins."""
    is_json = spec.kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT)
    if not is_json or (spec.around and spec.thought is None):
        return None
    return WrittenKeys(None if spec.thought is None else spec.thought.byte_gate())


class _OpenObject:
    """An object that is not closed. Immutable, for copies share it."""

    __slots__ = ("has_repeated", "keys")

    def __init__(self, keys: frozenset[bytes] = frozenset(), *, has_repeated: bool = False) -> None:
        self.keys, self.has_repeated = keys, has_repeated

    def with_key(self, key: bytes) -> _OpenObject:
        return _OpenObject(self.keys | {key}, has_repeated=self.has_repeated or key in self.keys)


class WrittenKeys:
    """Place in an output that is JSON, perhaps after a thought, and the keys of its open objects."""

    __slots__ = ("_gate", "_is_escaped", "_is_key", "_is_text", "_key", "_open", "num_repeated")

    def __init__(self, gate: ThoughtGate[bytes] | None = None) -> None:
        """`gate`: reader of the thought before the JSON."""
        self._gate = gate
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
        twin = WrittenKeys(None if self._gate is None else self._gate.copy())
        twin._open, twin._key, twin.num_repeated = self._open, self._key, self.num_repeated
        twin._is_text, twin._is_escaped, twin._is_key = self._is_text, self._is_escaped, self._is_key
        return twin

    def feed(self, data: bytes) -> bool:
        """Take more of the output; False where it goes on with an object in which a key came twice. O(its length)."""
        if self._gate is not None:
            _, answer = self._gate.feed(data)
            if answer is None:
                return True
            self._gate, data = None, answer
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
    """Bytes of a vocabulary's tokens, and those with a comma: only these go on with an object. Immutable."""

    def __init__(self, table: TokenBytes, vocab_size: int) -> None:
        """Make them for a model of `vocab_size` ids. O(vocabulary)."""
        self._table = table
        commas = table.ids_with(_COMMA)
        self._commas = commas[commas < vocab_size]

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of a token, control tokens by their names."""
        return self._table.bytes_of(token_id, skip_special=False)

    def forbid(self, row_W: npt.NDArray[np.uint32], written: WrittenKeys) -> None:
        """Clear the bits of tokens that go on with an object in which a key came twice.

        Where nothing else is allowed, as the schema asks for more keys, it wins.
        """
        commas = self._commas
        allowed = commas[(row_W[commas >> 5] >> (commas & 31)) & 1 == 1]
        going_on = [number for number in allowed.tolist() if not written.copy().feed(self.bytes_of(number))]
        before = row_W.copy()
        for number in going_on:
            row_W[number >> 5] &= ~(1 << (number & 31)) & 0xFFFFFFFF
        if not row_W.any():
            row_W[:] = before
