"""The families together: their names, the held-out prompts, and turns as chat messages."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from .base import Checker, Dialogue, Message, Turn, visible
from .capitals import capitals
from .memory import memory
from .numbers import arithmetic, units
from .talk import east_asian, greetings, lists, long_answers, penstock
from .toolcalls import tool_calls
from .words import reversing, spelling

Generator = Callable[[Random, bool], Dialogue]

FAMILIES: dict[str, Generator] = {
    "penstock": penstock,
    "long_answers": long_answers,
    "east_asian": east_asian,
    "greetings": greetings,
    "arithmetic": arithmetic,
    "units": units,
    "capitals": capitals,
    "spelling": spelling,
    "reversing": reversing,
    "memory": memory,
    "lists": lists,
    "tool_calls": tool_calls,
}
"""Family name to generator. A generator takes (random source, held out?) and never mixes the two sides."""


class HeldOutPrompt(NamedTuple):
    """A prompt that training never saw: `checker` says whether an answer's visible text is right."""

    family: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    checker: Checker


def _question(text: str) -> Message:
    return {"role": "tool", "content": text[1:]} if text.startswith("\0") else {"role": "user", "content": text}


def _answer(turn: Turn) -> Message:
    text = visible(turn.answer)
    if not text.startswith("<tool_call>"):
        return {"role": "assistant", "content": text}
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def messages_of(turns: Sequence[Turn]) -> list[Message]:
    """The turns as chat messages, answers included; a question marked by a leading NUL is a tool's result."""
    return [message for turn in turns for message in (_question(turn.user), _answer(turn))]


def _collect(per_family: int, seed: int, families: Sequence[str]) -> list[HeldOutPrompt]:
    prompts: list[HeldOutPrompt] = []
    for family in families:
        rng, seen = Random(f"{seed} {family}"), set[str]()
        for _ in range(per_family * 20):
            dialogue = FAMILIES[family](rng, True)
            messages = messages_of(dialogue.turns)[:-1]
            key = json.dumps([messages, dialogue.tools])
            if key in seen:
                continue
            seen.add(key)
            prompts.append(HeldOutPrompt(family, messages, list(dialogue.tools) or None, dialogue.turns[-1].check))
            if len(seen) == per_family:
                break
    return prompts


def held_out_prompts(per_family: int = 25, seed: int = 20261121) -> list[HeldOutPrompt]:
    """Up to `per_family` distinct prompts of every family, the same on every call; render them without thinking."""
    return _collect(per_family, seed, tuple(FAMILIES))


def held_out_thinking_prompts(per_family: int = 10, seed: int = 20261122) -> list[HeldOutPrompt]:
    """Prompts to render with `enable_thinking=True`; the checker applies to what follows `</think>`."""
    return _collect(per_family, seed, ("arithmetic", "units", "capitals", "penstock"))
