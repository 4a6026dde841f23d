"""A chat's budget of thinking: its own, or that of its `reasoning_effort` where the template has no switch for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.router.chat.formats import ChatFormat
from penstock.v1 import config_pb2, tokenizer_pb2

# The variable that names an effort, in templates that know one.
EFFORT: Final = "reasoning_effort"
# Variables that switch thoughts off: that of Qwen's and GLM's templates, and that of DeepSeek's.
_SWITCHES: Final = ("enable_thinking", "thinking")


def wished_budget(chat: ChatFormat, effort: str, tokens_of: Mapping[str, int | None]) -> int | None:
    """Return the tokens that a request's effort stands for; None: no bound, or the template reads the effort itself.

    `effort`: the value of that variable, empty without one. `tokens_of`: efforts with their tokens.
    """
    return None if chat.takes_effort else tokens_of.get(effort)


def budget_of(config: config_pb2.GenerationConfig, wished: int | None) -> int | None:
    """Return the budget of a request: its own one, else the wished one; None: there is none."""
    return config.thinking_budget_tokens if config.HasField("thinking_budget_tokens") else wished


def switch_off(ask: tokenizer_pb2.ApplyChatTemplateRequest) -> None:
    """Have the template leave out the thought, unless the caller has set its switch."""
    for name in _SWITCHES:
        if name not in ask.chat_template_kwargs:
            ask.chat_template_kwargs[name] = False
