"""Whether a template only writes its control tokens out: then marking them changes nothing else of what it renders."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Literal

from jinja2 import nodes

# Where a node stands: text written straight to the result, a part of an expression that is, or anything else.
_Place = Literal["body", "shown", "used"]
_BODIES = frozenset({"body", "else_", "elif_"})


def are_only_shown(plain: nodes.Node, marked: nodes.Node, variables: Collection[str]) -> bool:
    """Whether what differs between a template and its marked form, and `variables`, is written out and no more.

    Nothing that the template decides, cuts, counts or keeps depends on them then, so both forms render the same but for
    the marks, whatever they are given. False when in doubt: for text that a macro, a filter or a block could look at.
    """
    return _is_sound(plain, marked, frozenset(variables), "body")


def _is_sound(plain: nodes.Node, marked: nodes.Node, variables: frozenset[str], place: _Place) -> bool:
    if type(plain) is not type(marked):
        return False
    if isinstance(marked, nodes.Const | nodes.TemplateData):
        return place == "shown" or _value(plain) == _value(marked)
    if isinstance(marked, nodes.Name) and marked.name in variables:
        return place == "shown"
    ours, theirs = list(_children(plain)), list(_children(marked))
    return len(ours) == len(theirs) and all(
        _is_sound(one, other, variables, _place_of(marked, field, place))
        for (_, one), (field, other) in zip(ours, theirs, strict=True)
    )


def _value(node: nodes.Node) -> Any:
    return node.data if isinstance(node, nodes.TemplateData) else getattr(node, "value", None)


def _children(node: nodes.Node) -> Iterator[tuple[str, nodes.Node]]:
    for name, value in node.iter_fields():
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, nodes.Node):
                yield name, child


def _place_of(parent: nodes.Node, field: str, place: _Place) -> _Place:
    """Where a child of `parent`, which is at `place` itself, stands."""
    if place == "body":
        if isinstance(parent, nodes.For) and parent.recursive:
            return "used"  # by whoever calls loop(...)
        if isinstance(parent, nodes.Template | nodes.If | nodes.For) and field in _BODIES:
            return "body"
        return "shown" if isinstance(parent, nodes.Output) else "used"
    if place == "shown" and (
        isinstance(parent, nodes.Concat | nodes.Add) or (isinstance(parent, nodes.CondExpr) and field != "test")
    ):
        return "shown"
    return "used"
