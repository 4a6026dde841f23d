"""Child process: renders chat templates with transformers' own renderer, within CPU and memory limits.

A template is a program from the model's folder. transformers runs it in Jinja's sandbox, which bounds what it can reach
but not how long it runs or how much it builds; the limits here do, and the parent kills this process when time is over.
"""

from __future__ import annotations

import sys
from typing import Any

from penstock.common import child_io
from penstock.common.child_limits import limit_cpu, limit_memory


class Renderer:
    """The templates of one tokenizer, each as it is and with its control tokens marked."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """`settings`: templates {name: [plain, marked]}, special_tokens and marked_special_tokens."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render_jinja_template: Any = render_jinja_template
        self._templates: dict[str, list[str]] = settings["templates"]
        self._special_tokens: dict[str, str] = settings["special_tokens"]
        self._marked_special_tokens: dict[str, str] = settings["marked_special_tokens"]
        # Template -> its marked rendering tells the other one, too.
        self._tells_both: dict[str, bool] = {}

    def check(self) -> dict[str, str]:
        """What is wrong with which template: {name: message}."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        wrong = {}
        for name, versions in self._templates.items():
            try:
                for source in versions:
                    _compile_jinja_template(source)
                self._does_tell_both(name)
            except TemplateError as error:
                wrong[name] = str(error).partition("\n")[0]
            except MemoryError:  # Jinja computes constant expressions while it compiles
                wrong[name] = "it takes more memory than allowed"
            except RecursionError:
                wrong[name] = "it is nested too deeply"
        return wrong

    def render(self, request: dict[str, Any]) -> dict[str, Any]:
        """{text, marked}: the same rendering, without and with marks; marked is None when not asked for.

        Text is None where it can be nothing but the marked one without its marks.
        """
        name = request["template"]
        plain, marked = self._templates[name]
        if not request["mark"]:
            return {"text": self._render(plain, self._special_tokens, request), "marked": None}
        with_marks = self._render(marked, self._marked_special_tokens, request)
        # What is cut behind a message that is continued may be different.
        if self._does_tell_both(name) and not request["continue_final_message"]:
            return {"text": None, "marked": with_marks}
        return {"text": self._render(plain, self._special_tokens, request), "marked": with_marks}

    def _does_tell_both(self, name: str) -> bool:
        found = self._tells_both.get(name)
        if found is None:
            from transformers.utils.chat_template_utils import _compile_jinja_template

            from penstock.tokenizer.template_marks import are_only_shown

            plain, marked = (
                _compile_jinja_template(source).environment.parse(source) for source in self._templates[name]
            )
            tokens, marks = self._special_tokens, self._marked_special_tokens
            variables = {variable for variable in tokens if tokens[variable] != marks[variable]}
            found = self._tells_both[name] = are_only_shown(plain, marked, variables)
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
    """The answer to one request; failures are answers too."""
    try:
        return renderer.render(request)
    except MemoryError:
        return {"failure": "memory"}
    except Exception as error:  # whatever a template raises is about the template and the messages, not about us
        return {"failure": "refused", "kind": type(error).__name__, "message": str(error)}


def main() -> None:
    answers = child_io.claim_stdout()
    child_io.forbid_torch()
    settings = child_io.read(sys.stdin.buffer)
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


if __name__ == "__main__":
    main()
