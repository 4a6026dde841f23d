"""Assisted generation on real models: ids of transformers' assisted and plain generate(), and of our own plain one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.assisted import WIDE, assisted_engine, noised_checkpoint
from factories.engine.fake_engine import Answer, engine_config, request, run
from factories.engine.model_engine import load_tiny
from factories.models.checkpoints import VOCAB_SIZE, reference_model, tiny_checkpoint
from penstock.generation.core.decoding_mode import AssistantSchedule
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from transformers import PreTrainedModel

NEW_TOKENS = 32
LOOKUP = AssistanceOptions(prompt_lookup_num_tokens=7, max_matching_ngram_size=3)
DRAFT = AssistanceOptions(num_assistant_tokens=5, confidence_threshold=0.0)
MEMORY = AssistanceOptions(ngram_memory_num_tokens=7, ngram_memory_match=2)
LOOKAHEAD = AssistanceOptions(lookahead_window=6)
TEXTS = AssistanceOptions(prompt_lookup_num_tokens=3, ngram_memory_num_tokens=5, lookahead_window=4)


@pytest.fixture(
    scope="module",
    params=["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3", "mistral"))],
)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and a draft model that agrees with it more often than not."""
    base = tmp_path_factory.mktemp(request.param)
    model = tiny_checkpoint(base / "model", request.param, seed=3)
    return model, noised_checkpoint(model, base / "draft", 0.02)


@pytest.fixture(scope="module")
def models(folders: tuple[Path, Path]) -> tuple[CausalLM, CausalLM]:
    return load_tiny(folders[0]), load_tiny(folders[1])


@pytest.fixture(scope="module")
def references(folders: tuple[Path, Path]) -> tuple[PreTrainedModel, PreTrainedModel]:
    return reference_model(folders[0]), reference_model(folders[1])


def prompts() -> list[list[int]]:
    """Prompts, of which some repeat themselves, so that look-ups find matches."""
    rng = random.Random(0)
    plain = [[rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(2, 40))] for _ in range(6)]
    return plain + [one[:5] * 4 for one in plain]


def theirs(model: PreTrainedModel, prompt: list[int], **arguments: Any) -> list[int]:
    ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS, **arguments)
    return list(ids[0, len(prompt) :].tolist())


def ours(engine: Engine, **options: Any) -> list[Answer]:
    items = [request(p, **{"max_new_tokens": NEW_TOKENS, "eos_token_ids": (1,), **options}) for p in prompts()]
    answers = run(engine, *items)
    assert engine.load().kv_blocks_used == 0
    return [answers[item.request_id] for item in items]


def counts(answers: list[Answer]) -> tuple[int, int]:
    """Accepted and rejected drafts."""
    finished = [answer.finished for answer in answers if answer.finished is not None]
    return sum(f.accepted_draft_tokens for f in finished), sum(f.rejected_draft_tokens for f in finished)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}])
def test_prompt_lookup_gives_what_transformers_gives(
    models: tuple[CausalLM, CausalLM], references: tuple[PreTrainedModel, PreTrainedModel], processors: dict[str, Any]
) -> None:
    answers = ours(assisted_engine(models[0]), mode=LOOKUP, **processors)
    for prompt, answer in zip(prompts(), answers, strict=True):
        expected = theirs(references[0], prompt, prompt_lookup_num_tokens=7, max_matching_ngram_size=3, **processors)
        assert answer.ids[0] == expected
    if not processors:
        assert counts(answers)[0] >= 5


@pytest.mark.thinned(6)
@pytest.mark.parametrize("schedule", list(AssistantSchedule))
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_a_draft_model_gives_what_transformers_gives(
    models: tuple[CausalLM, CausalLM],
    references: tuple[PreTrainedModel, PreTrainedModel],
    schedule: AssistantSchedule,
    threshold: float,
) -> None:
    options = AssistanceOptions(num_assistant_tokens=5, schedule=schedule, confidence_threshold=threshold)
    answers = ours(assisted_engine(*models), mode=options)
    draft = references[1]
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = schedule.value
    draft.generation_config.assistant_confidence_threshold = threshold
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert answer.ids[0] == theirs(references[0], prompt, assistant_model=draft)
    accepted, rejected = counts(answers)
    assert accepted > 50
    assert rejected > 0


