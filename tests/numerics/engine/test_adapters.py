"""LoRA adapters in the engine: every decoding mode, beside others and none, preempted, with the prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import Answer, collect, engine_config, run
from factories.engine.mixed import drafted, mixed_request
from factories.engine.modes import ROOMY, generate, load_service, new_engine, prepare, to_message
from factories.models.adapters import LAYER_TARGETS, lora_folder, merged_checkpoint
from factories.models.golden_models import golden_checkpoint
from penstock.common.errors import NotFound
from penstock.generation.core.request import Purpose
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.score_embed_commands import (
    EmbedCommand,
    ScoreCommand,
    ScoreItem,
    check_embed,
    check_score,
    embed_requests,
    score_requests,
)
from penstock.generation.startup.loaded_model import LoadedModel

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 5, 6, 7, 8]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": 3},
    "beam": {"num_beams": 4, "num_return_sequences": 2},
    "beam-sample": {"num_beams": 3, "do_sample": True, "temperature": 1.2},
    "group": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
    "constrained": {"num_beams": 3, "force_words_ids": [[45, 46], [99]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "lookup": {"prompt_lookup_num_tokens": 4, "repetition_penalty": 0.5},
    "drafted": {"assistant_model": "draft", "num_assistant_tokens": 3},
    "dola": {"dola_layers": "low"},
    "guided": {"guidance_scale": 1.7, "negative_prompt_ids": [88, 89, 90]},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "top_logprobs": 2},
}
TARGETS: dict[str, tuple[str, ...]] = {
    "small": LAYER_TARGETS,
    "attention": ("q_proj", "v_proj"),
    "whole": (*LAYER_TARGETS, "lm_head", "embed_tokens"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, its draft model, adapters, and the model with each of them merged."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    model = golden_checkpoint(folder / "model", "golden-deep")
    found = {"model": model, "draft": golden_checkpoint(folder / "draft", "golden-deep", noise=0.02)}
    for number, (name, targets) in enumerate(TARGETS.items()):
        adapter = lora_folder(folder / name, model, rank=4 << number, seed=number, targets=targets, strength=0.1)
        found[name] = adapter
        found[f"merged-{name}"] = merged_checkpoint(folder / f"merged-{name}", model, adapter)
    return found


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> LoadedModel:
    lora = tuple(f"{name}={folders[name]}" for name in TARGETS)
    return load_service(folders["model"], assistant_model=str(folders["draft"]), assistant_kv_memory="4MiB", lora=lora)


@pytest.fixture(scope="module")
def merged(folders: dict[str, Path]) -> dict[str, LoadedModel]:
    return {
        name: load_service(folders[f"merged-{name}"], assistant_model=str(folders["draft"]), assistant_kv_memory="4MiB")
        for name in TARGETS
    }


@pytest.mark.thinned(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TARGETS)
def test_every_mode_gives_the_ids_of_the_merged_model(
    loaded: LoadedModel, merged: dict[str, LoadedModel], mode: str, name: str
) -> None:
    arguments = {"max_new_tokens": 12, "seed": 7, "ignore_eos": True, **MODES[mode]}
    found = generate(loaded, PROMPT, {**arguments, "adapter": name})
    assert found.ids == generate(merged[name], PROMPT, arguments).ids


def test_an_adapter_changes_the_ids(loaded: LoadedModel) -> None:
    arguments = {"max_new_tokens": 12, "ignore_eos": True}
    answers = [generate(loaded, PROMPT, arguments).ids]
    answers += [generate(loaded, PROMPT, {**arguments, "adapter": name}).ids for name in TARGETS]
    assert len({str(ids) for ids in answers}) == len(answers)


def message(spec: Mapping[str, Any]) -> Any:
    return to_message(spec["prompt"], {name: value for name, value in spec.items() if name != "prompt"})


def test_mixed_requests_with_adapters_and_without_give_what_each_gives_alone(loaded: LoadedModel) -> None:
    random = Random(3)
    specs = [mixed_request(random, {"drafted": drafted("draft")}) for _ in range(28)]
    for spec in specs:
        if random.random() < 0.75:
            spec["adapter"] = random.choice(list(TARGETS))
    config = engine_config(
        num_blocks=64, block_size=4, max_context_tokens=100, max_running_sequences=32, max_batch_tokens=64
    )
    engine = new_engine(loaded, config)
    answers: dict[str, Answer] = {}
    items = [prepare(loaded, message(spec)) for spec in specs]
    for item in items:
        engine.add(item)
        collect(answers, engine.step())
        engine.check_integrity()
    run(engine, answers=answers)
    assert engine.stats.preemptions
    assert engine.stats.prefix_hit_tokens
    for spec, item in zip(specs, items, strict=True):
        alone = prepare(loaded, message(spec))
        expected = run(new_engine(loaded, ROOMY), alone)[alone.request_id]
        assert answers[item.request_id].ids == expected.ids, spec


def test_an_unknown_adapter_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(NotFound) as caught:
        prepare(loaded, to_message(PROMPT, {"adapter": "nobody"}))
    assert (caught.value.reason, caught.value.field) == ("ADAPTER_NOT_FOUND", "adapter")
    limits = RequestLimits()
    with pytest.raises(NotFound):
        check_score(ScoreCommand([ScoreItem([1], [2])], adapter="nobody"), loaded.served, limits)
    with pytest.raises(NotFound):
        check_embed(EmbedCommand([[1]], adapter="nobody"), loaded.served, limits, 8)


def test_cached_blocks_belong_to_one_reading_of_one_adapter(folders: dict[str, Path]) -> None:
    loaded = load_service(folders["model"], lora=(f"small={folders['small']}",))
    engine = new_engine(loaded, engine_config(num_blocks=200, block_size=4, max_context_tokens=200))

    def cached(**arguments: Any) -> int:
        item = prepare(loaded, to_message(PROMPT, {"max_new_tokens": 2, **arguments}))
        finished = run(engine, item)[item.request_id].finished
        assert finished is not None
        return finished.cached_tokens

    assert cached() == 0
    assert cached(adapter="small") == 0
    assert cached() == cached(adapter="small") == 12
    loaded.weights.adapters.load("small", folders["attention"], replace=True)
    assert cached(adapter="small") == 0
    assert cached(adapter="small") == 12


def test_score_and_embed_have_adapters(loaded: LoadedModel, merged: dict[str, LoadedModel]) -> None:
    for name in TARGETS:
        adapter = loaded.weights.adapters.get(name)
        results = []
        for model, with_adapter in ((loaded, adapter), (merged[name], None)):
            score = score_requests(ScoreCommand([ScoreItem(PROMPT[:5], PROMPT[5:])]), 0.0, None, with_adapter)
            embed = embed_requests(EmbedCommand([PROMPT]), 0.0, None, with_adapter)
            assert [item.purpose for item in (*score, *embed)] == [Purpose.SCORE, Purpose.EMBED]
            answers = run(new_engine(model), *score, *embed)
            found = answers[score[0].request_id]
            assert found.started is not None
            finished = answers[embed[0].request_id].finished
            assert finished is not None
            assert finished.embedding is not None
            results.append(
                (
                    torch.tensor([entry.chosen.logprob for entry in found.started.prompt_logprobs if entry.chosen]),
                    torch.frombuffer(bytearray(finished.embedding), dtype=torch.float32),
                )
            )
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
