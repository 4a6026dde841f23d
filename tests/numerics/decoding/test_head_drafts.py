"""Drafts of a trained head: ids and logprobs of plain decoding, in any company, whatever is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.assisted import WIDE, assisted_engine, head_engine
from factories.engine.fake_engine import Answer, engine_config, request, run
from factories.engine.model_engine import load_tiny
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.draft_heads import eagle3_folder
from factories.models.run_kernels import cpu_device
from penstock.common.checkpoint import demo_folder, demo_head_folder
from penstock.generation.core.step import DraftKind
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.eagle3 import Eagle3Head, load_eagle3
from tokenizers import Tokenizer

HEAD = AssistanceOptions(num_assistant_tokens=4, confidence_threshold=0.0)
QUESTIONS = ("Spell violin.", "What is 23 + 58?", "Write the numbers from 7 to 30.", "Who are you?")


@pytest.fixture(scope="module")
def demo() -> tuple[CausalLM, Eagle3Head]:
    model = load_tiny(demo_folder())
    return model, load_eagle3(demo_head_folder(), model.config, cpu_device(), model.dtype, "none")


def prompt(question: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    turns = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer.encode(turns).ids)


def ours(engine: Engine, **options: Any) -> list[Answer]:
    items = [request(prompt(one), **{"max_new_tokens": 40, "eos_token_ids": (4089,), **options}) for one in QUESTIONS]
    answers = run(engine, *items)
    assert engine.load().kv_blocks_used == 0
    return [answers[item.request_id] for item in items]


def accepted(engine: Engine) -> tuple[int, int]:
    return engine.stats.draft_tokens[DraftKind.DRAFT_HEAD]


OPTIONS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.1, "num_return_sequences": 3},
    {"do_sample": True, "top_k": 20, "frequency_penalty": 0.3, "min_new_tokens": 20},
)


@pytest.fixture(scope="module")
def undrafted(demo: tuple[CausalLM, Eagle3Head]) -> list[list[Answer]]:
    """Answers of plain decoding to each entry of `OPTIONS`."""
    return [ours(assisted_engine(demo[0]), seed=5, top_logprobs=2, **options) for options in OPTIONS]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("place", range(len(OPTIONS)))
@pytest.mark.parametrize("tight", [False, True])
def test_a_head_changes_neither_ids_nor_logprobs(
    demo: tuple[CausalLM, Eagle3Head], undrafted: list[list[Answer]], place: int, tight: bool
) -> None:
    """`tight`: pools that forget the head's sequences, and cut prompts and drafts."""
    model, head = demo
    options, plain = OPTIONS[place], undrafted[place]
    blocks = 6 + 16 * options.get("num_return_sequences", 1)
    cramped = engine_config(num_blocks=blocks, max_batch_tokens=17, max_running_sequences=16, max_draft_rows=12)
    engine = head_engine(model, head, cramped, draft_blocks=30) if tight else head_engine(model, head, WIDE)
    drafted = ours(engine, seed=5, top_logprobs=2, mode=HEAD, **options)
    for one, other in zip(plain, drafted, strict=True):
        assert one.ids == other.ids
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3)
    assert accepted(engine)[0] > 20
    engine.check_integrity()


def logprobs(answer: Answer) -> list[float]:
    return [entry.chosen.logprob for delta in answer.deltas for entry in delta.logprobs if entry.chosen is not None]


def test_most_first_drafts_of_the_demo_head_are_right(demo: tuple[CausalLM, Eagle3Head]) -> None:
    engine = head_engine(*demo)
    ours(engine, mode=replace(HEAD, num_assistant_tokens=1))
    right, wrong = accepted(engine)
    assert right > wrong


def test_a_chain_goes_on_from_the_rows_that_were_kept(demo: tuple[CausalLM, Eagle3Head]) -> None:
    """Drafts do not depend on chunks, on company, or on drafts that were refused before: only on the tokens so far."""
    shares = []
    for config in (WIDE, engine_config(num_blocks=200, max_batch_tokens=7, max_running_sequences=4)):
        engine = head_engine(*demo, config)
        for question in QUESTIONS:
            item = request(prompt(question), max_new_tokens=40, eos_token_ids=(4089,), mode=HEAD)
            run(engine, item)
        shares.append(accepted(engine))
    assert shares[0] == shares[1]


