"""Dialogues as token ids and a mask of the tokens to learn, through the model's own chat template."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from dev.demo.corpus import LETTER_BREAK, Turn, visible

from .hf import render

_ASSISTANT = "<|im_start|>assistant\n"
_END = "<|im_end|>"


class Row(NamedTuple):
    """Token ids, and for each whether the model is to learn it (answers and their end token)."""

    ids: list[int]
    learn: list[bool]


class Conversation(NamedTuple):
    """One training conversation. `thinking` is the template's enable_thinking (None: unset)."""

    system: str
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...]
    thinking: bool | None


def _messages(conversation: Conversation) -> list[dict[str, str]]:
    head = [{"role": "system", "content": conversation.system}] if conversation.system else []
    for turn in conversation.turns:
        is_result = turn.user.startswith("\0")
        head.append({"role": "tool" if is_result else "user", "content": turn.user.lstrip("\0")})
        head.append({"role": "assistant", "content": turn.answer})
    return head


def conversation_text(conversation: Conversation, template: str) -> tuple[str, int]:
    """The rendered text with letter breaks, and the offset from where answers are learnt.

    With `thinking` set only the last answer is learnt: earlier ones are shown without their thoughts.
    """
    messages = _messages(conversation)
    prompt = render(
        template,
        messages[:-1],
        tools=conversation.tools,
        add_generation_prompt=True,
        thinking=conversation.thinking,
    )
    last = conversation.turns[-1]
    thought = f"<think>\n{last.thought}\n</think>\n\n" if conversation.thinking else ""
    learn_from = 0 if conversation.thinking is None else len(prompt)
    return prompt + thought + last.answer + _END + "\n", learn_from


def _spans(text: str, learn_from: int) -> Iterable[tuple[str, bool]]:
    """Cuts the text into (piece, learn?) at the edges of answers; none before `learn_from` is learnt."""
    position = 0
    while (start := text.find(_ASSISTANT, position)) >= 0:
        start += len(_ASSISTANT)
        end = text.index(_END, start) + len(_END)
        start = max(start, min(learn_from, end))
        yield text[position:start], False
        yield text[start:end], True
        position = end
    yield text[position:], False


def encode_conversations(conversations: Sequence[Conversation], tokenizer: Tokenizer, template: str) -> list[Row]:
    """Encodes many conversations at once (one batch call of the tokenizer)."""
    pieces: list[tuple[int, str, bool]] = []
    for number, conversation in enumerate(conversations):
        text, learn_from = conversation_text(conversation, template)
        for span, learn in _spans(text, learn_from):
            pieces.extend((number, part, learn) for part in span.split(LETTER_BREAK) if part)
    encodings = tokenizer.encode_batch_fast([part for _, part, _ in pieces], add_special_tokens=False)
    rows: list[Row] = [Row([], []) for _ in conversations]
    for (number, _, learn), encoding in zip(pieces, encodings, strict=True):
        rows[number].ids.extend(encoding.ids)
        rows[number].learn.extend(itertools.repeat(learn, len(encoding.ids)))
    return rows


def answer_of(text: str) -> str:
    """Visible part of a generated text: without thoughts and without the end token."""
    return visible(text.rpartition("</think>")[2]).split(_END)[0].strip()
