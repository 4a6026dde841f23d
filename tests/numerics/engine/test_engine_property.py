"""The engine's promise on a real model: the same ids alone, in a crowd, preempted, prefix-hit and resumed.

test_interleavings.py draws crowds of every mode, and all that happens beside them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import Answer, collect, engine_config, request, run
from factories.engine.pools import unwritten_host_pool
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.run_kernels import cpu_device, new_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.request import FinishReason, Request
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.text.token_bytes import TokenBytes

# Of the two families one has each test in the ordinary run, chosen test by test.
pytestmark = pytest.mark.thinned(2)
ROOMY = engine_config(num_blocks=120, max_batch_tokens=200)
# Every id spells two letters, so stop strings lie across tokens.
TEXT = TokenBytes({token: bytes([97 + token % 4, 97 + token // 4 % 4]) for token in range(VOCAB_SIZE)}, special=[1])
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "mistral": {"sliding_window": 6},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    torch.set_num_threads(1)
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=5, **FAMILIES[request.param])
    return load_model(folder, dtype="float32", device=cpu_device())


def make_engine(model: CausalLM, config: EngineConfig) -> Engine:
    geometry = (model.config.num_layers, config.num_blocks, config.block_size)
    heads = (model.config.num_kv_heads, model.config.head_dim)
    kv = KVCachePool(*geometry, *heads, model.dtype, model.device)
    for layer in range(model.config.num_layers):
        # What is read before it is written shows.
        kv.key(layer).fill_(float("nan"))
        kv.value(layer).fill_(float("nan"))
    return Engine(config, new_runner(model, kv, host=unwritten_host_pool(kv, config)), TEXT)


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    head = draw(st.sampled_from([[], [11, 12, 13, 14, 15, 16, 17, 18, 19]]))
    sampling = {"do_sample": True, "temperature": 1.5, "top_p": draw(st.sampled_from([1.0, 0.9]))}
    return {
        "prompt": head + draw(st.lists(st.integers(2, 30), min_size=1, max_size=8)),
        "max_new_tokens": draw(st.integers(1, 12)),
        "num_return_sequences": draw(st.sampled_from([1, 1, 3])),
        "seed": draw(st.integers(0, 1 << 40)),
        "eos_token_ids": (1,),
        "min_new_tokens": draw(st.sampled_from([0, 3])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.5])),
        "stop_strings": draw(st.sampled_from([(), ("ab", "dcba")])),
        "cache_salt": draw(st.sampled_from(["", "tenant"])),
    } | (sampling if draw(st.booleans()) else {})


@dataclass
class Coverage:
    """Events of the examples: the property says nothing if no request was preempted or shared a prefix."""

    seen: Counter[str] = field(default_factory=Counter)

    def add(self, engine: Engine) -> None:
        self.seen["preemptions"] += engine.stats.preemptions
        self.seen["prefix_hit_tokens"] += engine.stats.prefix_hit_tokens
        self.seen["copy_on_write_blocks"] += engine.stats.copy_on_write_blocks


def alone(model: CausalLM, spec: dict[str, Any]) -> Answer:
    item = request(**spec)
    return run(make_engine(model, ROOMY), item)[item.request_id]


def fits(config: EngineConfig, item: Request) -> bool:
    params = item.params
    needed = config.blocks_needed(len(item.prompt_token_ids), params.max_new_tokens, params.num_return_sequences)
    return needed <= config.num_blocks


def check_together(
    model: CausalLM, drawn: list[dict[str, Any]], config: EngineConfig, gaps: list[int], coverage: Coverage
) -> None:
    """Submit all that fit, with `gaps` steps in between, and compare each with what it gives alone."""
    engine = make_engine(model, config)
    answers: dict[str, Answer] = {}
    submitted = [(spec, item) for spec in drawn if fits(config, item := request(**spec))]
    for (_, item), gap in zip(submitted, gaps, strict=False):
        engine.add(item)
        for _ in range(gap):
            collect(answers, engine.step())
    run(engine, answers=answers)
    for spec, item in submitted:
        assert answers[item.request_id].ids == alone(model, spec).ids
    assert engine.load().kv_blocks_used == 0
    coverage.add(engine)


def test_a_crowd_that_is_preempted_and_shares_prefixes_gives_the_ids_of_each_alone(model: CausalLM) -> None:
    crowd: list[dict[str, Any]] = [
        {"prompt": [*range(10, 20), i], "max_new_tokens": 12, "num_return_sequences": 1 + 2 * (i % 2), "seed": i,
         "do_sample": True, "temperature": 1.5}
        for i in range(7)
    ]  # fmt: skip
    config = engine_config(num_blocks=34, block_size=2, max_running_sequences=8, max_batch_tokens=24, prefix_cache=True)
    coverage = Coverage()
    check_together(model, crowd, config, [1] * len(crowd), coverage)
    wanted = ("preemptions", "prefix_hit_tokens", "copy_on_write_blocks")
    assert min(coverage.seen[what] for what in wanted) > 0, coverage


@pytest.mark.parametrize("max_batch_tokens", [8, 21, 200])
def test_a_beginning_that_is_shared_in_the_step_that_computes_it_gives_the_same_ids(
    model: CausalLM, max_batch_tokens: int
) -> None:
    config = engine_config(num_blocks=120, block_size=3, max_running_sequences=8, max_batch_tokens=max_batch_tokens)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.5, "seed": 3}
    crowd = [{"prompt": [*range(5, 30), *([8 + i] * (i + 1))], **options} for i in range(6)]
    coverage = Coverage()
    check_together(model, crowd, config, [0] * len(crowd), coverage)
    # 24 of the 25 common tokens fill blocks.
    assert coverage.seen["prefix_hit_tokens"] >= 5 * 24


def test_a_resumed_request_goes_on_with_the_same_ids(model: CausalLM) -> None:
    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(specs(), st.data())
    def check(spec: dict[str, Any], data: st.DataObject) -> None:
        whole = alone(model, spec)
        resumed = [ids[: data.draw(st.integers(0, len(ids)))] for _, ids in sorted(whole.ids.items())]
        rest = alone(model, spec | {"resumed_token_ids": resumed})
        for index, ids in whole.ids.items():
            assert resumed[index] + rest.ids.get(index, []) == ids

    check()


def test_a_stop_string_ends_on_the_very_token_that_completes_it(model: CausalLM) -> None:
    spec = {"prompt": [5, 6, 7], "max_new_tokens": 30, "do_sample": True, "temperature": 3.0, "seed": 1}
    free = alone(model, spec).ids[0]
    text = b"".join(TEXT.bytes_of(token) for token in free).decode()
    for start in range(1, 20, 3):
        stop = text[start : start + 3]
        answer = alone(model, spec | {"stop_strings": (stop,)})
        tokens = (text.index(stop) + len(stop) + 1) // 2
        assert answer.ids[0] == free[:tokens]
        assert answer.finished is not None
        assert answer.finished.completion_tokens == tokens
        assert answer.finished.sequences[0].reason is FinishReason.STOP_STRING
        assert answer.finished.sequences[0].stop_string == stop


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 3}, {"do_sample": True, "top_p": 0.9, "seed": 3}])
def test_a_model_that_gives_no_numbers_fails_only_the_request_concerned(
    model: CausalLM, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    well = [{"prompt": [5, 6, 7 + i], "max_new_tokens": 10} | sampling for i in range(3)]
    expected = [alone(model, spec).ids for spec in well]
    lookup = model._rows
    monkeypatch.setattr(model, "_rows", lambda ids: lookup(ids).masked_fill((ids == 31).unsqueeze(1), float("nan")))
    engine = make_engine(model, ROOMY)
    items = [request(**spec) for spec in well]
    sick = request(
        **({"prompt": [5, 6, 31], "max_new_tokens": 10, "num_return_sequences": 1 + 2 * bool(sampling)} | sampling)
    )
    answers = run(engine, items[0], sick, *items[1:])
    error = answers[sick.request_id].finished.error  # type: ignore[union-attr]
    assert error is not None
    assert error.reason == "MODEL_OUTPUT_NAN"
    assert [answers[item.request_id].ids for item in items] == expected
    assert engine.load().kv_blocks_used == 0


def test_options_that_leave_no_token_end_their_request_alone_and_by_its_own_fault(model: CausalLM) -> None:
    others = [request([7, 8, 9], max_new_tokens=6), request([5, 6], max_new_tokens=6, do_sample=True, seed=3)]
    expected = [run(make_engine(model, ROOMY), item)[item.request_id].ids for item in others]
    # What the trie allows at the second position is forbidden there and everywhere.
    trie = ((40, 41),)
    stuck = request([11, 12], max_new_tokens=6, eos_token_ids=(1,), allowed_token_trie=trie, suppress_tokens=(41,))
    answers = run(make_engine(model, ROOMY), others[0], stuck, others[1])
    finished = answers[stuck.request_id].finished
    assert finished is not None
    assert finished.error is not None
    assert (finished.error.code.name, finished.error.reason) == ("INVALID_ARGUMENT", "NO_TOKEN_LEFT")
    assert answers[stuck.request_id].ids[0] == [40]
    assert [answers[item.request_id].ids for item in others] == expected
