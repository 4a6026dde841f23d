"""Drafts change no answer of models whose layers keep a state: random models, texts, options and pools of every type.

PENSTOCK_STATE_CONFIGURATIONS: how many of each type the slow run takes; PENSTOCK_STATE_SEED: where to begin.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import engine_config, request, run
from factories.engine.model_engine import ROOMY, model_engine
from factories.models.model_types import FURTHER_STATEFUL, STATEFUL, tiny_config, tiny_model_type
from factories.models.run_kernels import cpu_device
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.core.request import Request
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import load_model

SEED = int(os.environ.get("PENSTOCK_STATE_SEED", "1"))
MORE = int(os.environ.get("PENSTOCK_STATE_CONFIGURATIONS", "1"))
# One that goes again through accepted drafts, one that goes on by one token only, and one with windows.
USUAL = ("granitemoehybrid", "jamba", "recurrent_gemma")
TYPES = tuple(dict.fromkeys((*STATEFUL, *FURTHER_STATEFUL, "lfm2", "lfm2_moe")))
# Widths of short convolutions by their names.
WIDTHS = ("conv_kernel", "mamba_d_conv", "conv_L_cache", "linear_conv_kernel_dim", "conv1d_width")
DRAFTED = ("coming", "text", "memory", "guesses")


def random_model(random: Random, model_type: str, folder: Path) -> LanguageModel:
    """Write a random model of few ids, so that texts repeat themselves, and load it by the fallback."""
    known = tiny_config(model_type).to_dict()
    fields: dict[str, Any] = {"vocab_size": random.randint(12, 60)}
    fields |= {name: random.choice([2, 3, 4]) for name in WIDTHS if name in known}
    torch.set_num_threads(1)
    folder = tiny_model_type(folder, model_type, seed=random.randrange(1 << 30), **fields)
    return load_model(folder, dtype="float32", device=cpu_device(), route=ModelRoute("fallback"))


def coming(random: Random, wanted: list[int], prompt: list[int]) -> Callable[[list[int], int], list[int]]:
    """Return a draft model that proposes the coming ids of an answer, some of them changed."""

    def drafts(ids: list[int], most: int) -> list[int]:
        right = wanted[len(ids) - len(prompt) :][: random.randint(0, most)]
        return [one if random.random() < 0.8 else random.randrange(3, 12) for one in right]

    return drafts


def modes(random: Random, wanted: list[int], prompt: list[int]) -> dict[str, AssistanceOptions]:
    """Return a mode for each way to draft."""
    own = coming(random, wanted, prompt)
    return {
        "coming": AssistanceOptions(num_assistant_tokens=random.randint(1, 24), own_drafts=own),
        "text": AssistanceOptions(prompt_lookup_num_tokens=random.randint(1, 8)),
        "memory": AssistanceOptions(ngram_memory_num_tokens=random.randint(1, 8)),
        "guesses": AssistanceOptions(lookahead_window=random.randint(2, 6)),
    }


def check_type(random: Random, model: LanguageModel) -> tuple[int, int]:
    """Compare answers with drafts to those without, in a roomy pool and in a tight one. Return the numbers of accepted
    and of refused drafts."""
    unit = [random.randrange(3, 12) for _ in range(random.randint(2, 6))]
    prompt = (unit * 6)[: random.randint(4, 24)]
    options: dict[str, Any] = {"max_new_tokens": random.randint(8, 20), "ignore_eos": True}
    if random.random() < 0.5:
        options |= {"do_sample": True, "seed": random.randrange(1 << 30), "temperature": random.choice([0.4, 1.0])}
    if random.random() < 0.3:
        options["repetition_penalty"] = 1.1
    wanted = run(model_engine(model), request(prompt, request_id="a", **options))["a"].ids[0]
    tight = engine_config(
        num_blocks=random.randint(18, 30), block_size=4, max_batch_tokens=random.randint(8, 20), max_running_sequences=4
    )
    right = wrong = 0
    # The second time with cached prefixes.
    for config, times in ((ROOMY, 1), (tight, 2)):
        engine = model_engine(model, config)
        for _ in range(times):
            items = [
                request(prompt, request_id=name, mode=mode, **options)
                for name, mode in modes(random, wanted, prompt).items()
            ]
            found = run(engine, *items, request(prompt[1:], request_id="beside", max_new_tokens=9))
            assert {name: found[name].ids[0] for name in DRAFTED} == dict.fromkeys(DRAFTED, wanted)
        right += engine.stats.accepted_draft_tokens
        wrong += engine.stats.rejected_draft_tokens
        states = engine._runner._states  # type: ignore[attr-defined]
        assert (states.num_used, states._later) == (0, {})
    check_groups(model, prompt)
    return right, wrong


def check_groups(model: LanguageModel, prompt: list[int]) -> None:
    """Check that no group of beams changes the first one, which is that of beams without groups."""

    def beams(name: str, mode: BeamOptions) -> Request:
        return request(prompt, request_id=name, max_new_tokens=6, num_return_sequences=mode.num_beams, mode=mode)

    found = run(
        model_engine(model),
        beams("groups", BeamOptions(4, num_beam_groups=2, diversity_penalty=0.5)),
        beams("beams", BeamOptions(2)),
    )
    answers = {name: {tuple(ids) for ids in one.ids.values()} for name, one in found.items()}
    assert answers["beams"] <= answers["groups"]


@pytest.mark.parametrize("model_type", USUAL)
def test_drafts_change_no_answer(tmp_path: Path, model_type: str) -> None:
    random = Random(f"{SEED} {model_type}")
    right, wrong = check_type(random, random_model(random, model_type, tmp_path))
    assert right > 0
    assert wrong > 0


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("model_type", TYPES)
def test_drafts_change_no_answer_of_any_type(tmp_path: Path, model_type: str) -> None:
    random = Random(f"{SEED + 1} {model_type}")
    counts = [0, 0]
    for number in range(MORE):
        model = random_model(random, model_type, tmp_path / str(number))
        counts = [one + more for one, more in zip(counts, check_type(random, model), strict=True)]
    assert min(counts) > 0