OPTIONS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "top_p": 0.8, "repetition_penalty": 1.2, "num_return_sequences": 3},
    {"do_sample": True, "top_k": 20, "frequency_penalty": 0.5, "min_new_tokens": 20},
    {"do_sample": True, "min_p": 0.06, "no_repeat_ngram_size": 2, "logit_bias": {5: 4.0}},
    {"do_sample": True, "typical_p": 0.9, "bad_words_ids": ((7,), (8, 9)), "stop_token_ids": ((11, 12),)},
)


def assistances() -> Iterator[Any]:
    """Every assistance in roomy and tight pools with all options; the ordinary run has one set of them for each,
    in a tight one."""
    pools = itertools.product((LOOKUP, DRAFT, MEMORY, LOOKAHEAD, TEXTS), (False, True))
    for (turn, (assistance, tight)), (place, options) in itertools.product(enumerate(pools), enumerate(OPTIONS)):
        marks = [] if tight and place == turn // 2 else [pytest.mark.slow]
        yield pytest.param(options, assistance, tight, marks=marks)


@pytest.mark.parametrize(("options", "assistance", "tight"), [*assistances()])
def test_assistance_changes_neither_ids_nor_logprobs(
    models: tuple[CausalLM, CausalLM], options: dict[str, Any], assistance: AssistanceOptions, tight: bool
) -> None:
    """`tight`: pools that preempt, forget drafts' sequences and cut prompts and drafts."""
    cramped = engine_config(num_blocks=70, max_batch_tokens=17, max_running_sequences=16, max_draft_rows=12)
    plain = ours(assisted_engine(models[0]), seed=5, top_logprobs=2, **options)
    engine = assisted_engine(*models, cramped, draft_blocks=40) if tight else assisted_engine(*models)
    # Twice, so that there are past outputs.
    again = ours(engine, seed=5, top_logprobs=2, mode=assistance, **options) if assistance.recalls_outputs else []
    assisted = ours(engine, seed=5, top_logprobs=2, mode=assistance, **options)
    for one, other in zip([*plain, *(plain if again else ())], [*assisted, *again], strict=True):
        assert one.ids == other.ids
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)
    assert sum(counts(assisted)) > 0
    engine.check_integrity()
    if tight:
        assert engine.stats.preemptions > 0


def logprobs(answer: Answer) -> list[float]:
    """Logprobs of the chosen tokens, sequence by sequence."""
    return [
        entry.chosen.logprob
        for index in sorted(answer.ids)
        for delta in answer.deltas
        if delta.index == index
        for entry in delta.logprobs
        if entry.chosen is not None
    ]


def test_the_model_as_its_own_draft_model_is_never_refused(models: tuple[CausalLM, CausalLM]) -> None:
    """The draft model draws with the same options, history and uniforms."""
    for options in ({}, {"do_sample": True, "repetition_penalty": 1.2, "top_p": 0.9}):
        answers = ours(assisted_engine(models[0], models[0]), mode=DRAFT, seed=9, **options)
        accepted, rejected = counts(answers)
        assert accepted > 200
        assert rejected == 0


def test_refused_drafts_never_reach_the_prefix_cache(models: tuple[CausalLM, CausalLM]) -> None:
    """A continuation of an assisted output starts from its cached blocks and goes on as without a cache."""
    cached = engine_config(num_blocks=WIDE.num_blocks, max_batch_tokens=600, max_draft_rows=400, block_size=2)
    assert cached.prefix_cache
    engine = assisted_engine(*models, cached)
    first = ours(engine, mode=DRAFT, do_sample=True)
    follow_ups = [
        request([*prompt, *answer.ids[0], 3], max_new_tokens=8) for prompt, answer in zip(prompts(), first, strict=True)
    ]
    warm = run(engine, *follow_ups)
    fresh = run(assisted_engine(models[0]), *(request(f.prompt_token_ids, request_id=f.request_id) for f in follow_ups))
    for item in follow_ups:
        assert warm[item.request_id].ids == fresh[item.request_id].ids
        started = warm[item.request_id].started
        assert started is not None
        # All of the output but the last token or two, which share a block with the new one, and what the last
        # verification drew behind the drafts that it accepted.
        assert started.cached_tokens >= len(item.prompt_token_ids) - 6
