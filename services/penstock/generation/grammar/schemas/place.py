"""Place in a schema of what llguidance refuses: the deepest part that it refuses alone, and the keyword that is why.

llguidance says what is wrong, but not where. The place is found by trying the parts, a bounded number of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.generation.grammar.schemas.document import write_json
from penstock.generation.grammar.schemas.refusal import step
from penstock.generation.grammar.schemas.settings import NAME
from penstock.generation.grammar.schemas.words import ASSERTIONS, parts

# Name of the annotation that tells where a definition comes from.
ORIGIN = "$comment"
_MAX_TRIALS = 200


class OutOfTrials(Exception):
    """No trial is left."""


def find_place(schema: dict[str, Any], is_refused: Callable[[str], bool]) -> tuple[str, str]:
    """Return the path and the keyword of what is refused in a schema that is; both may be less exact than they could.

    `is_refused` tries the text of a schema. Paths of definitions are those that their `$comment` has.
    """
    return _Search(schema, is_refused).find()


class _Search:
    def __init__(self, root: dict[str, Any], is_refused: Callable[[str], bool]) -> None:
        self._root = root
        self._shared = {word: root[word] for word in (NAME, "$schema", "$defs", "definitions") if word in root}
        self._is_refused = is_refused
        self._left = _MAX_TRIALS

    def find(self) -> tuple[str, str]:
        path, node = "#", {word: value for word, value in self._root.items() if word not in self._shared}
        keyword = ""
        try:
            deeper = self._deeper(node, path) or self._definition()
            while deeper is not None:
                path, node = deeper
                deeper = self._deeper(node, path)
            keyword = self._keyword(node)
        except OutOfTrials:
            pass
        return path, keyword

    def _definition(self) -> tuple[str, dict[str, Any]] | None:
        for word in ("$defs", "definitions"):
            for name, one in self._root.get(word, {}).items():
                if isinstance(one, dict) and self._fails(one):
                    origin = one.get(ORIGIN)
                    return (origin if isinstance(origin, str) else step("#", word, name)), one
        return None

    def _deeper(self, node: dict[str, Any], path: str) -> tuple[str, dict[str, Any]] | None:
        for steps, part in parts(node):
            # A plain reference is refused for its target, which is looked for among the definitions.
            if (
                isinstance(part, dict)
                and "$ref" not in part
                and steps[0] not in ("$defs", "definitions")
                and self._fails(part)
            ):
                return step(path, *steps), part
        return None

    def _keyword(self, node: dict[str, Any]) -> str:
        # Of two that exclude each other, a type is the last to be named.
        for word in sorted(node, key=lambda each: each == "type"):
            if word in ASSERTIONS and not self._fails({name: value for name, value in node.items() if name != word}):
                return word
        return ""

    def _fails(self, node: dict[str, Any]) -> bool:
        if not self._left:
            raise OutOfTrials
        self._left -= 1
        return self._is_refused(write_json({**self._shared, **node}))
