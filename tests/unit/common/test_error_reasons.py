"""docs/reference/errors.md has every reason that the code raises, with the statuses that it comes with."""

from __future__ import annotations

import ast
from functools import cache

from factories.source_tree import ROOT, modules
from penstock.common import errors
from penstock.common.error_reasons import ERROR_REASONS, errors_markdown

_BY_NAME = {row.name: row for row in ERROR_REASONS}
# Made while it runs: "TEMPLATE_{what}_LIMIT", and that of gRPC's own refusals.
_COMPOSED = {"TEMPLATE_TIME_LIMIT", "TEMPLATE_MEMORY_LIMIT", "MESSAGE_TOO_LARGE"}


@cache
def _raised() -> frozenset[tuple[str, str | None]]:
    """Every reason in the source with the status of its error's class; None where the class is a variable."""
    found = set()
    for path in modules().values():
        text = path.read_text(encoding="utf-8")
        if "reason=" not in text:
            continue
        tree = ast.parse(text)
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            for value in (keyword.value for keyword in call.keywords if keyword.arg == "reason"):
                kind = getattr(errors, ast.unparse(call.func), None)
                reason = constants.get(value.id) if isinstance(value, ast.Name) else getattr(value, "value", None)
                if isinstance(reason, str):
                    found.add((reason, kind.code.name if isinstance(kind, type) else None))
    return frozenset(found)


def test_every_reason_has_a_row_with_its_status() -> None:
    raised = {(reason, code) for reason, code in _raised() if reason.isupper()}
    assert len(raised) > 40
    assert not {reason for reason, _ in raised} - set(_BY_NAME)
    assert not {(reason, code) for reason, code in raised if code is not None and code not in _BY_NAME[reason].codes}


def test_every_row_is_raised_somewhere() -> None:
    raised = {reason for reason, _ in _raised()} | _COMPOSED | {"INVALID_FIELD"}
    assert not set(_BY_NAME) - raised


def test_the_page_is_the_tables() -> None:
    assert (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8") == errors_markdown()
