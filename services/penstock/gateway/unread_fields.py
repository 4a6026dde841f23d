"""Fields of a JSON body that nothing reads: warnings in the answer if they look like a typo, or refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextvars import ContextVar
from difflib import get_close_matches

from penstock.common.errors import InvalidArgument
from penstock.common.hf_fields import REFUSED, WITHOUT_EFFECT, no_effect

# Least similarity at which a name counts as a typo: temprature, max_token, top-p.
_NEAR = 0.8
# Longest name, and most names of a body, that are compared.
_LONGEST, _MOST = 64, 64
# Warnings about the body of the request that this task answers. A connection's requests come one by one, and each sets
# its own.
_notes: ContextVar[tuple[str, ...]] = ContextVar("notes", default=())


def unknown_fields(left: Iterable[str], known: Collection[str], *, refuse: bool) -> tuple[str, ...]:
    """Return warnings about fields that nothing reads: typos of `known` ones, and transformers' own fields.

    Raises InvalidArgument naming the first that would change the answer; with `refuse` the first of any kind.
    """
    notes = []
    for name in [*left][:_MOST]:
        if name in WITHOUT_EFFECT:
            notes.append(no_effect(name))
            continue
        if name in REFUSED:
            raise InvalidArgument(name, REFUSED[name])
        near = get_close_matches(name.replace("-", "_"), known, 1, _NEAR) if len(name) <= _LONGEST else []
        shown = name if len(name) <= _LONGEST and name.isascii() and name.isprintable() else ""
        if refuse:
            hint = f", did you mean {near[0]}?" if near else " (--unknown-fields report lets it pass)"
            raise InvalidArgument(shown or "body", f"is not known{hint}", reason="UNKNOWN_FIELD")
        if near and shown:
            notes.append(f"{shown} is not known and has no effect, did you mean {near[0]}?")
    return tuple(notes)


def note_fields(notes: tuple[str, ...]) -> None:
    """Keep the warnings for the answer to this request."""
    _notes.set(notes)


def noted_fields() -> tuple[str, ...]:
    """Return the warnings about this request's body."""
    return _notes.get()
