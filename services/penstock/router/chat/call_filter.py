"""Limits on the calls of one answer: their number, and no repetition when a grammar forces calls."""

from __future__ import annotations

from dataclasses import replace

from penstock.router.chat.tool_calls import ToolCallPiece


class CallFilter:
    """Filter of the pieces of one answer's calls, in the order in which they come."""

    def __init__(self, max_calls: int, *, distinct: bool) -> None:
        """`max_calls`: most calls; 0: any number. `distinct`: a repeated call ends the answer."""
        self._max_calls = max_calls
        self._distinct = distinct
        # True after a call that is not part of the answer: nothing after it is, either.
        self.is_over = False
        # Names and arguments of the ended calls, and those of them that the open call may repeat.
        self._made: list[tuple[str, str]] = []
        self._alike: list[str] = []
        self._index = -1
        self._name = ""
        self._arguments: list[str] = []
        self._length = 0
        self._held: list[ToolCallPiece] = []

    def take(self, pieces: list[ToolCallPiece]) -> list[ToolCallPiece]:
        """Return the pieces that certainly belong to the answer."""
        if not self._distinct:
            return self._bounded(pieces)
        found: list[ToolCallPiece] = []
        for piece in pieces:
            if piece.index != self._index:
                found += self.end()
                self._begin(piece)
            if not self.is_over:
                found += self._more(piece)
        return found

    def end(self) -> list[ToolCallPiece]:
        """Return the rest of the open call, which has ended."""
        if self._index < 0 or not self._distinct:
            return []
        held, self._held, self._index = self._held, [], -1
        made = (self._name, "".join(self._arguments))
        if made in self._made:
            self.is_over = True
            return []
        self._made.append(made)
        return held

    def _bounded(self, pieces: list[ToolCallPiece]) -> list[ToolCallPiece]:
        kept = [one for one in pieces if not 0 < self._max_calls <= one.index]
        self.is_over = self.is_over or len(kept) < len(pieces)
        return kept

    def _begin(self, piece: ToolCallPiece) -> None:
        self._index, self._name, self._arguments, self._length = piece.index, piece.name, [], 0
        self._alike = [arguments for name, arguments in self._made if name == piece.name]
        self.is_over = self.is_over or 0 < self._max_calls <= len(self._made)

    def _more(self, piece: ToolCallPiece) -> list[ToolCallPiece]:
        """Take a piece of the open call; it waits while an earlier call began the same way."""
        self._arguments.append(piece.arguments)
        self._alike = [one for one in self._alike if one.startswith(piece.arguments, self._length)]
        self._length += len(piece.arguments)
        self._held.append(replace(piece))
        if self._alike:
            return []
        held, self._held = self._held, []
        return held
