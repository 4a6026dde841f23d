"""Drafts of the demo model's head change no answer: requests with options at random, in crowds that are preempted."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import pytest
from factories.engine.fake_engine import Answer, collect, engine_config, run
from factories.engine.host_pools import HOSTS, host_fields
from factories.engine.mixed import drafted_request
from factories.engine.modes import ROOMY, load_service, new_engine, prepare, to_message
from penstock.common.checkpoint import DEMO_HEAD, demo_folder
from penstock.generation.core.step import DraftKind
from penstock.generation.engine.config import EngineConfig
from penstock.generation.startup.loaded_model import LoadedModel
from tokenizers import Tokenizer

CROWD = 25
SCORE_TOLERANCE = 1e-4
QUESTIONS = (
    *("Spell violin.", "Spell the word harbour backwards.", "What is 23 + 58?", "What is the capital of France?"),
    *("Write the numbers from 7 to 30.", "Who are you?", "How many grams are 3 kilograms?", "Hello!"),
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_service(demo_folder(), draft_head=DEMO_HEAD, assistant_kv_memory="256KiB")


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    turns = (f"<|im_start|>user\n{one}<|im_end|>\n<|im_start|>assistant\n" for one in QUESTIONS)
    return [list(tokenizer.encode(turn).ids) for turn in turns]


def tight(random: Random) -> EngineConfig:
    """Room for a few of them at a time, and for less when they grow."""
    return engine_config(
        num_blocks=random.randint(40, 56),
        block_size=random.randint(3, 5),
        max_context_tokens=120,
        max_running_sequences=random.randint(8, 32),
        max_batch_tokens=random.randint(40, 80),
        max_draft_rows=random.randint(10, 40),
        prefix_cache=random.random() < 0.7,
        **host_fields(*random.choice(HOSTS)),
    )


def message(spec: dict[str, Any]) -> Any:
    return to_message(spec["prompt"], {name: value for name, value in spec.items() if name != "prompt"})


def without_drafts(spec: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in spec.items() if "assistant" not in name}


@pytest.mark.parametrize(
    "crowds",
    [
        pytest.param(range(2), id="50 requests"),
        pytest.param(range(2, 40), id="950 more", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_requests_give_what_each_gives_alone_without_drafts(loaded: LoadedModel, crowds: range) -> None:
    seen: Counter[str] = Counter()
    assert loaded.served.assistant_model == "penstock-demo-head"
    for number in crowds:
        random = Random(number)
        specs = [drafted_request(random, loaded.served.assistant_model, prompts()) for _ in range(CROWD)]
        engine = new_engine(loaded, tight(random))
        items = [prepare(loaded, message(spec)) for spec in specs]
        answers: dict[str, Answer] = {}
        for item in items:
            engine.add(item)
            collect(answers, engine.step())
        run(engine, answers=answers)
        plain = [prepare(loaded, message(without_drafts(spec))) for spec in specs]
        alone = run(new_engine(loaded, ROOMY), *plain)
        for spec, item, one in zip(specs, items, plain, strict=True):
            check_same(answers[item.request_id], alone[one.request_id], spec)
        right, wrong = engine.stats.draft_tokens[DraftKind.DRAFT_HEAD]
        seen.update(preemptions=engine.stats.preemptions, right=right, wrong=wrong)
        seen.update(prefix_hit_tokens=engine.stats.prefix_hit_tokens)
        assert loaded.engine.draft is not None
        loaded.engine.draft.drafter.check_integrity()
    # The property says nothing if nobody was preempted, shared a prefix or was drafted for.
    assert min(seen.values()) > 0, seen


def check_same(drafted: Answer, plain: Answer, spec: dict[str, Any]) -> None:
    shown = json.dumps(spec)
    assert drafted.finished is not None
    assert plain.finished is not None
    assert drafted.finished.error is None, shown
    assert drafted.ids == plain.ids, shown
    for one, other in zip(drafted.finished.sequences, plain.finished.sequences, strict=True):
        assert (one.index, one.reason, one.num_tokens) == (other.index, other.reason, other.num_tokens), shown
        assert (one.stop_token_id, one.stop_string) == (other.stop_token_id, other.stop_string), shown
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=SCORE_TOLERANCE), shown
