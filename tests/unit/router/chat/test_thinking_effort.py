"""Efforts as budgets of thinking, and what closes a thought in the templates of models."""

from __future__ import annotations

import pytest
from penstock.router.chat.formats import choose_format
from penstock.router.chat.prompt_thought import closing_text, thought_before, thought_end
from penstock.router.chat.thinking_effort import budget_of, switch_off, wished_budget
from penstock.router.config import RouterConfig
from penstock.v1 import config_pb2, tokenizer_pb2

QWEN = r"{{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content }}"
SEED = "{{ '<seed:think>' + reasoning + '</seed:think>' }}"
GPT_OSS = "Reasoning: {{ reasoning_effort }} <|channel|>analysis<|message|>"
EFFORTS = RouterConfig(
    backend=("a:1",), tokenizer=("b:2",), effort_low_tokens=100, effort_medium_tokens=0
).effort_budgets


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN, "\n</think>"),
        (QWEN.replace(r"\n", "\n"), "\n</think>"),
        (SEED, "</seed:think>"),
        (GPT_OSS, "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_a_thought_is_closed_as_its_template_closes_it(template: str, text: str) -> None:
    assert closing_text(choose_format(template)) == text


@pytest.mark.parametrize(
    ("effort", "tokens"),
    [("none", 0), ("minimal", 512), ("low", 100), ("medium", None), ("high", None), ("utmost", None), ("", None)],
)
def test_an_effort_is_a_budget_where_the_template_has_no_switch(effort: str, tokens: int | None) -> None:
    assert wished_budget(choose_format(QWEN), effort, EFFORTS) == tokens
    assert wished_budget(choose_format(GPT_OSS), effort, EFFORTS) is None


def test_a_requests_own_budget_takes_precedence() -> None:
    assert budget_of(config_pb2.GenerationConfig(thinking_budget_tokens=0), 100) == 0
    assert budget_of(config_pb2.GenerationConfig(), 100) == 100
    assert budget_of(config_pb2.GenerationConfig(), None) is None


def test_the_callers_switch_of_the_template_stays() -> None:
    ask = tokenizer_pb2.ApplyChatTemplateRequest()
    ask.chat_template_kwargs["enable_thinking"] = True
    switch_off(ask)
    assert dict(ask.chat_template_kwargs) == {"enable_thinking": True, "thinking": False}


def test_the_answers_channel_of_gpt_oss_is_no_thought() -> None:
    chat = choose_format(GPT_OSS)
    thought = thought_before(chat, "<|start|>assistant", goes_on=False)
    assert thought is not None
    end = thought_end(chat, thought, [1, 2], None)
    assert end.thought.opens == "<|channel|>analysis<|message|>"
    assert list(end.thought.closes) == ["<|channel|>final", "<|channel|>commentary"]
    assert not end.HasField("wished_tokens")
