"""Parts of a regular expression's text: its outermost alternatives, and where a group ends."""

from __future__ import annotations

from collections.abc import Iterator


def alternatives(pattern: str) -> list[str]:
    """Split a pattern at its outermost bars."""
    found, begin = [], 0
    for at, one, depth in _signs(pattern, 0):
        if one == "|" and depth == 0:
            found.append(pattern[begin:at])
            begin = at + 1
    return [*found, pattern[begin:]]


def group_end(pattern: str, start: int) -> int | None:
    """Return the place of the bracket that closes the group at `start`; None: nothing closes it."""
    return next((at for at, one, depth in _signs(pattern, start) if one == ")" and depth == 0), None)


def ends_at_end(pattern: str) -> bool:
    """Return whether `pattern` ends with a `$` that means the text's end: no odd number of backslashes before it."""
    before = pattern[:-1]
    return pattern.endswith("$") and (len(before) - len(before.rstrip("\\"))) % 2 == 0


def _signs(pattern: str, at: int) -> Iterator[tuple[int, str, int]]:
    """Yield brackets and bars outside classes, each with its place and the groups that are open behind it."""
    depth, in_class = 0, False
    while at < len(pattern):
        one = pattern[at]
        if one == "\\":
            at += 1
        elif in_class:
            in_class = one != "]"
        elif one == "[":
            in_class = True
            # A bracket that comes first is a member of the class.
            at += pattern.startswith("]", at + 1) or 2 * pattern.startswith("^]", at + 1)
        elif one in "()|":
            depth += {"(": 1, ")": -1, "|": 0}[one]
            yield at, one, depth
        at += 1
