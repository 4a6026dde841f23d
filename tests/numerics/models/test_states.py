"""Models whose layers keep a state give transformers' ids: together, in modes, after preemption; no state is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import engine_config, request, run
from factories.engine.model_engine import ROOMY, check_company, model_engine
from factories.engine.modes import generate, load_service
from factories.models.model_types import (
    FURTHER_STATEFUL,
    STATEFUL,
    check_ids,
    greedy_ids,
    reference_of,
    tiny_model_type,
)
from factories.models.run_kernels import cpu_device
from factories.models.transformers_reference import reference_answer
from penstock.common.errors import InvalidArgument, StartupError
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.core.request import Request
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import load_model
from penstock.generation.models.transformers_states import StatefulModel
from penstock.generation.startup.loaded_model import LoadedModel

PROMPT = [7, 91, 33, 12, 7, 91, 33, 56, 101, 14, 7, 91]
FALLBACK = ModelRoute("fallback")


def loaded_model(folder: Path) -> LanguageModel:
    torch.set_num_threads(1)
    return load_model(folder, dtype="float32", device=cpu_device(), route=FALLBACK)


def num_states(engine: Engine) -> int:
    states = engine._runner._states  # type: ignore[attr-defined]
    assert states is not None
    return int(states.num_used)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_service(tiny_model_type(tmp_path_factory.mktemp("model"), "granitemoehybrid"))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("model_type", STATEFUL)
def test_a_hybrid_gives_the_ids_of_generate(tmp_path: Path, model_type: str) -> None:
    check_ids(tiny_model_type(tmp_path, model_type), loaded_model(tmp_path), new_tokens=12)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*STATEFUL, *FURTHER_STATEFUL])
def test_every_type_gives_64_ids_of_generate(tmp_path: Path, model_type: str) -> None:
    check_ids(tiny_model_type(tmp_path, model_type), loaded_model(tmp_path))


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "jamba"])
def test_prompts_of_one_length_are_a_batch_and_give_the_ids_of_generate(tmp_path: Path, model_type: str) -> None:
    model = loaded_model(tiny_model_type(tmp_path, model_type))
    assert isinstance(model, StatefulModel)
    # Its modules go on from a state by one token only.
    assert model.continues == (model_type != "jamba")
    passes: list[tuple[int, int]] = []
    hook = model.causal.get_input_embeddings().register_forward_pre_hook(
        lambda _, arguments: passes.append(tuple(arguments[0].shape))
    )
    prompts = [PROMPT, PROMPT[::-1], [5, *PROMPT[1:]]]
    config = engine_config(num_blocks=40, block_size=4, max_batch_tokens=27, prefix_cache=False)
    found = run(
        model_engine(model, config),
        *(request(prompt, max_new_tokens=4, request_id=str(place)) for place, prompt in enumerate(prompts)),
    )
    hook.remove()
    reference = reference_of(tmp_path)
    for place, prompt in enumerate(prompts):
        assert found[str(place)].ids == {0: greedy_ids(reference, prompt, 4)}
    # The third prompt in two parts, the first two together.
    assert (2, 12) in passes
    assert all(rows == 1 or length in (1, 12) for rows, length in passes)


def test_beams_are_those_of_transformers(loaded: LoadedModel) -> None:
    arguments = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 10, "eos_token_id": 2}
    expected, scores = reference_answer(reference_of(loaded.files.folder), PROMPT, arguments)
    answer = generate(loaded, PROMPT, arguments)
    assert answer.ids == expected
    assert answer.scores == pytest.approx(scores, rel=1e-4, abs=1e-4)


def test_answers_do_not_depend_on_others_beside_them(loaded: LoadedModel) -> None:
    def requests() -> list[Request]:
        return [
            request(PROMPT[:5], max_new_tokens=9, request_id="greedy"),
            request(PROMPT, max_new_tokens=7, request_id="drawn", do_sample=True, seed=11, num_return_sequences=3),
            request(PROMPT[3:], max_new_tokens=7, request_id="contrastive", mode=ContrastiveOptions(0.6, 4)),
            request([4, *PROMPT, *PROMPT], max_new_tokens=9, request_id="long", do_sample=True, seed=3),
        ]

    config = engine_config(num_blocks=12, max_batch_tokens=10, max_running_sequences=9)
    engine = check_company(loaded.weights.model, requests, config)
    assert engine.stats.preemptions > 0
    assert num_states(engine) == 0


def test_an_aborted_request_gives_its_states_back(loaded: LoadedModel) -> None:
    engine = model_engine(loaded.weights.model, ROOMY)
    engine.add(request(PROMPT, max_new_tokens=9, request_id="gone", do_sample=True, num_return_sequences=3))
    engine.add(request(PROMPT, max_new_tokens=5, request_id="stays"))
    for _ in range(3):
        engine.step()
    assert num_states(engine) == 4
    assert engine.abort("gone")
    engine.step()
    assert num_states(engine) == 1
    while engine.has_work:
        engine.step()
    assert num_states(engine) == 0


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("config.dola_layers", {"dola_layers": "low"}),
        ("output.output_attentions", {"output_attentions": True}),
    ],
)
def test_what_needs_hidden_states_is_refused(loaded: LoadedModel, field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        generate(loaded, PROMPT, arguments)
    assert refused.value.field == field


def test_a_prompt_goes_on_behind_the_last_block_with_a_snapshot(loaded: LoadedModel) -> None:
    prompt = [*PROMPT, *reversed(PROMPT), 5]
    engine = model_engine(loaded.weights.model, replace(ROOMY, block_size=4, max_batch_tokens=200))
    wanted = run(engine, request(prompt, request_id="first"))["first"].ids
    again = run(engine, request(prompt, request_id="again"))["again"]
    assert again.ids == wanted
    # All but the last token; blocks alone, without the state after them, do not count.
    assert engine.stats.prefix_hit_tokens == 24
    shorter = run(engine, request(prompt[:19], request_id="shorter"))["shorter"]
    assert engine.stats.prefix_hit_tokens == 24
    assert shorter.ids == run(model_engine(loaded.weights.model, ROOMY), request(prompt[:19], request_id="a"))["a"].ids
    longer = run(engine, request([*prompt[:18], 9, 9, 9], request_id="longer"))["longer"]
    assert engine.stats.prefix_hit_tokens == 24 + 16
    fresh = run(model_engine(loaded.weights.model, ROOMY), request([*prompt[:18], 9, 9, 9], request_id="a"))["a"]
    assert longer.ids == fresh.ids


def test_modules_that_go_on_token_by_token_have_no_prefix_cache(tmp_path: Path) -> None:
    loaded = load_service(tiny_model_type(tmp_path, "jamba"))
    assert loaded.pools.kv.states is not None
    assert (loaded.engine.config.prefix_cache, loaded.pools.kv.states.num_snapshots) == (False, 0)


def test_guidance_is_that_of_transformers(loaded: LoadedModel) -> None:
    arguments = {"guidance_scale": 1.5, "max_new_tokens": 8, "eos_token_id": 2}
    expected, _ = reference_answer(reference_of(loaded.files.folder), PROMPT, arguments)
    assert generate(loaded, PROMPT, arguments).ids == expected


def test_the_plan_of_memory_has_the_states(loaded: LoadedModel) -> None:
    loaded = load_service(loaded.files.folder, state_snapshot_tokens=64)
    states = loaded.pools.kv.states
    assert states is not None
    assert states.num_slots == loaded.engine.config.max_running_sequences
    assert (loaded.engine.config.prefix_cache, states.num_snapshots) == (True, 32)
    assert states.num_bytes == (states.num_slots + 32) * states.bytes_per_slot > 0
    assert loaded.engine.config.state_snapshot_tokens == 64
    # The last: no prompt is as long.
    for without in ({"prefix_cache": False}, {"state_snapshots": 0}, {}):
        other = load_service(loaded.files.folder, **without)
        assert other.pools.kv.states is not None
        assert (other.engine.config.prefix_cache, other.pools.kv.states.num_snapshots) == (False, 0)
    with pytest.raises(StartupError, match="layers of this model keep a state") as refused:
        load_service(loaded.files.folder, host_kv_memory="1MiB")
    assert refused.value.flag == "--host-kv-memory"


def test_states_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="in another form than that of transformers' cache"):
        loaded_model(tiny_model_type(tmp_path, "rwkv"))
