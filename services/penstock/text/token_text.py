"""Text of one token alone, and its bytes if they are parts of characters, for log-probabilities."""

from __future__ import annotations

from typing import NamedTuple


class TokenText(NamedTuple):
    """A token alone."""

    text: str
    # Its bytes if they are not whole characters, else nothing: `text` is enough.
    raw: bytes

    @classmethod
    def of(cls, piece: bytes) -> TokenText:
        """Make it from the bytes that the token contributes to a text."""
        try:
            return cls(piece.decode(), b"")
        except UnicodeDecodeError:
            return cls(piece.decode("utf-8", "replace"), piece)
