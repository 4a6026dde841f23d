"""Thought before a chat's answer, as a prompt and its format announce it."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.router.chat.chat_output import prompt_opens_reasoning
from penstock.router.chat.formats import ChatFormat
from penstock.text.thoughts import Thought
from penstock.v1 import common_pb2, generation_pb2

# Messages of gpt-oss: any of these may come before those with the answer's text.
_HARMONY_OPENS = "<|channel|>"
_HARMONY_CLOSES = ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>")
_HARMONY_THOUGHT = "<|channel|>analysis<|message|>"
_HARMONY_OTHERS = ("<|channel|>final", "<|channel|>commentary")
_HARMONY_END = "<|end|><|start|>assistant<|channel|>final<|message|>"


def thought_before(chat: ChatFormat, prompt: str, *, goes_on: bool) -> common_pb2.Thought | None:
    """Return the thought that comes, or may come, before the answer to a rendered prompt; None: the answer begins.

    `goes_on`: the prompt ends with the start of the answer.
    """
    if chat.tools.is_harmony:
        return None if goes_on else common_pb2.Thought(opens=_HARMONY_OPENS, closes=_HARMONY_CLOSES)
    thought = chat.reasoning
    if thought is None:
        return None
    is_open = prompt_opens_reasoning(prompt, thought)
    # A template that closes a thought at once, or begins the answer, asks for none. One that names no thought is for a
    # model without thoughts.
    ends = (thought.closes, *chat.tools.around[:1])
    may_come = chat.thinks and not goes_on and not prompt.rstrip().endswith(ends)
    if not is_open and not may_come:
        return None
    return common_pb2.Thought(opens=thought.opens, closes=[thought.closes], is_open=is_open)


def closing_text(chat: ChatFormat) -> str:
    """Return the text that closes a thought as the model's template does."""
    if chat.tools.is_harmony or chat.reasoning is None:
        return _HARMONY_END
    return chat.before_close + chat.reasoning.closes


def thought_end(
    chat: ChatFormat, thought: common_pb2.Thought, closing_ids: Iterable[int], wished_tokens: int | None
) -> generation_pb2.ThoughtEnd:
    """Return what closes `thought` when its budget is spent; `closing_ids` are those of `closing_text`."""
    counted = common_pb2.Thought(opens=thought.opens, closes=thought.closes, is_open=thought.is_open)
    if chat.tools.is_harmony:
        # A first message that is the answer is no thought. One on another channel ends them, whatever its header says.
        counted = common_pb2.Thought(opens=_HARMONY_THOUGHT, closes=_HARMONY_OTHERS)
    return generation_pb2.ThoughtEnd(thought=counted, token_ids=closing_ids, wished_tokens=wished_tokens)


def to_thought(message: common_pb2.Thought) -> Thought:
    """Return the thought as plain data."""
    return Thought(message.opens, tuple(message.closes), message.is_open)
