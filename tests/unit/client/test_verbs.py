"""The verbs of both clients and of Generator: generate() answers, stream() streams, whatever the prompt is."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import penstock
import penstock_client
import pytest
from factories.wire.conversation import user
from penstock import Generator
from penstock.v1 import generation_pb2, text_pb2, tokenizer_pb2
from penstock_client import AsyncClient, Client, Completion
from penstock_client._options import Prompt, text_request

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("kind", [AsyncClient, Client, Generator])
def test_the_verbs_are_the_same(kind: Any) -> None:
    assert {"generate", "stream", "generate_many"} <= set(dir(kind))
    assert "chat" not in dir(kind)


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: Any) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert methods(AsyncClient) == methods(Client)


def test_the_old_verb_names_the_new_ones() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(AttributeError, match=r"chat is now generate\(.*stream\(\)"):
            client.chat("Hello")
        with pytest.raises(AttributeError, match="no attribute 'chart'"):
            client.chart("Hello")


@pytest.mark.parametrize(
    ("package", "name", "home"),
    [
        *((penstock, name, "penstock.compat.mindie") for name in ("LoraStatus", "ModelInput", "SamplingMetadata")),
        *((penstock_client, name, "penstock_client.compat.sail") for name in ("BmrtFlag", "Dtype", "EngineLLM")),
        (penstock_client, "ServerTensor", "penstock_client.compat.sail"),
    ],
)
def test_a_name_that_has_moved_is_there_and_tells_its_place(package: ModuleType, name: str, home: str) -> None:
    """hasattr() raised ImportError."""
    with pytest.warns(DeprecationWarning, match=rf"{name} is in {re.escape(home)}$"):
        assert hasattr(package, name)
    with pytest.warns(DeprecationWarning, match=name):
        assert getattr(package, name) is getattr(importlib.import_module(home), name)
    with pytest.warns(DeprecationWarning, match=name):
        exec(f"from {package.__name__} import {name}")
    assert not hasattr(package, "Unknown")


def answer() -> Completion:
    return Completion((), generation_pb2.Started(), generation_pb2.Finished())


@pytest.mark.parametrize("use", [lambda: [*answer()], lambda: answer().result(), lambda: answer().close()])
def test_an_answer_that_is_used_as_the_stream_it_once_was_names_the_verb(use: Callable[[], object]) -> None:
    with pytest.raises((AttributeError, TypeError), match=r"stream\(\)"):
        use()
    assert not hasattr(answer(), "unknown")


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("Hello", text_pb2.GenerateTextRequest),
        ("", text_pb2.GenerateTextRequest),
        ([1, 2], text_pb2.GenerateTextRequest),
        ([], text_pb2.GenerateTextRequest),
        (user("Hello"), text_pb2.ChatRequest),
        ([tokenizer_pb2.Message(role="user", content="Hello")], text_pb2.ChatRequest),
    ],
)
def test_a_prompts_kind_chooses_the_call(prompt: Prompt, kind: type[object]) -> None:
    assert isinstance(text_request(prompt, {"max_new_tokens": 3}), kind)


@pytest.mark.parametrize("prompt", [{"role": "user", "content": "Hello"}, b"Hello", None, 3, ["Hello"], [["a"]]])
def test_what_is_no_prompt_is_told_what_is_one(prompt: Any) -> None:
    with pytest.raises(TypeError, match=r"^prompt: (must be a text|one text)"):
        text_request(prompt, {})


def test_tools_and_their_choice_go_with_a_conversation() -> None:
    asked = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_new_tokens": 3}
    request = text_request(user("Hello"), asked)
    assert isinstance(request, text_pb2.ChatRequest)
    assert [tool.name for tool in request.tools] == ["f"]
    assert (request.tool_choice.required, request.parallel_tool_calls) == (True, False)
    assert request.config.max_new_tokens == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("tools", [TOOL]), ("tool_choice", "auto"), ("documents", [{"text": "x"}]), ("chat_template_kwargs", {"a": 1})],
)
def test_what_goes_with_a_conversation_is_refused_beside_a_text(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"option '{name}': is for a conversation only"):
        text_request("Hello", {name: value})


def test_empty_lists_of_it_ask_for_nothing() -> None:
    request = text_request("Hello", {"tools": [], "documents": (), "chat_template_kwargs": None})
    assert request == text_pb2.GenerateTextRequest(text="Hello")
