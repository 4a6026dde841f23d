"""Assisted sampling has the model's own distribution, whatever the drafts: chi-square against exact probabilities.

A model over eight tokens gives the probability of every output of three tokens. The first is never drafted; the second
and the third are, and wrong drafts are refused before and after right ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from factories.engine.assisted import assisted_engine, noised_checkpoint
from factories.engine.fake_engine import engine_config, request, run
from factories.engine.model_engine import load_tiny
from factories.models.checkpoints import reference_model, tiny_checkpoint
from penstock.generation.core.decoding_mode import PLAIN, DecodingMode
from penstock.generation.core.sampling_params import derive_seed
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.models.decoder import CausalLM
from transformers import PreTrainedModel

VOCABULARY, LENGTH, SAMPLES = 8, 3, 4000
PROMPT = [3, 5, 1, 3, 5, 1, 3]
DRAFT = AssistanceOptions(num_assistant_tokens=2, confidence_threshold=0.0)
LOOKUP = AssistanceOptions(prompt_lookup_num_tokens=2, max_matching_ngram_size=1)
CONFIG = engine_config(num_blocks=600, max_batch_tokens=600, max_running_sequences=64, max_draft_rows=400)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draft models: the model itself, two nearer and farther copies, one that never saw it."""
    base = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": VOCABULARY, "initializer_range": 0.12}
    same = tiny_checkpoint(base / "same", seed=11, **sizes)
    return {
        "same": same,
        "near": noised_checkpoint(same, base / "near", 0.1),
        "far": noised_checkpoint(same, base / "far", 0.8),
        "other": tiny_checkpoint(base / "other", seed=12, **sizes),
    }


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, CausalLM]:
    return {name: load_tiny(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def exact(folders: dict[str, Path]) -> dict[tuple[int, ...], float]:
    return probabilities(reference_model(folders["same"]), temperature=1.0)


def probabilities(model: PreTrainedModel, temperature: float) -> dict[tuple[int, ...], float]:
    """Return the probability of every output of LENGTH tokens after PROMPT, by transformers' model in one batch."""
    outputs = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    ids = torch.tensor([[*PROMPT, *output] for output in outputs])
    with torch.inference_mode():
        logprobs = (model(ids).logits[:, len(PROMPT) - 1 : -1].double() / temperature).log_softmax(-1)
    chosen = logprobs.gather(2, ids[:, len(PROMPT) :, None]).sum((1, 2)).exp()
    return dict(zip(outputs, chosen.tolist(), strict=True))


def draws(
    model: CausalLM, draft: CausalLM | None, mode: DecodingMode, **options: float
) -> tuple[Counter[tuple[int, ...]], float]:
    """Outputs of SAMPLES requests with seeds of their own, and the share of drafts that were accepted."""
    engine = assisted_engine(model, draft, CONFIG)
    items = [
        request(PROMPT, max_new_tokens=LENGTH, do_sample=True, seed=derive_seed(77, i), mode=mode, **options)
        for i in range(SAMPLES)
    ]
    answers = run(engine, *items)
    outputs = Counter(tuple(answers[item.request_id].ids[0]) for item in items)
    verified = engine.stats.accepted_draft_tokens + engine.stats.rejected_draft_tokens
    return outputs, engine.stats.accepted_draft_tokens / max(verified, 1)


def p_value(observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of Pearson's chi-square. The rarest outcomes are joined until each is expected five times."""
    groups: list[list[float]] = []
    for output, probability in sorted(expected.items(), key=lambda entry: entry[1]):
        if not groups or groups[-1][1] >= 5.0:
            groups.append([0.0, 0.0])
        groups[-1][0] += observed[output]
        groups[-1][1] += SAMPLES * probability
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in groups)
    half = torch.tensor([(len(groups) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize(
    "quality", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("same", "far", "other")), "near"]
)
def test_sampling_with_a_draft_model_has_the_models_distribution(
    models: dict[str, CausalLM], exact: dict[tuple[int, ...], float], quality: str
) -> None:
    outputs, acceptance = draws(models["same"], models[quality], DRAFT)
    assert p_value(outputs, exact) > 0.001
    # The qualities really differ; the model itself draws the same with the same uniforms.
    low, high = {"same": (1.0, 1.0), "near": (0.6, 0.99), "far": (0.2, 0.7), "other": (0.05, 0.5)}[quality]
    assert low <= acceptance <= high


@pytest.mark.slow
def test_sampling_with_prompt_lookup_has_the_models_distribution(
    models: dict[str, CausalLM], exact: dict[tuple[int, ...], float]
) -> None:
    outputs, acceptance = draws(models["same"], None, LOOKUP)
    assert p_value(outputs, exact) > 0.001
    assert 0.02 < acceptance < 0.9


@pytest.mark.slow
def test_warped_sampling_has_the_warped_distribution(folders: dict[str, Path], models: dict[str, CausalLM]) -> None:
    outputs, _ = draws(models["same"], models["far"], DRAFT, temperature=0.6)
    assert p_value(outputs, probabilities(reference_model(folders["same"]), temperature=0.6)) > 0.001


@pytest.mark.slow
def test_plain_sampling_has_the_models_distribution(
    models: dict[str, CausalLM], exact: dict[tuple[int, ...], float]
) -> None:
    outputs, _ = draws(models["same"], None, PLAIN)
    assert p_value(outputs, exact) > 0.001


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["draft", "temperature"])
def test_the_test_would_notice_another_distribution(
    models: dict[str, CausalLM], exact: dict[tuple[int, ...], float], wrong: str
) -> None:
    """Outputs of the draft model nearest to the model, and of a temperature near to its own."""
    model = models["near"] if wrong == "draft" else models["same"]
    outputs, _ = draws(model, None, PLAIN, temperature=1.0 if wrong == "draft" else 1.25)
    assert p_value(outputs, exact) < 1e-6