def test_drafts_behind_a_cached_prefix_are_those_of_the_whole_prompt(demo: tuple[CausalLM, Eagle3Head]) -> None:
    shares = []
    for prefix_cache in (False, True):
        engine = head_engine(*demo, replace(WIDE, prefix_cache=prefix_cache))
        for _ in range(2):
            for question in QUESTIONS:
                item = request(prompt(question), max_new_tokens=30, eos_token_ids=(4089,), mode=HEAD)
                run(engine, item)
        shares.append(accepted(engine))
        assert (engine.stats.prefix_hit_tokens > 0) is prefix_cache
        engine.check_integrity()
    assert shares[0] == shares[1]


class _Changing:
    """Costs under which right drafts pay at times, as they do when other requests come and go."""

    is_known = True

    def __init__(self, pays: Iterator[bool]) -> None:
        self._pays, self._num_asked = pays, 0
        self._share = 0.0

    def measure(self) -> None: ...

    def of(self, num_drafts: int) -> float:
        if num_drafts == 1:
            self._share = 0.05 if next(self._pays) else 2.0
        return self._share * num_drafts

    def of_drafting(self, num_drafts: int) -> float:
        return 0.0

    def retries(self) -> bool:
        self._num_asked += 1
        return self._num_asked % 2 == 0


def costing(engine: Engine, pays: Iterator[bool]) -> Engine:
    setting: Any = engine
    setting._draft_costs = _Changing(pays)
    return engine


def test_a_head_that_never_pays_reads_no_rows(demo: tuple[CausalLM, Eagle3Head]) -> None:
    engine = costing(head_engine(*demo), repeat(False))
    setting: Any = engine
    setting._draft_costs.retries = lambda: False
    drafter: Any = engine._drafter
    read: list[int] = []
    take = drafter.take
    drafter.take = lambda entries, rows, embed: (read.append(len(rows)), take(entries, rows, embed))
    plain = ours(assisted_engine(demo[0]))
    assert [one.ids for one in ours(engine, mode=HEAD)] == [one.ids for one in plain]
    assert (read, accepted(engine)) == ([], (0, 0))


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.7, "num_return_sequences": 2}])
def test_a_head_that_begins_and_rests_again_changes_no_ids(
    demo: tuple[CausalLM, Eagle3Head], options: dict[str, Any]
) -> None:
    plain = ours(assisted_engine(demo[0]), seed=5, **options)
    source = random.Random(7)
    engine = costing(head_engine(*demo), iter(lambda: source.random() < 0.4, None))
    for _ in range(2):
        assert [one.ids for one in ours(engine, seed=5, mode=HEAD, **options)] == [one.ids for one in plain]
    right, wrong = accepted(engine)
    assert right > 10
    assert wrong > 0
    engine.check_integrity()


def test_a_head_of_made_weights_drafts_nothing_right_and_changes_nothing(tmp_path: Path) -> None:
    model = load_tiny(tiny_checkpoint(tmp_path / "model", "qwen3", seed=3, num_hidden_layers=4))
    head = load_eagle3(eagle3_folder(tmp_path / "head"), model.config, cpu_device(), model.dtype, "none")
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, VOCAB_SIZE, (length,), generator=rng).tolist() for length in (1, 2, 9, 30)]
    engine = head_engine(model, head)
    for options in ({}, {"do_sample": True, "seed": 3}):
        answers = [
            run(one, *(request(ids, request_id=str(n), max_new_tokens=12, mode=mode, **options) for n, ids in items))
            for one, mode in ((assisted_engine(model), HEAD), (engine, HEAD))
            for items in [list(enumerate(prompts))]
        ]
        assert [answers[0][key].ids for key in answers[0]] == [answers[1][key].ids for key in answers[0]]
    assert sum(accepted(engine)) > 0
