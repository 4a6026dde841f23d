"""Budgets of thinking over HTTP, in each route's own words."""

from __future__ import annotations

from typing import Any

import pytest
from factories.servers.served import Served

pytestmark = pytest.mark.xdist_group("gateway")
# Tokens that come in one piece with the end of the thought are counted by their share of its text. On a busy machine
# all of a short thought may.
_SHARED = 2
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
CHAT: dict[str, Any] = {
    "model": "",
    "messages": QUESTION,
    "chat_template_kwargs": {"enable_thinking": True},
    "max_tokens": 200,
    "temperature": 0,
}


def thought_of(served: Served, **fields: Any) -> tuple[str, int]:
    """Return the reasoning of a chat, and its tokens."""
    answer = served.json("/v1/chat/completions", {**CHAT, **fields})
    reasoning = answer["choices"][0]["message"].get("reasoning_content", "")
    return reasoning, answer["usage"]["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("name", ["thinking_budget_tokens", "thinking_token_budget", "reasoning_budget_tokens"])
def test_a_chats_budget_has_the_names_of_other_servers(served: Served, name: str) -> None:
    free, length = thought_of(served)
    assert length > 3
    cut, tokens = thought_of(served, **{name: 3})
    assert abs(tokens - 3) <= _SHARED
    assert free.startswith(cut)
    assert cut != free


def test_a_stream_ends_its_thought_at_the_budget(served: Served) -> None:
    whole, _ = thought_of(served, thinking_budget_tokens=3)
    body = {**CHAT, "thinking_budget_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    chunks = served.events("/v1/chat/completions", body)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(one.get("reasoning_content") or "" for one in deltas) == whole
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] - 3 in range(-_SHARED, _SHARED + 1)


def test_anthropics_budget_is_kept(served: Served) -> None:
    body = {"model": "", "max_tokens": 200, "messages": QUESTION, "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 3}
    answer = served.json("/v1/messages", {**body, "thinking": thinking})
    (thought,) = [one["thinking"] for one in answer["content"] if one["type"] == "thinking"]
    assert thought == thought_of(served, thinking_budget_tokens=3)[0]
    status, _, refused = served.ask("/v1/messages", {**body, "thinking": {"type": "enabled", "budget_tokens": "many"}})
    assert status == 400
    assert "thinking.budget_tokens" in str(refused)


def test_the_effort_none_closes_the_thought_at_once(served: Served) -> None:
    assert thought_of(served, reasoning_effort="none") == ("", 0)
    assert thought_of(served, reasoning_effort="low")[0] == thought_of(served)[0], "a budget larger than the thought"


def test_every_answer_of_several_has_the_budget_to_itself(served: Served) -> None:
    """Drawn, so that the answers differ: each thought is cut at its own third token."""
    drawn = {"temperature": 1.5, "seed": 11, "n": 3}
    answer = served.json("/v1/chat/completions", {**CHAT, **drawn, "thinking_budget_tokens": 3})
    thoughts = [choice["message"]["reasoning_content"] for choice in answer["choices"]]
    free = served.json("/v1/chat/completions", {**CHAT, **drawn})
    longer = [choice["message"]["reasoning_content"] for choice in free["choices"]]
    assert len(thoughts) == 3
    assert all(whole.startswith(cut) and whole != cut for cut, whole in zip(thoughts, longer, strict=True))
    total = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert abs(total - 9) <= 3 * _SHARED
    body = {**CHAT, **drawn, "thinking_budget_tokens": 3, "stream": True}
    streamed = dict.fromkeys(range(3), "")
    for chunk in served.events("/v1/chat/completions", body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("reasoning_content") or ""
    assert list(streamed.values()) == thoughts


def test_an_effort_of_a_response_is_that_of_a_chat(served: Served) -> None:
    body = {"model": "", "input": "What is 2 + 3?", "temperature": 0, "max_output_tokens": 200}
    body["chat_template_kwargs"] = {"enable_thinking": True}

    def told(effort: str) -> tuple[str, int]:
        answer = served.json("/v1/responses", {**body, "reasoning": {"effort": effort}})
        assert answer["reasoning"]["effort"] == effort
        parts = [part["text"] for item in answer["output"] if item["type"] == "reasoning" for part in item["content"]]
        return "".join(parts), answer["usage"]["output_tokens_details"]["reasoning_tokens"]

    assert told("none") == ("", 0)
    (text, tokens), (thought, length) = told("low"), thought_of(served)
    assert text == thought
    assert abs(tokens - length) <= _SHARED
