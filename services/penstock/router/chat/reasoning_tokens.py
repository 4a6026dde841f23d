"""Count of the tokens of an answer's thoughts."""

from __future__ import annotations

from penstock.router.chat.chat_output import ChatParser, ChatPiece


class ReasoningTokens:
    """Tokens of one answer that belong to its thoughts; text is taken apart on the way."""

    __slots__ = ("_undecided", "total")

    def __init__(self) -> None:
        self.total = 0
        # Tokens since what may be a call within a thought, or a draft of one.
        self._undecided = 0

    def feed(self, parser: ChatParser, text: str, tokens: int) -> ChatPiece:
        """Feed the text of `tokens` tokens to the answer's parser; return what it makes of it."""
        was_inside, was_undecided = parser.in_reasoning, parser.is_undecided
        piece = parser.feed(text)
        if was_undecided or parser.is_undecided:
            self._undecided += tokens
            if not parser.is_undecided:
                self.decide(piece)
        elif was_inside and parser.in_reasoning:
            self.total += tokens
        elif piece.reasoning and text:
            # Reasoning begins or ends within this piece: count its share of the text.
            self.total += round(tokens * min(1.0, len(piece.reasoning) / len(text)))
        return piece

    def decide(self, piece: ChatPiece) -> None:
        """Take note of what undecided text turned into: a part of the thought, or calls."""
        if piece.reasoning:
            self.total += self._undecided
        self._undecided = 0
