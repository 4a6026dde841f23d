"""Training batches: conversations drawn by family weights, sorted by length, padded, about equal in tokens."""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from dev.demo.corpus import FAMILIES, Dialogue, Turn

from .render import Conversation, Row, encode_conversations

MAX_ROW = 512
"""Longest training row in tokens; longer conversations are dropped."""
CHUNK = 2000
"""Conversations drawn at once and sorted by length, so that little of a batch is padding."""

WEIGHTS: dict[str, float] = {
    "penstock": 10,
    "long_answers": 1.5,
    "east_asian": 2.5,
    "greetings": 5,
    "arithmetic": 20,
    "units": 8,
    "capitals": 6,
    "spelling": 9,
    "reversing": 10,
    "memory": 12,
    "lists": 6,
    "tool_calls": 9,
}
"""Share of each family among the drawn dialogues: the hard ones get the most."""

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are Penstock's demo model.",
    "You are a helpful assistant. Answer briefly.",
    "Be kind and short.",
)


class Batch(NamedTuple):
    """Shapes: ids_BT and learn_BT (1 where the token at that place is a target)."""

    ids_BT: torch.Tensor
    learn_BT: torch.Tensor


class ConversationSource:
    """Endless training conversations from one seed.

    `single` is the first part of the curriculum: one dialogue, no system prompt, no thinking. What to look at is then
    near, and copying, spelling and carrying are learnt in a fraction of the tokens that mixed conversations need.
    """

    single = True

    def __init__(self, seed: int) -> None:
        self._names, self._weights = list(WEIGHTS), list(WEIGHTS.values())
        self._rng = Random(seed)

    def _draw_family(self, without: frozenset[str] = frozenset()) -> tuple[str, Dialogue]:
        while True:
            name = self._rng.choices(self._names, self._weights)[0]
            if name not in without:
                return name, FAMILIES[name](self._rng, False)

    def draw(self) -> Conversation:
        """One conversation: usually a few dialogues one after the other, facts sometimes asked after a detour."""
        rng = self._rng
        if self.single:
            dialogue = self._draw_family()[1]
            return Conversation("", dialogue.turns, dialogue.tools, None)
        thinking = rng.choices((None, True, False), (88, 8, 4))[0]
        name, dialogue = self._draw_family()
        turns = list(dialogue.turns)
        if dialogue.tools:
            if rng.random() < 0.2:
                turns = [*FAMILIES["greetings"](rng, False).turns, *turns]
        else:
            others: list[Turn] = []
            for _ in range(rng.choices((0, 1, 2, 4, 8), (45, 24, 18, 10, 3))[0]):
                others += self._draw_family(frozenset({"memory", "tool_calls"}))[1].turns
            # A fact told before the detour must still be known after it.
            between = name == "memory" and rng.random() < 0.5
            at = rng.randint(1, len(turns) - 1) if between else rng.choice((0, len(turns)))
            turns[at:at] = others
        system = rng.choice(_SYSTEMS) if rng.random() < 0.15 else ""
        if thinking and not turns[-1].thought:
            thinking = None
        return Conversation(system, tuple(turns), dialogue.tools, thinking)


def _batch(rows: list[Row], pad: int) -> Batch:
    width = -(-max(len(row.ids) for row in rows) // 8) * 8
    ids = torch.full((len(rows), width), pad, dtype=torch.long)
    learn = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        learn[index, : len(row.ids)] = torch.tensor(row.learn)
    return Batch(ids, learn)


def batches(
    tokenizer: Tokenizer, template: str, *, seed: int, tokens: int, pad: int, single_batches: int, chunk: int = CHUNK
) -> Iterator[Batch]:
    """Endless batches of about `tokens` tokens each, padding (`pad`, on the right) included.

    `chunk` conversations are drawn at once. The first chunks, until `single_batches` batches are made, hold single
    dialogues only.
    """
    source, shuffler, made = ConversationSource(seed), Random(seed + 1), 0
    while True:
        source.single = made < single_batches
        drawn = encode_conversations([source.draw() for _ in range(chunk)], tokenizer, template)
        rows = sorted((row for row in drawn if len(row.ids) <= MAX_ROW), key=lambda row: len(row.ids))
        ready: list[Batch] = []
        current: list[Row] = []
        for row in rows:
            if current and (len(current) + 1) * (len(row.ids) + 7) > tokens:
                ready.append(_batch(current, pad))
                current = []
            current.append(row)
        # The last, longest rows of a chunk make a small batch: a step like any other.
        ready.append(_batch(current, pad))
        shuffler.shuffle(ready)
        made += len(ready)
        yield from ready
