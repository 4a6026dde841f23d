"""Count of the tokens in an answer's thoughts."""

from __future__ import annotations

from penstock.router.chat.chat_output import ChatParser, ChatPiece


class ReasoningTokens:
    """Tokens of one answer that belong to its thoughts; it feeds the text to the parser on the way."""

    __slots__ = ("_undecided", "total")

    def __init__(self) -> None:
        self.total = 0
        # Tokens since a possible call inside a thought, real or a draft.
        self._undecided = 0

    def feed(self, parser: ChatParser, text: str, tokens: int) -> ChatPiece:
        """Feed the text of `tokens` tokens to the answer's parser; return its output."""
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
        """Note the outcome of undecided text: a part of the thought, or calls."""
        if piece.reasoning:
            self.total += self._undecided
        self._undecided = 0
