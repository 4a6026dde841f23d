"""Two generation backends behind one router: many chats at once, half of them cancelled."""

from __future__ import annotations

import asyncio
import random

from factories.engine.load import steps_of
from factories.servers.stack import Stack
from factories.wire.conversation import user
from penstock_client import AsyncClient, Completion

QUESTIONS = [
    "What is Penstock?",
    "Count from 1 to 20.",
    "你好!",
    "What is 7 + 5?",
    "Which services does Penstock have?",
]
CHATS = 64


async def test_64_concurrent_chats_each_end_in_one_finished_with_gapless_deltas(stack: Stack) -> None:
    """The client raises on a gap in seq, on an event after Finished and on OK without it."""
    async with AsyncClient(stack.address) as client:
        calls = [client.generate(user(QUESTIONS[i % len(QUESTIONS)]), max_new_tokens=32) for i in range(CHATS)]
        completions: list[Completion] = await asyncio.gather(*calls)
    for completion in completions:
        [choice] = completion.choices
        assert choice.finish_reason in ("STOP_EOS", "LENGTH")
        assert completion.finished.attempts == 1
        assert completion.usage.completion_tokens == completion.finished.sequences[0].token_count
    same = {completion.text for completion in completions[:: len(QUESTIONS)]}
    assert len(same) == 1, "greedy answers to one question differ"
    await steps_of(*(process.address for process in stack.generations))


async def test_both_backends_take_part(stack: Stack) -> None:
    """Distinct prompts spread by load: of 64, both processes have some."""
    addresses = [process.address for process in stack.generations]
    before = await steps_of(*addresses)
    async with AsyncClient(stack.address) as client:
        calls = [
            client.generate(user(f"{i} What is {i} + 5?"), max_new_tokens=48, ignore_eos=True) for i in range(CHATS)
        ]
        await asyncio.gather(*calls)
    after = await steps_of(*addresses)
    assert all(late > early for early, late in zip(before, after, strict=True))


async def test_cancelling_half_of_the_chats_frees_every_block(stack: Stack) -> None:
    """Cancelled before the first token, after it, or anywhere in between."""
    rng, addresses = random.Random(0), [process.address for process in stack.generations]
    before = await steps_of(*addresses)

    async def chat(client: AsyncClient, number: int) -> Completion | None:
        stop_after = rng.randrange(24) if number % 2 else None
        tokens = 64 if stop_after is None else 3000
        stream = client.stream(user(f"{number}: Count from 1 to 20."), max_new_tokens=tokens, ignore_eos=True)
        if stop_after is None:
            return await stream.result()
        async with stream:
            for _ in range(stop_after):
                await anext(stream)
        return None

    async with AsyncClient(stack.address) as client:
        completions = await asyncio.gather(*(chat(client, number) for number in range(CHATS)))
    finished = [completion for completion in completions if completion]
    assert len(finished) == CHATS // 2
    assert all(completion.usage.completion_tokens == 64 for completion in finished)
    after = await steps_of(*addresses)
    assert all(late - early < 3000 for early, late in zip(before, after, strict=True)), "long before their own end"
