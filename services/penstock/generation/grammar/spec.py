"""A request's Constraint as plain data, and the checks that need no compiler. No torch, no proto."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from penstock.common.errors import InvalidArgument
from penstock.text.thoughts import Thought


class ConstraintKind(enum.Enum):
    """Fields of penstock.v1.Constraint; values are their names."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """A Constraint as sent, unchecked."""

    # None: the message was sent with none of its fields set.
    kind: ConstraintKind | None
    # Source of JSON_SCHEMA, REGEX and GRAMMAR.
    text: str = ""
    # Values of CHOICE.
    choices: tuple[str, ...] = ()
    # JSON_OBJECT: the value of the field.
    enabled: bool = True
    # Lark text of an output with its constrained part at @answer; empty: the whole output is constrained.
    around: str = ""
    # `around` allows calls in place of that part.
    may_be_calls: bool = False
    # Thought before the constrained part, of an output with text around it.
    thought: Thought | None = None

    @property
    def has_shorter_ends(self) -> bool:
        """False for a choice: which of its values is taken is not the limit's to say."""
        return self.kind is not ConstraintKind.CHOICE

    @property
    def field(self) -> str:
        """Field that errors name."""
        return "constraint" if self.kind is None else f"constraint.{self.kind.value}"

    @property
    def num_bytes(self) -> int:
        """Number of UTF-8 bytes of its source."""
        return (
            len(self.around.encode()) + len(self.text.encode()) + sum(len(choice.encode()) for choice in self.choices)
        )

    @property
    def key(self) -> bytes:
        """SHA-256 of its content, equal for equal constraints."""
        digest = hashlib.sha256(self.field.encode())
        for part in (self.around, repr((self.may_be_calls, self.thought)), self.text, *self.choices):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "big"))
            digest.update(data)
        return digest.digest()


def check_spec(spec: ConstraintSpec, *, max_bytes: int, max_choices: int) -> None:
    """Raise InvalidArgument for errors that need no compiler to find. O(size of the source)."""
    if spec.kind is None:
        raise InvalidArgument("constraint", "must have one of its fields set")
    # Checked before any work per choice: a message has room for millions of empty ones.
    if len(spec.choices) > max_choices:
        raise InvalidArgument(spec.field, f"must hold at most {max_choices} values", reason="CONSTRAINT_TOO_LARGE")
    if spec.num_bytes > max_bytes:
        raise InvalidArgument(spec.field, f"must be at most {max_bytes} bytes long", reason="CONSTRAINT_TOO_LARGE")
    match spec.kind:
        case ConstraintKind.JSON_OBJECT:
            if not spec.enabled:
                raise InvalidArgument(spec.field, "must be true where it is set")
        case ConstraintKind.CHOICE:
            _check_choices(spec)
        case _:
            if not spec.text.strip():
                raise InvalidArgument(spec.field, "must not be empty")


def _check_choices(spec: ConstraintSpec) -> None:
    choices = spec.choices
    if not choices:
        raise InvalidArgument(spec.field, "must hold at least one value")
    if not all(choices):
        raise InvalidArgument(spec.field, "must not hold an empty string")
    if len(set(choices)) < len(choices):
        raise InvalidArgument(spec.field, "must not hold a value twice")
