"""Source tree for its rules: modules, their imports, and the rooms of docs/learn/rooms.md in order."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "services" / "penstock"
# Folders of generated code.
STUBS = ("v1", "inference", "engines")
# English that a reader has to read twice, with line ends and the marks of comments and strings in between. Each has a
# plain form: "a request whose prompt is long" is "a request with a long prompt".
FOREIGN = re.compile(r"\b(?:so\W+many|whose|of\W+which)\b", re.IGNORECASE)
_ROW = re.compile(r"^\| `([\w.]+)` \| .* \| (yes|–) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Room:
    """A row of the table: `order` counts from the top."""

    name: str
    order: int
    may_have_torch: bool


@functools.cache
def rooms() -> list[Room]:
    """The table's rows."""
    page = (ROOT / "docs" / "learn" / "rooms.md").read_text(encoding="utf-8")
    return [Room(name, order, torch == "yes") for order, (name, torch) in enumerate(_ROW.findall(page))]


@functools.cache
def room_of(module: str) -> Room | None:
    """Find the room of `module` (without `penstock.`): the one with the longest name that it lies in."""
    found = [room for room in rooms() if module == room.name or module.startswith(room.name + ".")]
    return max(found, key=lambda room: len(room.name), default=None)


@functools.cache
def modules() -> dict[str, Path]:
    """Every module but the stubs, by its dotted name without `penstock.`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in STUBS and parts != ("__init__",):
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports() -> dict[str, frozenset[str]]:
    """Module -> modules of this package that it imports: at run time, inside functions, or for types alone."""
    return {module: frozenset(_imported(path)) for module, path in modules().items()}


def _imported(path: Path) -> set[str]:
    found = set()
    for name in _names(ast.parse(path.read_text(encoding="utf-8"))):
        inner = name.removeprefix("penstock.")
        while inner and inner not in modules():
            # The name of something in a module.
            inner = inner.rpartition(".")[0]
        if inner and name.startswith("penstock."):
            found.add(inner)
    return found


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles(graph: dict[str, frozenset[str]]) -> list[list[str]]:
    """Sets of modules that reach one another (Tarjan's strongly connected components of more than one)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found
