"""Prompts of embeddings in the engine: every mode, in any company, in chunks, preempted; which blocks they share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from factories.engine.fake_engine import Answer, collect, engine_config, run
from factories.engine.mixed import MODES, mixed_request
from factories.engine.modes import ROOMY, generate, load_service, new_engine, prepare, to_message
from factories.models.golden_models import VOCAB_SIZE, golden_checkpoint
from penstock.generation.core.request import Request
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine
from penstock.generation.startup.loaded_model import LoadedModel
from safetensors.torch import load_file, save_file

HIDDEN = 48
# Ids whose rows stand for embeddings in one of the two models below; no mode draws one.
PLANTED = list(range(300, 313))


class Pair(NamedTuple):
    """A model, the same with other rows in its table for PLANTED, and those rows."""

    model: LoadedModel
    planted: LoadedModel
    rows: torch.Tensor


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    # Eight layers, so that DoLa has some to contrast; the head is not the table.
    plain, planted = (golden_checkpoint(folder / name, "golden-deep") for name in ("plain", "planted"))
    rows = torch.randn(len(PLANTED), HIDDEN, generator=torch.Generator().manual_seed(2)) * 0.2
    (file,) = planted.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][PLANTED] = rows
    save_file(tensors, file, metadata={"format": "pt"})
    return Pair(load_service(plain), load_service(planted), rows)


def summary(loaded: LoadedModel, ids: list[int], arguments: Mapping[str, Any]) -> Any:
    found = generate(loaded, ids, arguments)
    finished = found.answer.finished
    assert finished is not None
    return found.ids, [end.reason for end in finished.sequences], finished.prompt_tokens


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.thinned(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_gives_for_rows_what_it_gives_for_ids_with_these_rows(pair: Pair, mode: str, seed: int) -> None:
    options = {**MODES[mode](Random(seed)), "max_new_tokens": 14, "seed": seed, "eos_token_id": [7, 40, 93, 117]}
    options["suppress_tokens"] = PLANTED
    if mode == "guided":
        options["negative_prompt_ids"] = [88, 89]
    expected = summary(pair.planted, PLANTED, options)
    # The options look at ids, which are the same.
    assert summary(pair.model, PLANTED, {**options, "inputs_embeds": pair.rows}) == expected
    # And after them, where some of the prompt has no ids: options that look at the output alone.
    plain = {name: value for name, value in options.items() if name != "repetition_penalty"}
    tail = [50, 51]
    after = {**plain, "inputs_embeds": pair.rows, "inputs_embeds_before_ids": True}
    assert summary(pair.model, tail, after) == summary(pair.planted, [*PLANTED, *tail], plain)
    alone = summary(pair.model, [], {**plain, "inputs_embeds": pair.rows})
    assert alone == (expected if plain == options else summary(pair.planted, PLANTED, plain))


@pytest.mark.parametrize("rows_a_step", [1, 5, 64])
def test_tensors_of_the_output_are_those_of_the_ids(pair: Pair, rows_a_step: int) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "suppress_tokens": PLANTED}
    options |= {"output_hidden_states": True, "output_logits": True, "output_attentions": True}
    config = engine_config(max_batch_tokens=rows_a_step, max_running_sequences=1)
    answers = []
    for loaded, ids, more in ((pair.planted, PLANTED, {}), (pair.model, [], {"inputs_embeds": pair.rows})):
        item = prepare(loaded, to_message(ids, {**options, **more}), config.block_size)
        answers.append(run(new_engine(loaded, config), item)[item.request_id])
    for one, other in zip(answers[0].deltas, answers[1].deltas, strict=True):
        assert one.tensors == other.tensors
        assert one.tensors[0] is not None


def requests(pair: Pair, specs: list[dict[str, Any]], block_size: int) -> list[Request]:
    made = []
    for spec in specs:
        options = {name: value for name, value in spec.items() if name not in ("prompt", "rows")}
        if "rows" in spec:
            options["inputs_embeds"] = pair.rows[spec["rows"]]
        made.append(prepare(pair.model, to_message(spec["prompt"], options), block_size))
    return made


def spec_of(random: Random) -> dict[str, Any]:
    """A request of any mode and any options, every other one with embeddings in place of its ids or before them."""
    spec = mixed_request(random, {})
    if random.random() < 0.5:
        return spec
    # Heads that are the same now and then, so that blocks are shared.
    spec["rows"] = [*range(random.choice([4, 9])), *(random.randrange(13) for _ in range(random.randint(0, 4)))]
    spec["inputs_embeds_before_ids"] = random.random() < 0.5
    if not spec["inputs_embeds_before_ids"]:
        spec["prompt"] = spec["prompt"][: random.choice([0, len(spec["rows"])])]
    if "guidance_scale" in spec and not spec["prompt"]:
        spec["negative_prompt_ids"] = [88, 89]
    return spec


def test_requests_of_every_mode_beside_ordinary_ones_give_what_each_gives_alone(pair: Pair) -> None:
    seen = Counter[str]()
    alone: dict[str, Answer] = {}
    for seed in range(2):
        random = Random(seed)
        specs = [spec_of(random) for _ in range(32)]
        config = engine_config(
            num_blocks=random.randint(48, 60),
            block_size=random.randint(3, 5),
            max_context_tokens=100,
            max_running_sequences=random.randint(16, 40),
            max_batch_tokens=random.randint(40, 60),
        )
        engine, answers = new_engine(pair.model, config), dict[str, Answer]()
        items = requests(pair, specs, config.block_size)
        for item in items:
            engine.add(item)
            collect(answers, engine.step())
            engine.check_integrity()
        run(engine, answers=answers)
        for spec, item in zip(specs, items, strict=True):
            key = json.dumps(spec, sort_keys=True)
            if key not in alone:
                (single,) = requests(pair, [spec], ROOMY.block_size)
                alone[key] = run(new_engine(pair.model), single)[single.request_id]
            assert_same(answers[item.request_id], alone[key], spec)
        assert engine.load().kv_blocks_used == 0
        preempted = engine.stats.preemptions
        seen.update(preemptions=preempted, hits=engine.stats.prefix_hit_tokens)
    # It says nothing if nobody gave way or shared a block.
    assert min(seen.values()) > 0, seen


def assert_same(one: Answer, other: Answer, spec: dict[str, Any]) -> None:
    assert one.finished is not None
    assert other.finished is not None
    assert (one.finished.error, other.finished.error) == (None, None), spec
    assert one.ids == other.ids, spec
    ends = [[(end.reason, end.num_tokens) for end in answer.finished.sequences] for answer in (one, other)]  # type: ignore[union-attr]
    assert ends[0] == ends[1], spec


@pytest.mark.parametrize("rows_a_step", [1, 200, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 3, 7))])
def test_the_size_of_the_steps_changes_nothing(pair: Pair, rows_a_step: int) -> None:
    options = {"prompt": [], "rows": list(range(13)), "max_new_tokens": 10, "do_sample": True, "seed": 1}
    config = engine_config(max_batch_tokens=rows_a_step, max_running_sequences=1)
    (item,) = requests(pair, [options], config.block_size)
    (plain,) = requests(pair, [options], ROOMY.block_size)
    expected = run(new_engine(pair.model), plain)[plain.request_id].ids
    engine = new_engine(pair.model, config)
    assert run(engine, item)[item.request_id].ids == expected
    assert engine.stats.steps >= 13 // rows_a_step


@pytest.mark.parametrize(
    "mode",
    ["sample", "beam", "contrastive", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("greedy", "lookup"))],
)
def test_a_preempted_request_goes_on_as_if_nothing_had_been(pair: Pair, mode: str) -> None:
    specs = [
        {**MODES[mode](Random(1)), "prompt": [], "rows": [seed, *range(12)], "max_new_tokens": 16, "seed": seed}
        for seed in range(5)
    ]
    config = engine_config(num_blocks=24, max_running_sequences=20, prefix_cache=False)
    items = requests(pair, specs, config.block_size)
    engine = new_engine(pair.model, config)
    answers = run(engine, *items)
    assert engine.stats.preemptions > 0
    for spec, item in zip(specs, items, strict=True):
        (single,) = requests(pair, [spec], ROOMY.block_size)
        assert_same(answers[item.request_id], run(new_engine(pair.model), single)[single.request_id], spec)


@pytest.mark.parametrize("before_ids", [False, True])
def test_a_resumed_request_goes_on_with_the_same_ids(pair: Pair, before_ids: bool) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "seed": 3, "inputs_embeds": pair.rows}
    ids = [50, 51] if before_ids else []
    message = to_message(ids, {**options, "inputs_embeds_before_ids": before_ids})
    whole = run(new_engine(pair.model), prepare(pair.model, message)).popitem()[1].ids[0]
    for emitted in (1, 5, 11):
        again = type(message)()
        again.CopyFrom(message)
        again.resumed_token_ids.add(ids=whole[:emitted])
        assert run(new_engine(pair.model), prepare(pair.model, again)).popitem()[1].ids[0] == whole[emitted:]


class Hits:
    """Requests one after the other on one engine: their cached tokens; their ids must be those of a new engine."""

    def __init__(self, pair: Pair, config: EngineConfig = ROOMY) -> None:
        self._pair = pair
        self._engine: Engine = new_engine(pair.model, config)

    def __call__(self, rows: torch.Tensor | None, ids: list[int] | None = None, **options: Any) -> int:
        arguments = {"max_new_tokens": 5, **options}
        if rows is not None:
            arguments["inputs_embeds"] = rows
        message = to_message(ids or [], arguments)
        item, fresh = (prepare(self._pair.model, message) for _ in range(2))
        answer = run(self._engine, item)[item.request_id]
        assert answer.ids == run(new_engine(self._pair.model), fresh)[fresh.request_id].ids
        assert answer.started is not None
        return answer.started.cached_tokens


def test_equal_rows_share_their_blocks(pair: Pair) -> None:
    hits = Hits(pair)
    assert hits(pair.rows) == 0
    # 13 rows, blocks of 4, and the last row is computed always.
    assert hits(pair.rows) == 12
    # What the model reads is the same, whatever ids stand beside it.
    assert hits(pair.rows, list(range(13))) == 12
    assert hits(pair.rows[:9]) == 8
    assert hits(torch.cat([pair.rows[:9], pair.rows[:4]])) == 8
    # As float64 they become the same float32.
    assert hits(pair.rows.double()) == 12


def test_a_conversation_goes_on_from_the_blocks_of_its_rows(pair: Pair) -> None:
    hits = Hits(pair)
    ids = [60, 61, 62, 63, 64, 65, 66]
    assert hits(pair.rows, ids, inputs_embeds_before_ids=True) == 0
    # Of 20 tokens all but the last block; its third block holds a row and three ids.
    assert hits(pair.rows, ids, inputs_embeds_before_ids=True) == 16
    assert hits(pair.rows, [*ids, 70, 71], inputs_embeds_before_ids=True) == 20
    assert hits(pair.rows, [60, 99, 62, 63], inputs_embeds_before_ids=True) == 12


def test_other_rows_of_the_same_length_share_nothing(pair: Pair) -> None:
    hits = Hits(pair)
    assert hits(pair.rows) == 0
    one_value = pair.rows.clone()
    one_value[0, 0] += 1e-3
    assert hits(one_value) == 0
    assert hits(pair.rows.flip(0)) == 0
    assert hits(-pair.rows) == 0
    last = pair.rows.clone()
    last[11, -1] += 1e-3
    assert hits(last) == 8


def test_rows_and_ids_share_nothing(pair: Pair) -> None:
    hits = Hits(pair)
    ids = [*range(60, 73)]
    table = pair.model.weights.model.embed(torch.tensor(ids)).clone()
    assert hits(None, ids) == 0
    # The very rows that the ids have: nothing tells that they are, and nothing goes wrong.
    assert hits(table) == 0
    assert hits(pair.rows, ids) == 0
    assert hits(None, ids) == 12
    assert hits(None, [*ids[:8], 1, 2, 3]) == 8


def test_salts_keep_equal_rows_apart(pair: Pair) -> None:
    hits = Hits(pair)
    assert hits(pair.rows, cache_salt="one") == 0
    assert hits(pair.rows, cache_salt="two") == 0
    assert hits(pair.rows, cache_salt="one") == 12


def test_rows_that_are_computed_in_one_step_are_shared_only_where_they_are_equal(pair: Pair) -> None:
    # All at once: the first computes what those after it may read in the same step.
    other = pair.rows.clone()
    other[5] *= 2
    tensors = [pair.rows, other, pair.rows, torch.cat([pair.rows[:8], other[8:].flip(0)]), other]
    messages = [to_message([], {"max_new_tokens": 8, "inputs_embeds": rows}) for rows in tensors]
    items = [prepare(pair.model, message) for message in messages]
    engine = new_engine(pair.model)
    answers = run(engine, *items)
    for message, item in zip(messages, items, strict=True):
        fresh = prepare(pair.model, message)
        assert answers[item.request_id].ids == run(new_engine(pair.model), fresh)[fresh.request_id].ids
    cached = [answers[item.request_id].started for item in items]
    assert [one.cached_tokens for one in cached if one is not None] == [0, 4, 12, 8, 12]


def test_the_last_id_of_the_vocabulary_is_no_placeholder(pair: Pair) -> None:
    hits = Hits(pair)
    assert hits(pair.rows, repetition_penalty=1.4, no_repeat_ngram_size=1) == 0
    assert hits(None, [VOCAB_SIZE - 1] * 13, repetition_penalty=1.4, no_repeat_ngram_size=1) == 0


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", [{"max_new_tokens": 20}, {"max_new_tokens": 12, "do_sample": True, "seed": 2}])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["golden-qwen2", "golden-llama"], ids=["apart", "tied"])
def test_narrow_weights_read_rows_as_they_read_ids(
    tmp_path: Path, name: str, quantization: str, options: dict[str, Any]
) -> None:
    loaded = load_service(golden_checkpoint(tmp_path / name, name), dtype="bfloat16", quantization=quantization)
    ids = [*range(60, 83)]
    rows = loaded.weights.model.embed(torch.tensor(ids)).clone()
    assert rows.dtype is torch.bfloat16
    expected = generate(loaded, ids, options).ids
    assert generate(loaded, [], {**options, "inputs_embeds": rows}).ids == expected
    assert generate(loaded, [], {**options, "inputs_embeds": rows.float()}).ids == expected
