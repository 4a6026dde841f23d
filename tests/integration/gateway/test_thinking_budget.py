"""Budgets of thinking over HTTP, in each route's own words."""

from __future__ import annotations

from typing import Any

import pytest
from factories.servers.served import Served

pytestmark = pytest.mark.xdist_group("gateway")
# Tokens that come in one piece with the end of the thought are counted by their share of its text.
_SHARED = 1
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
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] - 3 in (-_SHARED, 0, _SHARED)


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
