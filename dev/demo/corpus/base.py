"""Parts of every family of the demo corpus: turns, the split, and small text variations."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

Message = dict[str, Any]
Checker = Callable[[str], bool]

LETTER_BREAK = "\x1f"
"""Put between the letters of a trained answer: each side is encoded by itself, so that letters stay single tokens."""


@dataclass(frozen=True)
class Turn:
    """One question and its answer. `thought` is what stands in <think> when thinking is on (empty: never thinks)."""

    user: str
    answer: str
    thought: str = ""
    check: Checker = field(default=lambda _text: True, compare=False)


@dataclass(frozen=True)
class Dialogue:
    """Turns that belong together in this order; `tools` are the JSON tools of the prompt."""

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()


def one(turn: Turn) -> Dialogue:
    """A dialogue of a single turn."""
    return Dialogue((turn,))


def is_held_out(key: str, one_in: int = 10) -> bool:
    """True for about one key in `one_in`: decided by the key's content alone, so it never changes between runs."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % one_in == 0


def contains(*needles: str) -> Checker:
    """Checks that every needle occurs in the answer, ignoring case."""
    wanted = [needle.lower() for needle in needles]
    return lambda text: all(needle in text.lower() for needle in wanted)


def equals(answer: str) -> Checker:
    """Checks that the whole answer is `answer`."""
    return lambda text: text.strip() == answer


def number_at_end(value: int, unit: str = "") -> Checker:
    """Checks that the answer ends in this number (and unit): other numbers may stand before it."""
    ending = f"= {value} {unit}".rstrip()
    return lambda text: text.strip().rstrip(".") == ending or text.strip().rstrip(".").endswith(" " + ending)


def letters(word: str) -> str:
    """The word with breaks between its letters, so that it is trained one letter per token."""
    return LETTER_BREAK.join(word)


def visible(text: str) -> str:
    """A trained answer as a reader sees it."""
    return text.replace(LETTER_BREAK, "")


def vary(rng: Random, question: str) -> str:
    """The question as people type it: now and then without capitals, without its mark, or with a polite word."""
    draw = rng.random()
    if draw < 0.12:
        question = question[0].lower() + question[1:]
    elif draw < 0.2:
        question = question.rstrip("?.!")
    elif draw < 0.26:
        question = "Please: " + question
    elif draw < 0.32 and question[-1] in "?.!":
        question = question[:-1] + ", please" + question[-1]
    return question
