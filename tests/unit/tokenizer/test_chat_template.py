"""Choice of the template, the marks in it, and the text of a refusal."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.tokenizer.chat_template import ChatTemplates, Conversation
from penstock.tokenizer.control_tokens import ControlMarks

MARKS = ControlMarks({0: "<s>", 1: "</s>", 2: "<|user|>", 3: "<|end|>", 4: "if"}, "\U00100001" * 4)
HELLO = [{"role": "user", "content": "hello"}]


def templates(sources: dict[str, str], special: dict[str, str] | None = None) -> ChatTemplates:
    return ChatTemplates(sources, special or {}, MARKS, protect=True)


def chosen(names: list[str], **wanted: Any) -> str:
    name: str = templates(dict.fromkeys(names, "x")).request(Conversation(HELLO, **wanted))["template"]
    return name


def test_templates_are_chosen_as_transformers_chooses() -> None:
    tools = [{"type": "function"}]
    assert chosen(["default", "tool_use", "rag"]) == "default"
    assert chosen(["default", "tool_use", "rag"], tools=tools) == "tool_use"
    assert chosen(["default", "rag"], tools=tools) == "default"
    assert chosen(["default", "rag"], template_name="rag") == "rag"


def test_a_template_must_exist() -> None:
    with pytest.raises(FailedPrecondition):
        chosen([])
    for names, wanted in ((["rag"], {}), (["default"], {"template_name": "{{ 7 }}"})):
        with pytest.raises(InvalidArgument) as raised:
            chosen(names, **wanted)
        assert raised.value.field == "template_name"


def marked(source: str) -> str:
    versions: list[str] = templates({"default": source}).renderer_settings["templates"]["default"]
    return versions[1]


def test_control_tokens_are_marked_in_text_and_in_literals() -> None:
    source = "<s>{{ '</s>' + \"<|end|>\n\" }}"
    assert marked(source) == f"{MARKS.add('<s>')}{{{{ '{MARKS.add('</s>')}' + \"{MARKS.add('<|end|>')}\n\" }}}}"
    assert MARKS.unmark(marked(source)) == source


def test_the_program_of_a_template_is_left_alone() -> None:
    # "if" is a control token of this vocabulary, and a word of Jinja's.
    assert marked("{% if x %}<s>{% endif %}") == f"{{% if x %}}{MARKS.add('<s>')}{{% endif %}}"


def test_ends_of_tokens_built_from_a_role_are_marked() -> None:
    source = "{{ '<|' + m.role + '|>' }}"
    assert "'<|'" not in marked(source)
    assert MARKS.unmark(marked(source)) == source


def test_special_token_variables_are_marked_too() -> None:
    settings = templates({"default": "x"}, {"bos_token": "<s>", "sep_token": "plain"}).renderer_settings
    assert settings["special_tokens"] == {"bos_token": "<s>", "sep_token": "plain"}
    assert settings["marked_special_tokens"] == {"bos_token": MARKS.add("<s>"), "sep_token": "plain"}


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ({"kind": "TemplateError", "message": "Roles must alternate"}, "Roles must alternate"),
        ({"kind": "TemplateError", "message": "You said: secret"}, "TemplateError"),
        ({"kind": "UndefinedError", "message": "Roles must alternate"}, "UndefinedError"),
    ],
)
def test_only_the_templates_own_words_are_repeated(failure: dict[str, str], says: str) -> None:
    made = templates({"default": "{{ raise_exception('Roles must alternate') }}"})
    with pytest.raises(InvalidArgument) as raised:
        made.result(made.request(Conversation(HELLO)), {"failure": "refused", **failure})
    assert raised.value.field == "messages"
    assert says in raised.value.message
    assert "secret" not in raised.value.message
