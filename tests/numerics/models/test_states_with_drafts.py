"""Models with states that can go back: drafts change no id, whatever is accepted; groups of beams are as elsewhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import engine_config, request, run
from factories.engine.model_engine import check_company, model_engine
from factories.engine.modes import generate, load_service
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.run_kernels import cpu_device
from penstock.common.errors import InvalidArgument
from penstock.generation.core.request import Request
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import load_model

PROMPT = [7, 91, 33, 12, 7, 91, 33, 56, 101, 14, 7, 91]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_5_text", seed=1)


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return load_model(folder, dtype="float32", device=cpu_device())


def drafted(wanted: list[int], source: random.Random) -> Any:
    """Return a draft model that proposes the coming ids of an answer, some of them changed."""

    def drafts(ids: list[int], most: int) -> list[int]:
        coming = wanted[len(ids) - len(PROMPT) :][: source.randint(0, most)]
        return [one if source.random() < 0.7 else source.randrange(3, VOCAB_SIZE) for one in coming]

    return drafts


@pytest.mark.parametrize("seed", range(4))
def test_ids_are_those_without_drafts_whatever_is_accepted(model: LanguageModel, seed: int) -> None:
    source = random.Random(seed)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS}
    if seed % 2:
        options |= {"do_sample": True, "seed": seed}
    wanted = run(model_engine(model), request(PROMPT, request_id="a", **options))["a"].ids[0]
    mode = AssistanceOptions(num_assistant_tokens=5, own_drafts=drafted(wanted, source))

    def requests() -> list[Request]:
        return [
            request(PROMPT, request_id="drafted", mode=mode, **options),
            request(PROMPT[2:], request_id="beside", max_new_tokens=9),
            request(PROMPT, request_id="again", mode=mode, **options),
        ]

    for config in (None, engine_config(num_blocks=11, block_size=4, max_batch_tokens=14, max_running_sequences=3)):
        engine = model_engine(model) if config is None else model_engine(model, config)
        found = run(engine, *requests())
        assert found["drafted"].ids[0] == found["again"].ids[0] == wanted
        assert engine.stats.accepted_draft_tokens > 0
        assert engine.stats.rejected_draft_tokens > 0
        states = engine._runner._states  # type: ignore[attr-defined]
        assert states.num_used == 0
        assert not states._later


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt_lookup_num_tokens": 4},
        {"prompt_lookup_num_tokens": 4, "do_sample": True, "seed": 5, "temperature": 0.4, "num_return_sequences": 2},
        {"lookahead_window": 4},
        {"prompt_lookup_num_tokens": 3, "repetition_penalty": 1.2},
    ],
)
def test_drafts_from_texts_change_no_id(folder: Path, arguments: dict[str, Any]) -> None:
    loaded = load_service(folder)
    plain = {name: one for name, one in arguments.items() if not name.startswith(("prompt_lookup", "lookahead"))}
    expected = generate(loaded, PROMPT * 2, {"max_new_tokens": NEW_TOKENS, **plain}).ids
    assert generate(loaded, PROMPT * 2, {"max_new_tokens": NEW_TOKENS, **arguments}).ids == expected


def beams(request_id: str, options: BeamOptions) -> Request:
    width = options.num_beams
    return request(PROMPT, request_id=request_id, max_new_tokens=8, num_return_sequences=width, mode=options)


def test_groups_of_beams_have_states_of_their_own(model: LanguageModel) -> None:
    def requests() -> list[Request]:
        return [
            beams("groups", BeamOptions(4, num_beam_groups=2, diversity_penalty=0.5)),
            beams("beams", BeamOptions(2)),
            request(PROMPT[1:], request_id="greedy", max_new_tokens=9),
        ]

    found = run(model_engine(model), *requests())
    answers = {name: {tuple(ids) for ids in found[name].ids.values()} for name in ("groups", "beams")}
    # No other group changes the first one.
    assert answers["beams"] < answers["groups"]
    assert len(answers["groups"]) == 4
    config = engine_config(num_blocks=26, block_size=4, max_batch_tokens=20, max_running_sequences=7)
    assert check_company(model, requests, config).stats.copy_on_write_blocks > 0


def test_attentions_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        generate(load_service(folder), PROMPT, {"output_attentions": True})
    assert refused.value.field == "output.output_attentions"
