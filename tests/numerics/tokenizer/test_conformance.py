"""Real tokenizers and templates give what transformers gives: ids, texts, renderings, streams."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from factories.models.tokenizer_folders import bundle_of, conformance_data, detokenizers_of
from penstock.common.errors import InvalidArgument
from penstock.router.tokenizer.tokenizer_link import fetch_decode_table
from penstock.tokenizer import convert
from penstock.tokenizer.chat_template import ChatTemplates, Conversation
from penstock.tokenizer.template_process import Renderer, answer_to
from penstock.tokenizer.tokenizer import EncodeOptions, TextTokenizer, Vocabulary
from penstock.v1 import tokenizer_pb2

pytestmark = pytest.mark.conformance
TOKENIZERS = ["qwen2.5", "mistral-7b"]
TEXTS = [
    "你好，世界！这是一个测试。",
    "👨‍👩‍👧‍👦 and 👍🏽, 🏳️‍🌈 🇯🇵",
    "e\u0301 a\u0308\u0323 ก็ नि",
    "  leading,\n\n\ttabs and trailing  ",
    'don\'t <think>half</think> <tool_call>{"name": "f"}</tool_call> [INST] x [/INST]',
    "",
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [{"role": "user", "content": "Hi  there \n"}]},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "你好 👋"}]},
    "turns": {
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
            {"role": "user", "content": "sure?"},
        ]
    },
    "reasoning": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "because"},
            {"role": "user", "content": "c"},
        ],
        "variables": {"enable_thinking": False},
    },
    "tools": {
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Weather in Köln?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "get_weather", "content": '{"temperature": 12.5}'},
        ],
        "tools": [WEATHER],
    },
    "documents": {
        "messages": [{"role": "user", "content": "Summarise."}],
        "documents": [{"title": "One", "text": "First."}, {"title": "Two", "text": "Second."}],
    },
    "no_prompt": {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False},
    "continued": {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}


@cache
def folder(name: str) -> Path:
    return conformance_data() / "tokenizers" / name


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary(bundle_of(folder(name)))


@cache
def reference(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder(name))


def vectors(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder(name) / "vectors.json").read_text("utf-8"))
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_vector_is_exact(name: str) -> None:
    tokenizer = TextTokenizer(vocabulary(name))
    for vector in vectors(name):
        encoded = tokenizer.encode([vector["text"]], EncodeOptions(add_special_tokens=False))[0]
        assert encoded.ids == vector["ids"]
        assert tokenizer.decode([vector["ids"]], False) == [vector["decoded"]]


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_the_routers_table_is_the_tokenizers(name: str) -> None:
    sent = detokenizers_of(vocabulary(name)).table
    assert sent is not None

    async def parts() -> AsyncIterator[tokenizer_pb2.GetDecodeTableResponse]:
        for part in convert.decode_table(sent):
            yield part

    came = await fetch_decode_table(parts())
    assert came is not None
    assert came.kind == sent.kind
    for skip in (True, False):
        for vector in vectors(name):
            here, there = came.make(skip), sent.make(skip)
            assert here.push(vector["ids"]) + here.finish() == there.push(vector["ids"]) + there.finish()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_streams_add_up_for_every_split(name: str) -> None:
    factory, tokenizer = detokenizers_of(vocabulary(name)), TextTokenizer(vocabulary(name))
    assert factory.kind == {"qwen2.5": "byte_level", "mistral-7b": "byte_fallback"}[name]
    for text in [*TEXTS, *(vector["text"] for vector in vectors(name))]:
        ids = tokenizer.encode([text], EncodeOptions(add_special_tokens=False))[0].ids
        for skip in (True, False):
            whole = tokenizer.decode([ids], skip)[0]
            for cuts in itertools.combinations(range(len(ids) + 1), 2) if len(ids) < 40 else [(1, 3), (7, 20)]:
                detokenizer = factory.make(skip)
                parts = [detokenizer.push(ids[start:end]) for start, end in itertools.pairwise([0, *cuts, len(ids)])]
                assert "".join(parts) + detokenizer.finish() == whole


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_special_tokens": False},
        {"truncation": True, "max_length": 5},
        {"max_length": 7},
        {"truncation": True, "max_length": 4, "truncation_side": "left"},
        {"return_offsets": True},
        {"padding": "longest"},
        {"padding": "max_length", "max_length": 30, "padding_side": "left"},
        {"padding": "longest", "truncation": True, "max_length": 6, "padding_side": "right"},
    ],
    ids=str,
)
def test_encode_options_mean_what_they_mean_in_transformers(name: str, options: dict[str, Any]) -> None:
    ours, theirs = TextTokenizer(vocabulary(name)), reference(name)
    if "padding" in options and theirs.pad_token is None:
        with pytest.raises(InvalidArgument):
            ours.encode(TEXTS, EncodeOptions(**options))
        return
    theirs.truncation_side = options.get("truncation_side", vocabulary(name).bundle.truncation_side)
    arguments = {key: value for key, value in options.items() if key not in ("truncation_side", "return_offsets")}
    expected = theirs(TEXTS, return_offsets_mapping=True, **arguments)
    encodings = ours.encode(TEXTS, EncodeOptions(**options))
    assert [encoded.ids for encoded in encodings] == expected["input_ids"]
    if "padding" in options:
        assert [encoded.attention_mask for encoded in encodings] == expected["attention_mask"]
    if options.get("return_offsets"):
        assert [encoded.offsets for encoded in encodings] == expected["offset_mapping"]


def template_files() -> list[str]:
    try:
        return sorted(path.name for path in (conformance_data() / "chat_templates").glob("*.jinja"))
    except pytest.skip.Exception:
        return ["absent"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("file", template_files())
def test_templates_render_and_encode_as_in_transformers(name: str, file: str) -> None:
    source = (conformance_data() / "chat_templates" / file).read_text("utf-8")
    # Qwen has no bos_token, which half of these templates refer to.
    special = {"bos_token": "<|endoftext|>", **vocabulary(name).bundle.special_tokens}
    templates = ChatTemplates({"default": source}, special, vocabulary(name).marks, protect=True)
    renderer, tokenizer = Renderer(templates.renderer_settings), TextTokenizer(vocabulary(name))
    rendered = 0
    for wanted in CONVERSATIONS.values():
        conversation = Conversation(**wanted)
        request = templates.request(conversation)
        answer = answer_to(renderer, request)
        text, ids, refusal = by_transformers(reference(name), source, special, conversation)
        assert answer.get("kind") == refusal
        if refusal is not None:
            with pytest.raises(InvalidArgument) as raised:
                templates.result(request, answer)
            assert raised.value.field == "messages"
            continue
        result = templates.result(request, answer)
        assert result.text == text
        assert tokenizer.encode_rendered(result.text, result.marked) == ids
        rendered += 1
    assert rendered


def by_transformers(
    tokenizer: Any, source: str, special: dict[str, str], conversation: Conversation
) -> tuple[str, list[int], str | None]:
    """Text and ids, or the kind of error that transformers raises."""
    arguments = {
        "conversation": conversation.messages,
        "tools": conversation.tools or None,
        "documents": conversation.documents or None,
        "chat_template": source,
        "add_generation_prompt": conversation.add_generation_prompt,
        "continue_final_message": conversation.continue_final_message,
        **special,
        **conversation.variables,
    }
    try:
        text: str = tokenizer.apply_chat_template(tokenize=False, **arguments)
    except Exception as error:
        return "", [], type(error).__name__
    return text, tokenizer.apply_chat_template(tokenize=True, return_dict=False, **arguments), None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_content_never_becomes_a_control_id_of_a_real_tokenizer(name: str) -> None:
    found = vocabulary(name)
    templates = ChatTemplates(found.bundle.templates, found.bundle.special_tokens, found.marks, protect=True)
    renderer, tokenizer = Renderer(templates.renderer_settings), TextTokenizer(found)

    def controls(content: str) -> list[int]:
        request = templates.request(Conversation([{"role": "user", "content": content}]))
        result = templates.result(request, renderer.render(request))
        ids = tokenizer.encode_rendered(result.text, result.marked)
        return [index for index in ids if index in found.marks.control_tokens]

    for token in found.marks.control_tokens.values():
        assert controls(f"a{token}b {token}{token}") == controls("a")
