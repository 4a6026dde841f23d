"""A Generator gives the ids of the generation service for the same requests, in one process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from factories.engine.local_generators import SETTINGS, local_generator
from factories.engine.mixed import Arguments, mixed_request, structured, textual
from factories.engine.modes import to_message
from factories.models.checkpoints import tiny_checkpoint
from factories.servers.generation import Client, Outcome, generation_service
from penstock import Generator
from penstock.generator.requests import LocalRequest
from penstock.v1 import common_pb2, generation_pb2
from penstock_client._types import Completion

CONFIGURATIONS = int(os.environ.get("PENSTOCK_CONFIGURATIONS", "80"))
# Of the service's answers at once.
TOGETHER = 24
_EXTRA = {"textual": textual}


def configurations() -> Iterator[Arguments]:
    """Draw requests of every mode, a seventh of them with a constraint; each has a seed."""
    random = Random("the same ids")
    for number in range(CONFIGURATIONS):
        yield mixed_request(random, {"structured": structured("")} if number % 7 == 0 else _EXTRA)


def keywords(arguments: Arguments) -> dict[str, Any]:
    """Return generate()'s arguments as keywords of Generator: the constraint's kinds are keywords of their own."""
    given = {name: value for name, value in arguments.items() if value is not None and name != "prompt"}
    constraint = given.pop("constraint", None)
    if constraint is not None:
        ((name, value),) = constraint.items()
        given[name] = value["values"] if name == "choice" else value
    return given


def result_of(outcome: Outcome) -> Any:
    if outcome.error is not None:
        return (type(outcome.error), outcome.error.reason, outcome.error.message)
    ends = sorted(outcome.finished.sequences, key=lambda end: end.index)
    return [(outcome.ids(end.index), _reason(end.finish_reason), end.cumulative_logprob) for end in ends]


def _reason(reason: int) -> str:
    return common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")  # type: ignore[arg-type]


def local_result(answer: Completion | Exception) -> Any:
    if isinstance(answer, Exception):
        return (type(answer), answer.reason, answer.message)  # type: ignore[attr-defined]
    return [(choice.token_ids, choice.finish_reason, choice.cumulative_logprob or 0.0) for choice in answer.choices]


def is_same(served: Any, local: Any) -> bool:
    """Compare refusals, or ids and reasons exactly; scores may differ by the rounding of another batch."""
    if isinstance(served, tuple) or isinstance(local, tuple):
        return bool(served == local)
    scores = [one[2] for one in served], [one[2] for one in local]
    return [one[:2] for one in served] == [one[:2] for one in local] and scores[0] == pytest.approx(
        scores[1], 1e-4, 1e-4
    )


async def served(client: Client, messages: list[generation_pb2.GenerateRequest]) -> list[Outcome]:
    places = asyncio.Semaphore(TOGETHER)

    async def one(message: generation_pb2.GenerateRequest) -> Outcome:
        async with places:
            return await client.generate(message)

    return await asyncio.gather(*map(one, messages))


def begin(generator: Generator, arguments: Arguments) -> Completion | Exception:
    options = keywords(arguments)
    try:
        return generator.generate(arguments["prompt"], **options)
    except Exception as error:
        return error


async def test_a_generator_gives_the_ids_of_the_service(folder: Path) -> None:
    """Of random configurations, in one process: ids, reasons and scores of every sequence, and refusals."""
    asked = list(configurations())
    messages = [to_message(one["prompt"], {**one, "prompt": None}) for one in asked]
    settings = {name: value for name, value in SETTINGS.items() if name != "kv_memory"}
    async with generation_service(folder, kv_memory="16MiB", **settings) as client:
        outcomes = await served(client, messages)
        with local_generator(folder, kv_memory="16MiB") as generator:
            # From many threads: its requests meet in one batch as the service's do.
            answers = await asyncio.gather(*(asyncio.to_thread(begin, generator, one) for one in asked))
            assert generator._engine.on_engine(lambda engine: engine.load().kv_blocks_used) == 0
    wrong = [
        (number, keywords(one), result_of(outcome), local_result(answer))
        for number, (one, outcome, answer) in enumerate(zip(asked, outcomes, answers, strict=True))
        if not is_same(result_of(outcome), local_result(answer))
    ]
    assert not wrong, wrong[0]
    kinds = {outcome.started.generation_mode for outcome in outcomes if outcome.error is None}
    assert len(kinds) >= 8
    assert sum(outcome.error is None for outcome in outcomes) > 0.9 * CONFIGURATIONS
    multiple = [one for one in answers if not isinstance(one, Exception) and len(one.choices) > 1]
    assert len(multiple) > 20


def test_the_message_of_a_request_is_that_of_the_keywords(tmp_path: Path) -> None:
    """Without a tokenizer, ids and options are all there is."""
    folder = tiny_checkpoint(tmp_path / "model")
    with local_generator(folder, load_tokenizer=False) as generator:
        local: LocalRequest = generator._requests.make([5, 6], {"seed": 3, "num_beams": 2, "cache_salt": "s"})
        wanted = to_message([5, 6], {"seed": 3, "num_beams": 2, "cache_salt": "s"})
        wanted.config.seed = 3
        # An empty message says as much as none.
        wanted.ClearField("stop")
        assert local.message == wanted
