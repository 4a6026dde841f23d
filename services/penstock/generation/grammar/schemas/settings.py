"""Settings of a schema's text: its own `x-guidance`; some of the words are ours, the others llguidance's."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.generation.grammar.grammar_limits import JsonBounds
from penstock.generation.grammar.schemas.refusal import Refusal

NAME = "x-guidance"
# JSON allows any amount of white space, and real models use it: blank lines before a comma, for ever in the worst case.
# Here there is none before a comma and a colon, and after one a blank, or a line break with indentation.
_WRITTEN = {"item_separator": r",(\x20|\x0A\x20{0,32})?", "key_separator": r":\x20?", "whitespace_flexible": False}
_COMPACT = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False}
# Our names of bounds -> fields: max_digits -> max_json_digits.
_BOUNDS = {field.name.replace("_json", ""): field.name for field in fields(JsonBounds)}
_SPACING = frozenset({*_WRITTEN, "whitespace_pattern"})


@dataclass(frozen=True)
class Settings:
    """Settings of one schema."""

    # llguidance's.
    guidance: dict[str, Any]
    # No white space at all.
    is_compact: bool = False
    # Objects have only named keys, unless the schema allows others.
    is_strict: bool = False
    bounds: JsonBounds = field(default_factory=JsonBounds)

    @property
    def for_llguidance(self) -> dict[str, Any]:
        """Settings with defaults for white space: a schema that sets one of these sets all."""
        if self.is_compact:
            return {**self.guidance, **_COMPACT}
        return self.guidance if self.guidance.keys() & _SPACING else {**_WRITTEN, **self.guidance}


def take_settings(schema: dict[str, Any], bounds: JsonBounds) -> Settings:
    """Remove the settings from a schema; they override the server's `bounds`. Raises Refusal."""
    given = schema.pop(NAME, {})
    if not isinstance(given, dict):
        raise Refusal("#", NAME, "must be an object")
    guidance = dict(given)
    flags = {name: guidance.pop(name, False) for name in ("compact", "strict")}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise Refusal("#", NAME, "must have true or false for compact and strict")
    set_here = [setting for setting in _BOUNDS if setting in guidance]
    own = {_BOUNDS[setting]: guidance.pop(setting) for setting in set_here}
    if not all(isinstance(bound, int) and not isinstance(bound, bool) and bound >= 0 for bound in own.values()):
        raise Refusal("#", NAME, f"must have whole numbers of 0 or more for {', '.join(set_here)}")
    return Settings(guidance, flags["compact"], flags["strict"], replace(bounds, **own))
