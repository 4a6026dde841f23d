"""generate(), mode by mode: the same ids as transformers, and for sampling the same scores at every step.

Live against the installed release where it has the mode, against the golden files of `tools/make_goldens.py` where it
has not. Two random tiny models and the demo model, float32. Requests go the way of real ones. (Token healing, which
differs from transformers in ways that are documented, has test_token_healing.py.)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine import mode_cases
from factories.engine.mode_cases import DEMO, DEMO_PROMPTS, RANDOM_PROMPTS, Case
from factories.engine.modes import Row, generate, load_service
from factories.engine.placeholders import fill_ids
from factories.models.checkpoints import reference_model
from factories.models.golden_models import GOLDEN_MODELS, fingerprint, golden_checkpoint
from factories.models.run_kernels import KERNELS
from factories.models.transformers_reference import ReferenceScores, reference_answer, reference_logits
from penstock.common.checkpoint import demo_folder
from penstock.generation.startup.loaded_model import LoadedModel
from transformers import AutoTokenizer, PreTrainedModel

GOLDENS = Path(__file__).parents[2] / "goldens"
# Scores that transformers' processors and ours make of the same logits.
SCORE_TOLERANCE = 1e-5
# The logits themselves, against transformers in float64: its own float32 is up to 1e-4 from that on the demo model.
# The C++ kernels' sums are in another order than both's.
_LOOSER = 4 if KERNELS == "native" else 1
LOGIT_TOLERANCE = {DEMO: 5e-5 * _LOOSER, "golden-qwen2": 2e-5 * _LOOSER, "golden-llama": 2e-5 * _LOOSER}
# A beam score is a sum over the sequence of log-probabilities that are each right to about 1e-6.
BEAM_SCORE_TOLERANCE = 5e-5
# Draft models of golden-qwen2: what they are made of, and how much they differ from it.
DRAFTS = {"same": ("golden-qwen2", 0.0), "near": ("golden-qwen2", 0.1), "other": ("golden-llama", 0.0)}


@dataclass
class Models:
    """Each model once as the service loads it and once as transformers does."""

    folder: Path
    loaded: dict[str, LoadedModel] = field(default_factory=dict)
    references: dict[str, PreTrainedModel] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        if name == DEMO:
            return demo_folder()
        folder = self.folder / name
        source, noise = DRAFTS.get(name, (name, 0.0))
        return folder if folder.is_dir() else golden_checkpoint(folder, source, noise=noise)

    def ours(self, name: str, draft: str | None = None) -> LoadedModel:
        key = f"{name}+{draft}"
        if key not in self.loaded:
            config = {} if draft is None else {"assistant_model": str(self.path(draft)), "assistant_kv_memory": "1MiB"}
            self.loaded[key] = load_service(self.path(name), **config)
        return self.loaded[key]

    def reference(self, name: str) -> PreTrainedModel:
        if name not in self.references:
            self.references[name] = reference_model(self.path(name))
        return self.references[name]

    def exact(self, name: str) -> PreTrainedModel:
        """The reference in float64."""
        key = f"{name} in float64"
        if key not in self.references:
            self.references[key] = reference_model(self.path(name), torch.float64)
        return self.references[key]

    @functools.cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(demo_folder())

    def prompt(self, case: Case) -> list[int]:
        if case.model == DEMO:
            return self.tokenizer(DEMO_PROMPTS[case.prompt])["input_ids"]
        return RANDOM_PROMPTS[case.prompt]

    def extra(self, case: Case) -> dict[str, Any]:
        """Objects that transformers needs beside the arguments."""
        extra = {"tokenizer": self.tokenizer} if "stop_strings" in case.arguments else {}
        draft = case.arguments.get("assistant_model")
        return extra if draft is None else {**extra, "assistant_model": self.reference(draft)}

    def arguments(self, case: Case) -> dict[str, Any]:
        """The case's arguments with ids in place of places."""
        reference, prompt = self.reference(case.model), self.prompt(case)
        return fill_ids(case.arguments, lambda plain: reference_answer(reference, prompt, greedily(plain))[0][0])


