"""Control ids come from the chat template and from nothing in a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from factories.models.tokenizer_folders import (
    byte_fallback_tokenizer,
    demo_vocabulary,
    unigram_tokenizer,
    vocabulary_of,
    word_piece_tokenizer,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from penstock.common.errors import InvalidArgument
from penstock.tokenizer import control_tokens
from penstock.tokenizer.chat_template import ChatTemplates, Conversation, Rendered
from penstock.tokenizer.control_tokens import ControlMarks, copy_tokenizer
from penstock.tokenizer.template_process import Renderer
from penstock.tokenizer.tokenizer import EncodeOptions, TextTokenizer, Vocabulary
from tokenizers import AddedToken, Tokenizer

NONCE = "\U00100001\U00100002\U00100003\U00100004"
DEMO = demo_vocabulary()
# <s> and </s> lie inside this vocabulary, and roles are built into control tokens by ROLE_BUILT.
LLAMA = vocabulary_of(byte_fallback_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"})
OTHERS = {"unigram": vocabulary_of(unigram_tokenizer()), "word_piece": vocabulary_of(word_piece_tokenizer())}

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLE_BUILT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
ROLE_IN_TEXT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
# Does to content everything that could put a control token together again.
MANGLING = (
    "{% for m in messages %}<|im_start|>{{ m.content | lower }}{{ m.name }}{{ m.content.split() | join('') }}"
    "{{ (m.content ~ m.name) | replace('x', '') }}<|im_{{ m.content }}{{ m.content[1:] }}{{ m.content[::-1] }}"
    "{{ (m.tool_calls or []) | tojson }}{{ m.tool_call_id }}{{ m.reasoning_content }}{% endfor %}"
    "{{ tools | tojson }}{{ documents | tojson }}{{ extra }}{{ extra | upper }}"
    "{% for d in documents or [] %}{{ d.title }}{{ d.text }}{% endfor %}<|im_end|>"
)
TEMPLATES = {"chatml": CHATML, "role_built": ROLE_BUILT, "role_in_text": ROLE_IN_TEXT, "mangling": MANGLING}


class Chat:
    """Templates, renderer and tokenizer together, in this process."""

    def __init__(self, vocabulary: Vocabulary, *, protect: bool = True) -> None:
        special = vocabulary.bundle.special_tokens
        self.controls = vocabulary.marks.control_tokens
        self.templates = ChatTemplates(TEMPLATES, special, vocabulary.marks, protect=protect)
        self.renderer = Renderer(self.templates.renderer_settings)
        self.tokenizer = TextTokenizer(vocabulary)

    def render(self, conversation: Conversation) -> Rendered:
        request = self.templates.request(conversation)
        return self.templates.result(request, self.renderer.render(request))

    def ids(self, conversation: Conversation) -> list[int]:
        rendered = self.render(conversation)
        return self.tokenizer.encode_rendered(rendered.text, rendered.marked)

    def control_ids(self, conversation: Conversation) -> list[int]:
        return [index for index in self.ids(conversation) if index in self.controls]


CHATS = {"demo": Chat(DEMO), "llama": Chat(LLAMA)}
UNPROTECTED = {"demo": Chat(DEMO, protect=False), "llama": Chat(LLAMA, protect=False)}

PIECES = [
    "<|im_end|>", "<|im_start|>", "<|im_", "im_", "end|>", "<|", "|>", "<", ">", "|", "</s>", "<s>", "s>", "</", "user",
    "<|user|>", "<|end|>", "<|assistant|>", "end", "IM_END", "x", " ", "\n", "</think>", "<tool_call>", "<unk>",
    "[SEP]", "hello", "你好", "\ue000", "\U000f0000", "\U00100001", '"', "\\", "{{ bos_token }}", "<|endoftext|>",
]  # fmt: skip
hostile = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)


def conversation(template: str, text: str, role: str = "user") -> Conversation:
    """`text` in every field that a request can fill."""
    message: dict[str, Any] = {
        "role": role,
        "content": text,
        "name": text,
        "tool_call_id": text,
        "reasoning_content": text,
        "tool_calls": [{"id": text, "type": "function", "function": {"name": text, "arguments": {text: text}}}],
    }
    tool = {"type": "function", "function": {"name": text, "description": text, "parameters": {text: [text]}}}
    return Conversation(
        messages=[message, {"role": "assistant", "content": text, "name": text}],
        tools=[tool],
        documents=[{"title": text, "text": text}],
        variables={"extra": text},
        template_name=template,
    )


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("model", CHATS)
@given(text=hostile)
@example(text="<|im_end|>")
@example(text="end|>")
@example(text="</s><s>")
@settings(max_examples=20, deadline=None)
def test_no_text_in_any_field_makes_a_control_id(model: str, template: str, text: str) -> None:
    harmless = CHATS[model].control_ids(conversation(template, "hello"))
    assert CHATS[model].control_ids(conversation(template, text)) == harmless


@pytest.mark.parametrize("template", ["chatml", "role_built", "role_in_text"])
@given(role=hostile)
@settings(max_examples=20, deadline=None)
def test_no_role_makes_a_control_id_of_its_own(template: str, role: str) -> None:
    # A role that templates know may become its control token; any other is text.
    neutral = CHATS["llama"].control_ids(conversation(template, "hello", role="stranger"))
    found = CHATS["llama"].control_ids(conversation(template, "hello", role=role))
    known = {LLAMA.tokenizer.token_to_id("<|user|>")} if role == "user" else set()
    assert [index for index in found if index not in known] == [index for index in neutral if index not in known]


@pytest.mark.parametrize("template", TEMPLATES)
@given(text=hostile)
@settings(max_examples=20, deadline=None)
def test_the_text_is_what_transformers_renders(template: str, text: str) -> None:
    wanted = conversation(template, text)
    assert CHATS["llama"].render(wanted).text == UNPROTECTED["llama"].render(wanted).text


@pytest.mark.parametrize("model", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("text", ["hello world", "  two  spaces ", "你好\n", "don't <b>x</b>", "<think>a</think>"])
def test_other_text_gets_the_ids_of_the_whole_text(model: str, template: str, text: str) -> None:
    wanted = conversation(template, text)
    assert CHATS[model].ids(wanted) == UNPROTECTED[model].ids(wanted)


def test_built_tokens_are_control_ids_for_known_roles_only() -> None:
    chat, token = CHATS["llama"], LLAMA.tokenizer.token_to_id
    bos, end, assistant = token("<s>"), token("<|end|>"), token("<|assistant|>")
    for role, built in {"user": [token("<|user|>")], "end": [], "im_start": []}.items():
        wanted = Conversation([{"role": role, "content": "|>end<|"}], template_name="role_built")
        assert chat.control_ids(wanted) == [bos, *built, end, assistant]


def test_the_flag_lets_content_spell_control_tokens() -> None:
    wanted = Conversation([{"role": "user", "content": "<|im_end|>"}], template_name="chatml")
    assert len(UNPROTECTED["demo"].control_ids(wanted)) == len(CHATS["demo"].control_ids(wanted)) + 1


def test_special_token_variables_cannot_be_replaced_by_control_tokens() -> None:
    wanted = Conversation(
        [{"role": "user", "content": "x"}], template_name="role_built", variables={"bos_token": "</s>"}
    )
    assert LLAMA.tokenizer.token_to_id("</s>") not in CHATS["llama"].control_ids(wanted)


def test_a_template_that_would_yield_to_the_content_is_refused() -> None:
    source = "{{ messages[0].content.split('<|im_end|>') | last }}<|im_end|>"
    templates = ChatTemplates({"default": source}, {}, DEMO.marks, protect=True)
    request = templates.request(Conversation([{"role": "user", "content": "a<|im_end|>b"}]))
    with pytest.raises(InvalidArgument) as raised:
        templates.result(request, Renderer(templates.renderer_settings).render(request))
    assert raised.value.reason == "CONTROL_TOKENS_IN_CONTENT"


@pytest.mark.parametrize(
    ("vocabulary", "text"),
    [
        (DEMO, "<|im_start|>user<|im_end|>"),
        (LLAMA, "<s>hello</s><unk><|user|>"),
        (OTHERS["unigram"], "<s>hello</s>"),
        (OTHERS["word_piece"], "[CLS] hello [SEP]"),
    ],
    ids=["byte_level", "byte_fallback", "unigram", "word_piece"],
)
def test_encode_without_parsing_keeps_control_tokens_text(vocabulary: Vocabulary, text: str) -> None:
    tokenizer, controls = TextTokenizer(vocabulary), vocabulary.marks.control_tokens
    unknown = vocabulary.tokenizer.token_to_id("<unk>"), vocabulary.tokenizer.token_to_id("[UNK]")
    options = {"add_special_tokens": False}
    parsed, plain = (
        tokenizer.encode([text], EncodeOptions(parse_special_tokens=parse, **options))[0].ids for parse in (True, False)
    )
    assert set(parsed) & set(controls)
    assert not set(plain) & set(controls) - set(unknown)


def test_encode_without_parsing_still_adds_the_beginning() -> None:
    tokenizer = TextTokenizer(LLAMA)
    ids = tokenizer.encode(["</s>"], EncodeOptions(parse_special_tokens=False))[0].ids
    assert ids[0] == 1
    assert 2 not in ids


def test_marks_are_their_own_and_come_back_as_text() -> None:
    marks = ControlMarks({7: "<s>", 9: "</s>"}, NONCE)
    assert marks.unmark(f"a{marks.add('<s>')}b{marks.add('</s>')}") == "a<s>b</s>"
    assert ControlMarks({7: "<s>"}).nonce != ControlMarks({7: "<s>"}).nonce


def test_text_with_the_secret_mark_is_refused() -> None:
    vocabulary = vocabulary_of(byte_fallback_tokenizer())
    with pytest.raises(InvalidArgument):
        TextTokenizer(vocabulary).encode([vocabulary.marks.nonce], EncodeOptions(parse_special_tokens=False))


class _Counting:
    """A Tokenizer that notes how many tokens each call adds."""

    calls: ClassVar[list[int]] = []

    def __init__(self, model: Any) -> None:
        vars(self)["tokenizer"] = Tokenizer(model)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["tokenizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["tokenizer"], name, value)

    def add_tokens(self, tokens: list[AddedToken]) -> int:
        self.calls.append(len(tokens))
        return int(vars(self)["tokenizer"].add_tokens(tokens))

    add_special_tokens = add_tokens


def tokenizer_with_many_added_tokens() -> Tokenizer:
    """Make a tokenizer of Gemma's kind: ids of its own and entries of the vocabulary, special ones among plain ones."""
    tokenizer = byte_fallback_tokenizer()
    kinds = [("<unused%d>", False, False), ("[multimodal%d]", True, False), ("\n%d", False, True)]
    for number in range(40):
        text, special, normalized = kinds[number % 3]
        token = AddedToken(text % number, special=special, normalized=normalized, single_word=number % 5 == 0)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    tokenizer.add_tokens([AddedToken("hell", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("make", [tokenizer_with_many_added_tokens, unigram_tokenizer, word_piece_tokenizer])
def test_a_copy_is_the_tokenizer_itself_and_adds_all_tokens_in_one_call(
    make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call builds the matcher of all added tokens: one by one 6,384 of them took 49 seconds."""
    base = make()
    assert copy_tokenizer(base).to_str() == base.to_str()
    monkeypatch.setattr(control_tokens, "Tokenizer", _Counting)
    monkeypatch.setattr(_Counting, "calls", [])
    copy_tokenizer(base)
    assert _Counting.calls == [len(base.get_added_tokens_decoder())]


def test_an_added_token_that_cannot_have_its_id_again_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be given its id again"):
        copy_tokenizer(byte_fallback_tokenizer(), rename=lambda text: "hello" if text == "</s>" else text)
