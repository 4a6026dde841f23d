"""A request's CallGrammar as plain data, and the checks that need no compiler. No torch, no proto."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.errors import InvalidArgument
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec
from penstock.text.thoughts import Thought

FIELD = "calls"
# Most bytes of a marker: a caller that has more is wrong.
_MOST_BYTES = 1024
MOST_MARKERS = 1024


@dataclass(frozen=True, slots=True)
class CallSpec:
    """A CallGrammar as sent, unchecked."""

    opens: tuple[str, ...]
    grammar: str
    # Thought before the answer: no call is held there.
    thought: Thought | None = None
    # The request is refused where the grammar cannot be made.
    is_required: bool = False

    @property
    def constraint(self) -> ConstraintSpec:
        """The grammar as the compiler takes it."""
        return ConstraintSpec(ConstraintKind.GRAMMAR, self.grammar)

    def check(self) -> None:
        """Raise InvalidArgument for markers that are none."""
        if not 0 < len(self.opens) <= MOST_MARKERS or any(
            not 0 < len(one.encode()) <= _MOST_BYTES for one in self.opens
        ):
            raise InvalidArgument(FIELD, f"must have 1 to {MOST_MARKERS} markers of 1 to {_MOST_BYTES} bytes")
