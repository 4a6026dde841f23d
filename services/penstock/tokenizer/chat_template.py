"""Choice of a chat template, and rendering that keeps track of the origin of every control token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, TemplateError

from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.tokenizer.control_tokens import TRUSTED_ROLES, ControlMarks

# Variables that the request sets by its own fields.
_RESERVED = {
    "messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
}  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """Input of a rendering, as plain JSON values."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    template_name: str = ""


@dataclass(frozen=True)
class Rendered:
    """Result of a rendering: `text` as in transformers; `marked` has the template's control tokens as marks."""

    text: str
    marked: str | None


class ChatTemplates:
    """Templates of one tokenizer."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], marks: ControlMarks, *, protect: bool
    ) -> None:
        """Make it. With `protect`, control tokens come only from the template."""
        self._templates = dict(templates)
        self._marks = marks
        self._protect = protect
        self._joints = _Joints(marks)
        self._settings = {
            "templates": {name: [source, self._mark_source(source)] for name, source in templates.items()},
            "special_tokens": dict(special_tokens),
            "marked_special_tokens": {name: marks.mark_value(value) for name, value in special_tokens.items()},
        }

    @property
    def names(self) -> list[str]:
        return sorted(self._templates)

    @property
    def default(self) -> str:
        """Text of the default template; empty when there is none."""
        return self._templates.get("default", "")

    @property
    def for_tools(self) -> str:
        """Text of the template for conversations with tools; empty if it is the default one."""
        return self._templates.get("tool_use", "")

    @property
    def renderer_settings(self) -> dict[str, Any]:
        """Return the settings for template_process.Renderer."""
        return self._settings

    def request(self, conversation: Conversation) -> dict[str, Any]:
        """Make the request for template_process. Raises InvalidArgument or FailedPrecondition (no template)."""
        if not conversation.messages:
            raise InvalidArgument("messages", "at least one message is needed")
        if conversation.continue_final_message and conversation.add_generation_prompt:
            raise InvalidArgument("continue_final_message", "cannot be combined with add_generation_prompt")
        for name in conversation.variables:
            if name in _RESERVED:
                raise InvalidArgument("chat_template_kwargs", "must not set a variable that has its own field")
        return {
            "template": self._select(conversation.template_name, bool(conversation.tools)),
            "mark": self._protect,
            "messages": conversation.messages,
            "tools": conversation.tools,
            "documents": conversation.documents,
            "add_generation_prompt": conversation.add_generation_prompt,
            "continue_final_message": conversation.continue_final_message,
            "variables": conversation.variables,
        }

    def result(self, request: Mapping[str, Any], answer: Mapping[str, Any]) -> Rendered:
        """Turn the answer into a Rendered.

        Raises InvalidArgument when the template refused, or when the content would change its control flow.
        """
        if "failure" in answer:
            raise InvalidArgument("messages", self._refusal(request, answer), reason="TEMPLATE_REFUSED")
        text, marked = answer["text"], answer["marked"]
        if marked is None:
            return Rendered(text, None)
        if text is None:
            return Rendered(self._marks.unmark(marked), self._joints.join(marked))
        if self._marks.unmark(marked) != text:
            raise InvalidArgument(
                "messages",
                "control tokens in the content change what the chat template does; remove them, or start the tokenizer"
                " with --allow-control-tokens-in-content",
                reason="CONTROL_TOKENS_IN_CONTENT",
            )
        return Rendered(text, self._joints.join(marked))

    def _select(self, name: str, has_tools: bool) -> str:
        """Select a template like transformers."""
        if not self._templates:
            raise FailedPrecondition("this model has no chat template", reason="NO_CHAT_TEMPLATE")
        if name:
            if name not in self._templates:
                raise InvalidArgument("template_name", f"must be one of: {', '.join(self.names)}")
            return name
        if has_tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" not in self._templates:
            raise InvalidArgument("template_name", f"is needed, one of: {', '.join(self.names)}")
        return "default"

    def _refusal(self, request: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
        """Text of a refusal: the template's own if it is one of its literals, since any other may quote messages."""
        message = answer.get("message", "")
        if answer.get("kind") == "TemplateError" and message and message in self._templates[request["template"]]:
            return f"the chat template refused them: {message}"
        return f"the chat template cannot render them ({answer.get('kind')})"

    def _mark_source(self, source: str) -> str:
        """Return `source` with marks for its control tokens, and for the parts that build them.

        Only texts and string literals may change: a token stays as it is if marking it would change the program.
        """
        tokens = [token for token in self._marks.control_tokens.values() if token in source]
        marked = _replace(source, tokens, self._marks)
        if not self._same_program(source, marked):
            tokens = [token for token in tokens if self._same_program(source, _replace(source, [token], self._marks))]
            marked = _replace(source, tokens, self._marks)
        with_joints = self._joints.mark(marked)
        return with_joints if self._same_program(source, with_joints) else marked

    def _same_program(self, source: str, marked: str) -> bool:
        try:
            original = _lex(source, str)
        except TemplateError:
            return True  # it will not compile, and the pool reports that
        try:
            return _lex(marked, self._marks.unmark) == original
        except TemplateError:
            return False


