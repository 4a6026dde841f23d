"""Four times more work than the KV pool holds: the same ids in every mode, whichever way a request gives way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import Answer, collect, engine_config, run
from factories.engine.host_pools import host_fields
from factories.engine.mixed import MODES, Draw, drafted, mixed_request, structured, textual
from factories.engine.modes import load_service, new_engine, prepare, to_message
from factories.models.checkpoints import tiny_checkpoint
from factories.models.golden_models import golden_checkpoint
from penstock.common.checkpoint import demo_folder
from penstock.generation.core.request import Request
from penstock.generation.engine.acceptance import output_limit
from penstock.generation.engine.config import AUTO, RECOMPUTE, SWAP
from penstock.generation.engine.decoding.mode_registry import MODES as REGISTRY
from penstock.generation.engine.engine import Engine
from penstock.generation.startup.loaded_model import LoadedModel

CONCURRENT = 10
OVERCOMMIT = 4
BLOCK_SIZE = 4
RANDOM_MODES: Mapping[str, Draw] = {**MODES, "drafted": drafted("draft")}
# One sequence, several, several that go in lockstep, a second model; the others are for `make slow`.
USUAL = {"sample", "beam"}
TEXT_MODES = ("structured", "textual")


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    # Eight layers, so that DoLa has some to contrast.
    draft = golden_checkpoint(folder / "draft", "golden-deep", noise=0.02)
    served = golden_checkpoint(folder / "model", "golden-deep")
    return load_service(served, assistant_model=str(draft), assistant_kv_memory="1MiB")


@pytest.fixture(scope="module")
def int8_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    folder = golden_checkpoint(tmp_path_factory.mktemp("int8") / "model", "golden-qwen2")
    return load_service(folder, kv_cache_dtype="int8")


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    folder = tiny_checkpoint(tmp_path_factory.mktemp("latent"), "deepseek_v3", num_hidden_layers=4)
    return load_service(folder)


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    return load_service(
        tiny_checkpoint(
            tmp_path_factory.mktemp("sparse"),
            "glm_moe_dsa",
            num_hidden_layers=4,
            indexer_types=["full", "shared", "full", "full"],
        )
    )


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    torch.set_num_threads(1)
    folder = demo_folder()
    return load_service(folder, assistant_model=str(folder), assistant_kv_memory="4MiB")


def requests(loaded: LoadedModel, draw: Draw, seed: int) -> list[dict[str, Any]]:
    """Requests of one mode, long enough to be in each other's way."""
    random, specs = Random(seed), []
    while len(specs) < CONCURRENT:
        spec = mixed_request(random, {"wanted": draw})
        spec = {name: value for name, value in spec.items() if name in ("prompt", "seed", "cache_salt")}
        specs.append({**spec, "max_new_tokens": random.randint(12, 20), "eos_token_id": 7, **draw(random)})
    return specs


def made(loaded: LoadedModel, specs: list[dict[str, Any]]) -> list[Request]:
    return [
        prepare(loaded, to_message(spec["prompt"], {name: value for name, value in spec.items() if name != "prompt"}))
        for spec in specs
    ]


ROOMY_FIELDS: dict[str, Any] = {
    "num_blocks": 400,
    "block_size": BLOCK_SIZE,
    "max_context_tokens": 256,
    "max_batch_tokens": 200,
    "max_running_sequences": 64,
}


def alone(loaded: LoadedModel, specs: list[dict[str, Any]]) -> tuple[list[Any], int]:
    """Ids of each request on an engine of its own, and a quarter of the blocks that all of them need together."""
    roomy, found, needed, least = engine_config(**ROOMY_FIELDS), [], 0, 0
    for item in made(loaded, specs):
        engine, answers, most = new_engine(loaded, roomy), dict[str, Answer](), 0
        engine.add(item)
        while engine.has_work:
            collect(answers, engine.step())
            most = max(most, engine.device_blocks.num_used)
        found.append(answers[item.request_id].ids)
        needed += most
        # No smaller than admission lets it be for any of them.
        output = output_limit(roomy, item)
        least = max(least, REGISTRY.blocks_needed(roomy, item.params, len(item.prompt_token_ids), output))
    return found, max(needed // OVERCOMMIT, least)


def overcommitted(loaded: LoadedModel, items: list[Request], num_blocks: int, way: str) -> tuple[Engine, Any]:
    """Run the requests in a pool of so many blocks, one joining a step; the engine and ids by place."""
    fields = {**ROOMY_FIELDS, "num_blocks": num_blocks, "reserve_share": 0.0}
    engine = new_engine(loaded, engine_config(**fields, **host_fields(800, way)))
    answers: dict[str, Answer] = {}
    for item in items:
        engine.add(item)
        collect(answers, engine.step())
        engine.check_integrity()
    run(engine, answers=answers)
    load = engine.load()
    assert (load.kv_blocks_used, load.host_blocks_used, load.swapped_requests) == (0, 0, 0)
    for item in items:
        finished = answers[item.request_id].finished
        assert finished is not None
        assert finished.error is None
    return engine, [answers[item.request_id].ids for item in items]


def check_mode(loaded: LoadedModel, draw: Draw, ways: Sequence[str] = (SWAP, RECOMPUTE)) -> None:
    specs = requests(loaded, draw, seed=15)
    wanted, num_blocks = alone(loaded, specs)
    for way in ways:
        engine, ids = overcommitted(loaded, made(loaded, specs), num_blocks, way)
        assert ids == wanted, way
        assert engine.stats.preemptions, way
        assert (engine.stats.swaps > 0) == (way != RECOMPUTE), way


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode in USUAL else [pytest.mark.slow]) for mode in RANDOM_MODES]
)
def test_the_same_ids_in_every_mode_and_way(random_model: LoadedModel, mode: str) -> None:
    check_mode(random_model, RANDOM_MODES[mode], (SWAP, RECOMPUTE, AUTO))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mode", TEXT_MODES)
def test_the_same_ids_with_a_grammar_stop_strings_and_healing(demo: LoadedModel, mode: str) -> None:
    check_mode(demo, {"structured": structured(demo.served.assistant_model), "textual": textual}[mode])


@pytest.mark.slow
def test_the_same_ids_where_keys_and_values_are_int8(int8_model: LoadedModel) -> None:
    check_mode(int8_model, MODES["sample"])


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode in USUAL else [pytest.mark.slow]) for mode in MODES]
)
def test_the_same_ids_where_a_token_keeps_one_row(latent_model: LoadedModel, mode: str) -> None:
    assert not latent_model.pools.kv.has_values
    check_mode(latent_model, MODES[mode])


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "beam" else [pytest.mark.slow]) for mode in MODES]
)
def test_the_same_ids_where_a_token_keeps_index_keys(sparse_model: LoadedModel, mode: str) -> None:
    assert len(sparse_model.pools.kv.parts) == 2
    check_mode(sparse_model, MODES[mode])


def test_prefixes_that_went_to_the_host_pool_give_the_same_ids(random_model: LoadedModel) -> None:
    specs = [
        {"prompt": [*range(30 + 40 * (number % 4), 62 + 40 * (number % 4)), number], "max_new_tokens": 6, "seed": 3}
        for number in range(CONCURRENT)
    ]
    wanted, _ = alone(random_model, specs)
    fields = {**ROOMY_FIELDS, "num_blocks": 16, "max_running_sequences": 1, **host_fields(60, AUTO)}
    engine = new_engine(random_model, engine_config(**fields))
    items = made(random_model, specs)
    answers = run(engine, *items)
    assert [answers[item.request_id].ids for item in items] == wanted
    assert engine.stats.host_prefix_hit_tokens > 0