def greedily(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without what only sampling takes."""
    dropped = {"do_sample"} if "num_beams" in arguments else {"do_sample", "num_return_sequences"}
    return {name: value for name, value in arguments.items() if name not in dropped}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return Models(tmp_path_factory.mktemp("models"))


def matrix(group: Callable[[], list[Case]]) -> pytest.MarkDecorator:
    cases = group()
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def options_first(group: Callable[[], list[Case]]) -> pytest.MarkDecorator:
    """The matrix; the ordinary run has the first case of each option and of each model, the others are slow."""
    seen: set[str] = set()
    params = []
    for case in group():
        watermark = case.arguments.get("watermarking_config", {})
        new = {case.group, case.model, *case.arguments, *(f"watermark's {name}" for name in watermark)} - seen
        seen |= new
        params.append(pytest.param(case, id=case.name, marks=[] if new else [pytest.mark.slow]))
    return pytest.mark.parametrize("case", params)


def check_ids(models: Models, case: Case) -> None:
    prompt, arguments = models.prompt(case), models.arguments(case)
    expected, scores = reference_answer(models.reference(case.model), prompt, arguments, **models.extra(case))
    ours = generate(models.ours(case.model, arguments.get("assistant_model")), prompt, arguments)
    assert ours.ids == expected
    if scores is not None:
        assert ours.scores == pytest.approx(scores, rel=BEAM_SCORE_TOLERANCE, abs=BEAM_SCORE_TOLERANCE)


@options_first(mode_cases.greedy)
def test_greedy_search_gives_the_ids_of_transformers(models: Models, case: Case) -> None:
    check_ids(models, case)


def test_without_an_input_it_begins_as_transformers_does(models: Models) -> None:
    arguments = {"bos_token_id": 11, "max_new_tokens": 16}
    expected = models.reference("golden-qwen2").generate(do_sample=False, pad_token_id=0, **arguments)
    assert generate(models.ours("golden-qwen2"), [], arguments).ids == [expected[0, 1:].tolist()]


@pytest.mark.thinned(10)
@matrix(mode_cases.beam)
def test_beam_search_gives_the_ids_and_scores_of_transformers(models: Models, case: Case) -> None:
    check_ids(models, case)


@pytest.mark.thinned(4)
@matrix(mode_cases.prompt_lookup)
def test_prompt_lookup_gives_the_ids_of_transformers(models: Models, case: Case) -> None:
    check_ids(models, case)


@pytest.mark.thinned(4)
@matrix(mode_cases.draft)
def test_a_draft_model_gives_the_ids_of_transformers(models: Models, case: Case) -> None:
    check_ids(models, case)


@pytest.mark.thinned(4)
@matrix(mode_cases.greedy_guidance)
def test_guided_greedy_search_gives_the_ids_of_transformers(models: Models, case: Case) -> None:
    check_ids(models, case)


@pytest.mark.thinned(3)
@matrix(mode_cases.sampled_guidance)
def test_guided_sampling_draws_from_the_scores_of_transformers(models: Models, case: Case) -> None:
    check_scores(models, case)


@pytest.mark.thinned(10)
@matrix(mode_cases.beam_sample)
def test_beam_sampling_draws_from_the_scores_of_transformers(models: Models, case: Case) -> None:
    check_scores(models, case)


@options_first(mode_cases.sample)
def test_sampling_draws_from_the_scores_of_transformers_and_stops_where_it_does(models: Models, case: Case) -> None:
    check_scores(models, case)


def check_scores(models: Models, case: Case) -> None:
    """Logits and scores of every row that was drawn from, and the place where each returned sequence ends."""
    prompt, arguments = models.prompt(case), models.arguments(case)
    ours = generate(models.ours(case.model), prompt, arguments, record=True)
    reference = ReferenceScores(models.reference(case.model), prompt, arguments, **models.extra(case))
    assert ours.rows
    # Rows of one step together, for speed; in order, for processors that remember.
    for _, grouped in groupby(ours.rows, key=lambda row: len(row.token_ids)):
        if "guidance_scale" in arguments:
            compare_guided_rows(models, case, list(grouped), reference)
        else:
            compare_rows(models, case, list(grouped), reference)
    for ids in ours.ids:
        stops = [reference.stops(prompt + ids[:end]) for end in range(1, len(ids) + 1)]
        assert stops == [False] * (len(ids) - 1) + [True]


def compare_rows(models: Models, case: Case, rows: list[Row], reference: ReferenceScores) -> None:
    # transformers' processors want as many rows as there are beams; ours has one until they part.
    rows = rows + [rows[-1]] * (reference.num_rows - len(rows))
    contexts = [row.token_ids for row in rows]
    logits_NV = torch.stack([row.logits for row in rows])
    exact_NV = reference_logits(models.exact(case.model), contexts)
    torch.testing.assert_close(logits_NV, exact_NV, rtol=0.0, atol=LOGIT_TOLERANCE[case.model])
    scores_NV = torch.stack([row.scores for row in rows])
    torch.testing.assert_close(scores_NV, reference.process(contexts, logits_NV), rtol=0.0, atol=SCORE_TOLERANCE)


def compare_guided_rows(models: Models, case: Case, rows: list[Row], reference: ReferenceScores) -> None:
    """The unconditional branch is within transformers' processor: from its logits to the scores in one."""
    # Guidance multiplies a difference of logits, and with it what rounding made of them.
    tolerance = 2 * LOGIT_TOLERANCE[case.model] * max(1.0, case.arguments["guidance_scale"])
    contexts = [row.token_ids for row in rows]
    expected_NV = reference.process(contexts, reference_logits(models.reference(case.model), contexts))
    torch.testing.assert_close(torch.stack([row.scores for row in rows]), expected_NV, rtol=0.0, atol=tolerance)


def golden_cases(*modes: str) -> pytest.MarkDecorator:
    cases = [case for mode in modes for case in json.loads((GOLDENS / f"{mode}.json").read_text("utf-8"))["cases"]]
    return pytest.mark.parametrize("golden", cases, ids=[case["name"] for case in cases])


def check_golden(models: Models, golden: dict[str, Any]) -> None:
    ours = generate(models.ours(golden["model"]), golden["prompt"], golden["kwargs"])
    assert with_first_end(ours.ids, golden) == golden["ids"]
    if golden["scores"] is not None:
        assert ours.scores == pytest.approx(golden["scores"], rel=BEAM_SCORE_TOLERANCE, abs=BEAM_SCORE_TOLERANCE)


def with_first_end(answers: list[list[int]], golden: dict[str, Any]) -> list[list[int]]:
    """4.41.1's group and constrained beam search write the first eos id where another one ended the sequence."""
    ends = golden["kwargs"].get("eos_token_id")
    if golden["mode"] not in ("group_beam", "constrained_beam") or not isinstance(ends, list):
        return answers
    return [[*ids[:-1], ends[0]] if ids[-1] in ends else ids for ids in answers]


@pytest.mark.thinned(4)
@golden_cases("contrastive")
def test_contrastive_search_gives_the_golden_ids(models: Models, golden: dict[str, Any]) -> None:
    check_golden(models, golden)


@pytest.mark.thinned(4)
@golden_cases("group_beam")
def test_group_beam_search_gives_the_golden_ids_and_scores(models: Models, golden: dict[str, Any]) -> None:
    check_golden(models, golden)


@pytest.mark.thinned(6)
@golden_cases("constrained_beam")
def test_constrained_beam_search_gives_the_golden_ids_and_scores(models: Models, golden: dict[str, Any]) -> None:
    check_golden(models, golden)


@pytest.mark.thinned(4)
@golden_cases("dola")
def test_dola_gives_the_golden_ids(models: Models, golden: dict[str, Any]) -> None:
    check_golden(models, golden)


def test_the_golden_files_were_made_with_these_models() -> None:
    for path in GOLDENS.glob("*.json"):
        used = json.loads(path.read_text("utf-8"))["models"]
        assert used == {name: fingerprint(name) for name in used}
        assert set(used) <= set(GOLDEN_MODELS)


@pytest.mark.thinned(6)
@golden_cases("beam", "guidance")
def test_the_golden_files_agree_with_the_installed_release_where_both_have_the_mode(
    models: Models, golden: dict[str, Any]
) -> None:
    ids, scores = reference_answer(models.reference(golden["model"]), golden["prompt"], golden["kwargs"])
    assert ids == golden["ids"]
    if golden["scores"] is not None:
        assert scores == pytest.approx(golden["scores"], rel=BEAM_SCORE_TOLERANCE, abs=BEAM_SCORE_TOLERANCE)
