"""Place in a schema of a refusal by llguidance: the deepest part that it refuses alone, and the keyword at fault.

llguidance says what is wrong, but not where. Trying the parts finds the place, within a bounded time. A part is first
tried alone, with definitions that allow anything: that costs little, and separates the part's own faults from those of
a definition that it refers to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock.generation.grammar.schemas.document import write_json
from penstock.generation.grammar.schemas.refusal import step
from penstock.generation.grammar.schemas.settings import NAME
from penstock.generation.grammar.schemas.words import ASSERTIONS, parts

# Name of the annotation with the origin of a definition.
ORIGIN = "$comment"
# Most processor time of the search for a place, in seconds: the refusal is known already.
MAX_SECONDS = 0.3
# Number of definitions to try together before they are tried one by one.
_GROUP = 16


class OutOfTime(Exception):
    """Error when there is no time for another trial."""


def find_refused_part(
    schema: dict[str, Any], is_refused: Callable[[str], bool], max_seconds: float = MAX_SECONDS
) -> tuple[str, str]:
    """Return the path and the keyword of the refused part of a refused schema; both may be less exact than possible.

    `is_refused` tries the text of a schema. Paths of definitions are those in their `$comment`.
    """
    return _PartSearch(schema, is_refused, max_seconds).find()


class _PartSearch:
    def __init__(self, root: dict[str, Any], is_refused: Callable[[str], bool], max_seconds: float) -> None:
        self._root = root
        self._definitions = {word: root[word] for word in ("$defs", "definitions") if isinstance(root.get(word), dict)}
        self._settings = {word: root[word] for word in (NAME, "$schema") if word in root}
        self._shared: dict[str, Any] = {}
        self._is_refused = is_refused
        self._until = time.thread_time() + max_seconds
        self._path, self._node = "#", {word: value for word, value in root.items() if word not in self._definitions}

    def find(self) -> tuple[str, str]:
        keyword = ""
        try:
            self._shared = self._settings | {
                word: dict.fromkeys(named, True) for word, named in self._definitions.items()
            }
            if not self._fails(self._node) and not self._go_to(self._definition()):
                # Nothing is wrong alone: each with what it refers to.
                self._shared = self._settings | self._definitions
                if not self._go_to(self._deeper(self._node, self._path)):
                    self._go_to(self._definition())
            while self._go_to(self._deeper(self._node, self._path)):
                pass
            keyword = self._keyword(self._node)
        except OutOfTime:
            pass
        return self._path, keyword

    def _go_to(self, found: tuple[str, dict[str, Any]] | None) -> bool:
        if found is not None:
            self._path, self._node = found
        return found is not None

    def _definition(self) -> tuple[str, dict[str, Any]] | None:
        for word, named in self._definitions.items():
            ones = [(name, one) for name, one in named.items() if isinstance(one, dict)]
            for at in range(0, len(ones), _GROUP):
                group = ones[at : at + _GROUP]
                if len(group) > 1 and not self._fails({"properties": dict(group)}):
                    continue
                for name, one in group:
                    if self._fails(one):
                        origin = one.get(ORIGIN)
                        return (origin if isinstance(origin, str) else step("#", word, name)), one
        return None

    def _deeper(self, node: dict[str, Any], path: str) -> tuple[str, dict[str, Any]] | None:
        for steps, part in parts(node):
            # A plain reference is refused for its target; the search goes on among the definitions.
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
        if time.thread_time() > self._until:
            raise OutOfTime
        return self._is_refused(write_json({**self._shared, **node}))
