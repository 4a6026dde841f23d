r"""Look-aheads that a pattern begins with, as patterns beside it: the automata of llguidance have none.

Pydantic 2.12 writes `^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$` for a Decimal, and a password is `^(?=.*[A-Z])(?=.*\d).{8,}$`.
A look-ahead elsewhere stays in the pattern, and llguidance refuses it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.generation.grammar.regex_parts import alternatives, ends_at_end, group_end

ANY = "(?s:.*)"
_LOOKAHEAD = re.compile(r"\(\?[=!]")
# What stands for one character.
_ATOM = re.compile(r"\\[dDsSwW]|\\[^A-Za-z0-9]|\[(?:\^)?\]?(?:\\.|[^\]\\\[])*\]|[^\\\[\](){}*+?|^$.]")
_ANYTHING = re.compile(r"(?:\.|\[\\s\\S\]|\[\\S\\s\]|\(\?s:\.\))\*\??")
_IN_CLASS = frozenset("^]\\-[&~")
# Characters of a text that is turned round: each takes a group in a group, and llguidance reads no deeper ones.
_MOST_TURNED = 64


@dataclass(frozen=True, slots=True)
class Lookaheads:
    """A pattern without its look-aheads, and the patterns that texts must and must not begin with."""

    rest: str
    asked: tuple[str, ...]
    forbidden: tuple[str, ...]


def take_lookaheads(pattern: str) -> Lookaheads | None:
    """Take the look-aheads after the `^` that `pattern` begins with; None: it has none there, or alternatives."""
    if not (pattern.startswith("^") and _LOOKAHEAD.match(pattern, 1)) or len(alternatives(pattern)) > 1:
        return None
    said: dict[str, list[str]] = {"=": [], "!": []}
    at = 1
    while _LOOKAHEAD.match(pattern, at):
        end = group_end(pattern, at)
        if end is None:
            return None
        said[pattern[at + 2]].append(pattern[at + 3 : end])
        at = end + 1
    if pattern[at : at + 1] in ("*", "+", "?", "{"):
        return None
    return Lookaheads("^" + pattern[at:], tuple(said["="]), tuple(said["!"]))


def without_lookaheads(pattern: str) -> list[str] | None:
    """Return patterns that hold together where `pattern` does, without look-aheads; None: it stays as it is.

    What a look-ahead forbids is turned round where that is short: no character of a class, another one than those of a
    class, another beginning, another text. Fewer texts than those of `pattern` may match: `.` never is a line break.
    """
    taken = take_lookaheads(pattern)
    if taken is None:
        return None
    found = [taken.rest, *(f"^{beginning(one)}$" for one in taken.asked)]
    for one in (one for several in taken.forbidden for one in alternatives(several)):
        turned = _complement(one)
        if turned is None:
            return None
        found.append(f"^{turned}$")
    return found


def beginning(pattern: str) -> str:
    """Return the pattern of whole texts that begin as `pattern` says."""
    return whole("|".join(f"^{one.removeprefix('^')}" for one in alternatives(pattern)))


def whole(pattern: str) -> str:
    """Return the pattern of whole texts in which `pattern` is found somewhere, as JSON Schema means it."""
    made = []
    for one in alternatives(pattern):
        begins, ends = one.startswith("^"), ends_at_end(one)
        inner = one[begins : len(one) - ends]
        made.append(f"{'' if begins else ANY}(?:{inner}){'' if ends else ANY}")
    return f"(?:{'|'.join(made)})"


def _complement(pattern: str) -> str | None:
    """Return the pattern of whole texts that do not begin as `pattern` says; None: it is not one of a few forms."""
    pattern = pattern.removeprefix("^")
    ends = ends_at_end(pattern)
    pattern = pattern[: len(pattern) - ends]
    anywhere = _ANYTHING.match(pattern)
    atoms, tail = _atoms(pattern[anywhere.end() :] if anywhere else pattern)
    others = [_not(atom) for atom in atoms]
    if anywhere:
        if ends or tail or not atoms or len(set(atoms)) > 1:
            return None
        # One character, or one that comes several times in a row, never comes.
        fewer = f"(?:{atoms[0]}){{0,{len(atoms) - 1}}}"
        return f"(?:{fewer}{others[0]})*{fewer}"
    if len(atoms) == 1 and ends and tail in ("*", "+"):
        return f"(?:{ANY}{others[0]}{ANY}{'|' if tail == '+' else ''})"
    if tail or not (atoms or ends):
        return None
    made = "(?s:.)+" if ends else ""
    for atom, other in zip(reversed(atoms), reversed(others), strict=True):
        longer = f"|{atom}{made}" if made else ""
        made = f"(?:|{other}{ANY}{longer})"
    return made


def _atoms(pattern: str) -> tuple[list[str], str]:
    """Return the characters that a pattern begins with, each as a pattern and not too many, and what follows."""
    found: list[str] = []
    at = 0
    while len(found) < _MOST_TURNED and (one := _ATOM.match(pattern, at)) is not None:
        found.append(one[0])
        at = one.end()
    return found, pattern[at:]


def _not(atom: str) -> str:
    """Return the pattern of all other characters."""
    if atom.startswith("["):
        return f"[{atom[2:]}" if atom.startswith("[^") else f"[^{atom[1:]}"
    if atom[0] == "\\" and atom[1].isalpha():
        return f"\\{atom[1].swapcase()}"
    return "[^" + ("\\" if atom in _IN_CLASS else "") + atom + "]"
