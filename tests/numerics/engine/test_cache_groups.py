"""Models whose layers keep different parts of a context: generate()'s ids whatever happens to their blocks, in odd
configurations drawn anew in each run, and no more memory than the windows need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import Answer, collect, engine_config, request, run
from factories.engine.model_engine import model_engine
from factories.engine.pools import in_groups
from factories.models.model_types import VOCAB_SIZE, reference_of, tiny_model_type
from factories.models.run_kernels import cpu_device
from penstock.generation.core.request import Request
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import load_model
from transformers import GenerationConfig, PreTrainedModel

NEW_TOKENS = 14
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def mixed(random: Random, other: str = SLIDING) -> list[str]:
    """Return kinds of 3 to 7 layers, both at least once."""
    kinds = [FULL, other, *(random.choice([FULL, other, other]) for _ in range(random.randint(1, 5)))]
    random.shuffle(kinds)
    return kinds


def windows(random: Random) -> dict[str, Any]:
    kinds = mixed(random)
    return {"layer_types": kinds, "num_hidden_layers": len(kinds), "sliding_window": random.randint(3, 21)}


def chunks(random: Random) -> dict[str, Any]:
    kinds = mixed(random, CHUNKED)
    return {
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "attention_chunk_size": random.randint(5, 23),
        "no_rope_layers": [int(kind == CHUNKED) for kind in kinds],
        "moe_layers": [place for place in range(len(kinds)) if place % 2],
    }


def ending_full(random: Random) -> dict[str, Any]:
    """Gemma 4's last layer reads everything; here no layer has the keys of another."""
    fields = windows(random)
    fields["layer_types"] = [*[kind for kind in fields["layer_types"] if kind == SLIDING], SLIDING, FULL]
    return {**fields, "num_hidden_layers": len(fields["layer_types"]), "num_kv_shared_layers": 0}


FAMILIES: dict[str, Callable[[Random], dict[str, Any]]] = {
    "gemma2": windows,
    "gemma3_text": windows,
    "gemma4_text": ending_full,
    "gpt_oss": windows,
    "cohere2": windows,
    "llama4_text": chunks,
    "qwen2": windows,
    "qwen3": windows,
}

# To an engine they are as gemma3_text and qwen3. That a layer of theirs keeps its window, test_models_parity.py holds.
ALIKE = ("gemma2", "cohere2", "qwen2")


def greedy_and_beams(reference: PreTrainedModel, item: Request) -> list[list[int]]:
    """Return transformers' ids of a request's returned sequences, past any end."""
    beams = item.params.mode.num_beams if isinstance(item.params.mode, BeamOptions) else 1
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        num_beams=beams,
        num_return_sequences=item.params.num_return_sequences,
    )
    prompt = item.prompt_token_ids
    with torch.inference_mode():
        ids = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=settings,
        )
    return ids[:, len(prompt) :].tolist()  # type: ignore[no-any-return]


def crowd(random: Random) -> list[Request]:
    """Return requests that share beginnings: greedy ones, beams, and one of several drawn sequences."""
    long = [random.randrange(3, VOCAB_SIZE) for _ in range(61)]
    prompts = [long, long[:37], [*long[:50], 7, 9], [random.randrange(3, VOCAB_SIZE) for _ in range(19)], long[:1]]
    made = [
        request(prompt, max_new_tokens=NEW_TOKENS, request_id=f"greedy {place}") for place, prompt in enumerate(prompts)
    ]
    beams = {"num_return_sequences": 2, "mode": BeamOptions(3)}
    drawn = {"num_return_sequences": 3, "do_sample": True, "seed": 5}
    for name, fields in (("beams", beams), ("drawn", drawn)):
        made.append(request(long[:43], max_new_tokens=NEW_TOKENS, request_id=name, **fields))
    return made


def ranked(answer: Answer) -> list[list[int]]:
    assert answer.finished is not None
    return [answer.ids[one.index] for one in answer.finished.sequences]


def tight(model: LanguageModel, items: list[Request], random: Random) -> EngineConfig:
    """Return a configuration in which steps are small, and blocks as few as the largest request needs."""
    config = engine_config(
        block_size=random.randint(2, 7), max_batch_tokens=random.randint(16, 40), max_running_sequences=16
    )
    _, grouped = in_groups(model, config)
    needed = max(MODES.blocks_needed(grouped, item.params, len(item.prompt_token_ids), NEW_TOKENS) for item in items)
    return replace(config, num_blocks=-(-needed // grouped.bundle_blocks))


def check(folder: Path, model_type: str, seed: int) -> dict[str, int]:
    """Check a configuration of a type, in two engines: preemption by recompute and by swap. Return what was seen."""
    random = Random(seed)
    tiny_model_type(folder, model_type, seed=seed % 1000, **FAMILIES[model_type](random))
    model = load_model(folder, dtype="float32", device=cpu_device())
    reference = reference_of(folder)
    layout, _ = in_groups(model, engine_config())
    assert layout is not None
    assert len(layout.groups) == 2
    items = crowd(random)
    wanted = {item.request_id: greedy_and_beams(reference, item) for item in items if item.request_id != "drawn"}
    alone = {item.request_id: ranked(run(model_engine(model), item)[item.request_id]) for item in items}
    assert {name: ids for name, ids in alone.items() if name != "drawn"} == wanted
    config = tight(model, items, random)
    seen = dict.fromkeys(("preemptions", "swaps", "prefix_hit_tokens", "copy_on_write_blocks"), 0)
    for one in (config, replace(config, num_host_blocks=4 * config.num_blocks, preemption="swap")):
        engine = model_engine(model, one)
        for _ in range(2):
            answers: dict[str, Answer] = {}
            again = [request_like(item) for item in items]
            for item in again:
                engine.check(item)
                engine.add(item)
                collect(answers, engine.step())
                engine.check_integrity()
            run(engine, answers=answers)
            assert {name: ranked(answer) for name, answer in answers.items()} == alone
        assert engine.load().kv_blocks_used == 0
        for name in seen:
            seen[name] += getattr(engine.stats, name)
    return seen


def request_like(item: Request) -> Request:
    """Return the same request anew."""
    return replace(item, arrival_time=0.0)


@pytest.mark.parametrize(
    "model_type", [pytest.param(one, marks=pytest.mark.slow if one in ALIKE else []) for one in FAMILIES]
)
def test_layers_of_several_kinds_get_the_ids_of_generate(tmp_path: Path, model_type: str) -> None:
    torch.set_num_threads(1)
    seen = check(tmp_path, model_type, 3)
    assert min(seen.values()) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("model_type", FAMILIES)
def test_odd_configurations_get_the_ids_of_generate(tmp_path: Path, model_type: str, number: int) -> None:
    torch.set_num_threads(1)
    seed = SystemRandom().randrange(1 << 30)
    try:
        check(tmp_path, model_type, seed)
    except Exception as error:
        error.add_note(f"{model_type}, seed {seed}, time {number}")
        raise
