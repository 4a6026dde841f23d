"""Table of the text or bytes that each id of a vocabulary contributes to decoded text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Contributions by id; an id that contributes has exactly one of the two."""

    # Text of an id with whole characters, else None.
    text: list[str | None]
    # Bytes of an id with a part of a character.
    raw: dict[int, bytes]

    @classmethod
    def of(cls, pieces: Sequence[bytes], lone: Collection[int]) -> Table:
        """Make the table from the bytes of each id. Ids in `lone` stay bytes even if they are whole characters."""
        text: list[str | None] = []
        raw: dict[int, bytes] = {}
        for index, piece in enumerate(pieces):
            try:
                text.append(None if index in lone else piece.decode())
            except UnicodeDecodeError:
                text.append(None)
            if text[-1] is None:
                raw[index] = piece
        return cls(text, raw)

    def pieces(self) -> Iterator[bytes]:
        """Bytes of each id."""
        return (self.raw[index] if text is None else text.encode() for index, text in enumerate(self.text))

    def piece(self, index: int) -> bytes:
        """Bytes of one id. Raises IndexError for an id outside of the table."""
        text = self.text[index]
        return self.raw[index] if text is None else text.encode()

    def without(self, ids: Sequence[int]) -> Table:
        """Return a table in which `ids` contribute nothing, as with skip_special_tokens."""
        text = list(self.text)
        for index in ids:
            text[index] = ""
        return Table(text, {index: raw for index, raw in self.raw.items() if text[index] is None})
