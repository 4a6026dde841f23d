"""What each id of a vocabulary contributes to decoded text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Exactly one of the two is set for an id."""

    # Text of an id that stands for whole characters, else None.
    text: list[str | None]
    # Bytes of an id that holds part of a character.
    raw: dict[int, bytes]

    @classmethod
    def of(cls, pieces: Sequence[bytes], lone: Collection[int]) -> Table:
        """From the bytes of each id. Those of `lone` stay bytes even where they are whole characters."""
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
        """The bytes of each id."""
        return (self.raw[index] if text is None else text.encode() for index, text in enumerate(self.text))

    def without(self, ids: Sequence[int]) -> Table:
        """With `ids` contributing nothing: what skip_special_tokens does."""
        text = list(self.text)
        for index in ids:
            text[index] = ""
        return Table(text, {index: raw for index, raw in self.raw.items() if text[index] is None})
