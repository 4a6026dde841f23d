"""Child process that renders chat templates with transformers' own renderer, within CPU and memory limits.

A template is a program from the model's folder. transformers runs it in Jinja's sandbox, which limits its access but
not its time or memory. The limits here do that, and the parent kills this process when the time is over.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO, Literal

from jinja2 import nodes

from penstock.common import child_io
from penstock.common.child_limits import limit_cpu, limit_memory


class Renderer:
    """Templates of one tokenizer, each in its plain form and with its control tokens marked."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Make it. `settings`: templates {name: [plain, marked]}, special_tokens and marked_special_tokens."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render_jinja_template: Any = render_jinja_template
        self._templates: dict[str, list[str]] = settings["templates"]
        self._special_tokens: dict[str, str] = settings["special_tokens"]
        self._marked_special_tokens: dict[str, str] = settings["marked_special_tokens"]
        # Template -> True when its marked rendering determines the plain one.
        self._derives_plain: dict[str, bool] = {}

    def check(self) -> dict[str, str]:
        """Compile every template and return the errors, {name: message}."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        wrong = {}
        for name, versions in self._templates.items():
            try:
                for source in versions:
                    _compile_jinja_template(source)
                self._can_derive_plain(name)
            except TemplateError as error:
                wrong[name] = str(error).partition("\n")[0]
            except MemoryError:  # Jinja computes constant expressions while it compiles
                wrong[name] = "it takes more memory than allowed"
            except RecursionError:
                wrong[name] = "it is nested too deeply"
        return wrong

    def render(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return {text, marked}: the same rendering, without and with marks; marked is None when not asked for.

        Text is None when it certainly equals the marked one without its marks.
        """
        name = request["template"]
        plain, marked = self._templates[name]
        if not request["mark"]:
            return {"text": self._render(plain, self._special_tokens, request), "marked": None}
        with_marks = self._render(marked, self._marked_special_tokens, request)
        # The part that is cut after a continued message may be different.
        if self._can_derive_plain(name) and not request["continue_final_message"]:
            return {"text": None, "marked": with_marks}
        return {"text": self._render(plain, self._special_tokens, request), "marked": with_marks}

    def _can_derive_plain(self, name: str) -> bool:
        found = self._derives_plain.get(name)
        if found is None:
            from transformers.utils.chat_template_utils import _compile_jinja_template

            plain, marked = (
                _compile_jinja_template(source).environment.parse(source) for source in self._templates[name]
            )
            tokens, marks = self._special_tokens, self._marked_special_tokens
            variables = {variable for variable in tokens if tokens[variable] != marks[variable]}
            found = self._derives_plain[name] = are_only_shown(plain, marked, variables)
        return found

    def _render(self, source: str, special_tokens: dict[str, str], request: dict[str, Any]) -> str:
        texts: list[str]
        texts, _ = self._render_jinja_template(
            conversations=[request["messages"]],
            tools=request["tools"] or None,
            documents=request["documents"] or None,
            chat_template=source,
            continue_final_message=request["continue_final_message"],
            add_generation_prompt=request["add_generation_prompt"],
            **{**special_tokens, **request["variables"]},
        )
        return texts[0]


def answer_to(renderer: Renderer, request: dict[str, Any]) -> dict[str, Any]:
    """Make the answer to one request; failures are answers, too."""
    try:
        return renderer.render(request)
    except MemoryError:
        return {"failure": "memory"}
    except (
        Exception
    ) as error:  # any error that a template raises is about the template and the messages, not about this code
        return {"failure": "refused", "kind": type(error).__name__, "message": str(error)}


def main() -> None:
    answers = child_io.claim_stdout()
    child_io.forbid_torch()
    # Takes most of a second: before it is told what to render, which a parent that still reads its tokenizer does late.
    with contextlib.suppress(ImportError):
        import transformers.utils.chat_template_utils  # noqa: F401
    serve(child_io.read(sys.stdin.buffer), answers)


def serve(settings: dict[str, Any], answers: BinaryIO) -> None:
    """Answer requests from stdin until it ends. `settings`: Renderer's, and the limits cpu_seconds and memory_bytes."""
    renderer = Renderer(settings)
    limit_memory(settings["memory_bytes"])
    # Compiling takes longer than rendering and happens once.
    limit_cpu(max(10.0, settings["cpu_seconds"]))
    answers.write(child_io.pack({"wrong": renderer.check()}))
    answers.flush()
    while True:
        try:
            request = child_io.read(sys.stdin.buffer)
        except EOFError:
            return
        limit_cpu(settings["cpu_seconds"])
        answers.write(child_io.pack(answer_to(renderer, request)))
        answers.flush()


# Place of a node: text written straight to the result, a part of such an expression, or any other.
_Place = Literal["body", "shown", "used"]
_BODIES = frozenset({"body", "else_", "elif_"})


def are_only_shown(plain: nodes.Node, marked: nodes.Node, variables: Collection[str]) -> bool:
    """True when the differences between a template and its marked form, and `variables`, are only written out.

    Then nothing that the template decides, cuts, counts or keeps depends on them, and for any input both forms render
    the same except for the marks. False when in doubt: for text that a macro, a filter or a block could read.
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
    """Place of a child of `parent`, which is at `place` itself."""
    if place == "body":
        if isinstance(parent, nodes.For) and parent.recursive:
            return "used"  # loop(...) may use the text
        if isinstance(parent, nodes.Template | nodes.If | nodes.For) and field in _BODIES:
            return "body"
        return "shown" if isinstance(parent, nodes.Output) else "used"
    if place == "shown" and (
        isinstance(parent, nodes.Concat | nodes.Add) or (isinstance(parent, nodes.CondExpr) and field != "test")
    ):
        return "shown"
    return "used"


if __name__ == "__main__":
    main()