class _Joints:
    """Marking of control tokens that a template builds around a role: '<|' + message.role + '|>'.

    Both ends are marked, and a trusted role between two marked ends makes a control token.
    """

    def __init__(self, marks: ControlMarks) -> None:
        self._marks = marks
        self._built: dict[tuple[str, str, str], str] = {}
        for token in marks.control_tokens.values():
            for role in TRUSTED_ROLES:
                head, found, tail = token.partition(role)
                if found and head and tail:
                    self._built[head, role, tail] = token
        self._pattern: re.Pattern[str] | None = None

    def mark(self, source: str) -> str:
        """Mark ends of literals next to the start or end of an expression."""
        heads = {head for head, _, tail in self._built if self._has_joint(source, head, tail)}
        tails = {tail for head, _, tail in self._built if head in heads}
        if not heads:
            return source
        for head in sorted(heads, key=len, reverse=True):
            source = re.sub(re.escape(head) + r"(?=['\"]|\{\{)", lambda match: self._marks.add(match[0]), source)
        for tail in sorted(tails, key=len, reverse=True):
            source = re.sub(r"(?<=['\"])" + re.escape(tail), lambda match: self._marks.add(match[0]), source)
            source = re.sub(r"(?<=\}\})" + re.escape(tail), lambda match: self._marks.add(match[0]), source)
        self._pattern = self._build_pattern()
        return source

    def join(self, marked: str) -> str:
        """Return `marked` with built control tokens as marks and every other end as plain text."""
        if self._pattern is None:
            return marked
        return self._pattern.sub(self._replacement, marked)

    def _replacement(self, match: re.Match[str]) -> str:
        if match["role"] is None:
            return self._marks.unmark(match[0])
        head, tail = self._marks.unmark(match["head"]), self._marks.unmark(match["tail"])
        token = self._built.get((head, match["role"], tail))
        return self._marks.add(token) if token is not None else head + match["role"] + tail

    def _build_pattern(self) -> re.Pattern[str]:
        heads = "|".join(re.escape(self._marks.add(head)) for head in sorted({key[0] for key in self._built}))
        tails = "|".join(re.escape(self._marks.add(tail)) for tail in sorted({key[2] for key in self._built}))
        roles = "|".join(TRUSTED_ROLES)
        return re.compile(f"(?P<head>{heads})(?P<role>{roles})(?P<tail>{tails})|{heads}|{tails}")

    @staticmethod
    def _has_joint(source: str, head: str, tail: str) -> bool:
        begins = re.search(re.escape(head) + r"(['\"]|\{\{)", source)
        ends = re.search(r"(['\"]|\}\})" + re.escape(tail), source)
        return begins is not None and ends is not None


def _replace(source: str, tokens: Sequence[str], marks: ControlMarks) -> str:
    if not tokens:
        return source
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return re.sub(pattern, lambda match: marks.add(match[0]), source)


def _lex(source: str, unmark: Any) -> list[tuple[str, str]]:
    """Split a template into tokens; texts and string literals pass through `unmark`, all other tokens stay."""
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    return [
        (kind, unmark(value) if kind in ("data", "string", "comment") else value)
        for _, kind, value in environment.lexer.tokeniter(source, None)
    ]
