"""inputs_embeds give what generate() of transformers gives for them: alone, and beside ids that processors see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.mode_cases import ENDS, PROCESSORS, SYNTHID, WARPERS
from factories.engine.modes import Generated, generate, load_service
from factories.engine.placeholders import fill_ids
from factories.models.checkpoints import FAMILIES, LLAMA3_ROPE, reference_model, tiny_checkpoint
from factories.models.run_kernels import KERNELS
from factories.models.transformers_reference import ReferenceScores, reference_answer, reference_logits
from penstock.common.checkpoint import demo_folder
from penstock.generation.startup.loaded_model import LoadedModel
from transformers import AutoTokenizer, PreTrainedModel

HIDDEN = 48
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 6},
}
# For the rows below, token by token. Ids that come again are for penalties and n-grams.
IDS = [60, 61, 62, 60, 61, 62, 60]
EITHER_WAY = pytest.mark.parametrize("ids", [[], IDS], ids=["embeds", "embeds-and-ids"])
NOT_GREEDY = ("do_sample", "num_beams", "num_return_sequences")
SCORE_TOLERANCE = 1e-5
LOGIT_TOLERANCE = 8e-5 if KERNELS == "native" else 2e-5
BEAM_SCORE_TOLERANCE = 5e-5


@dataclass(frozen=True)
class Both:
    """One model, loaded by the service and by transformers, and rows that are no row of its table."""

    ours: LoadedModel
    reference: PreTrainedModel
    rows: torch.Tensor

    def check(self, ids: list[int], arguments: Mapping[str, Any]) -> Generated:
        """Compare ids, and beam scores, of a request with these arguments."""
        given = {**self.fill(ids, arguments), "inputs_embeds": self.rows[None]}
        expected, scores = reference_answer(self.reference, ids, given)
        answer = generate(self.ours, ids, given)
        assert answer.ids == expected
        if scores is not None:
            close = pytest.approx(scores, rel=BEAM_SCORE_TOLERANCE, abs=BEAM_SCORE_TOLERANCE)
            assert answer.scores == close
        return answer

    def fill(self, ids: list[int], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Put ids of the greedy answer in their places."""

        def greedy(plain: dict[str, Any]) -> list[int]:
            options = {name: value for name, value in plain.items() if name not in NOT_GREEDY}
            return reference_answer(self.reference, ids, {**options, "inputs_embeds": self.rows[None]})[0][0]

        return fill_ids(arguments, greedy)


def load_both(folder: Path, family: str) -> Both:
    torch.set_num_threads(1)
    tiny_checkpoint(folder, family, seed=7, **CONFIGS.get(family, {}))
    # As large as the table's, which is what a projector is trained for.
    rows = torch.randn(len(IDS), HIDDEN, generator=torch.Generator().manual_seed(11)) * 0.2
    return Both(load_service(folder), reference_model(folder), rows)


@pytest.fixture(scope="module", params=(*FAMILIES, "granite", "gemma2"))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return load_both(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return load_both(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.mark.thinned(3)
@EITHER_WAY
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 30},
        {"max_new_tokens": 12, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 10, "num_beams": 4, "num_return_sequences": 3},
    ],
    ids=["greedy", "processed", "beams"],
)
def test_every_family_gives_the_ids_of_transformers(family: Both, ids: list[int], arguments: dict[str, Any]) -> None:
    family.check(ids, arguments)


def test_every_family_reads_its_own_rows_as_it_reads_their_ids(family: Both) -> None:
    rows = family.reference.get_input_embeddings()(torch.tensor(IDS)).detach()
    options = {"max_new_tokens": 20, "do_sample": True, "seed": 3, "num_return_sequences": 2}
    expected = generate(family.ours, IDS, options).ids
    assert generate(family.ours, [], {**options, "inputs_embeds": rows}).ids == expected
    first = {**options, "inputs_embeds": rows[:3], "inputs_embeds_before_ids": True}
    assert generate(family.ours, IDS[3:], first).ids == expected


@pytest.mark.thinned(4)
@EITHER_WAY
@pytest.mark.parametrize("arguments", [*PROCESSORS, *SYNTHID, *ENDS], ids=str)
def test_greedy_search_gives_the_ids_of_transformers(qwen2: Both, ids: list[int], arguments: dict[str, Any]) -> None:
    qwen2.check(ids, {"max_new_tokens": 20, **arguments})


@EITHER_WAY
@pytest.mark.parametrize("length", [{"max_length": 12}, {"max_length": 30, "min_length": 25, "eos_token_id": "@0.2"}])
def test_a_total_length_counts_the_rows(qwen2: Both, ids: list[int], length: dict[str, Any]) -> None:
    answer = qwen2.check(ids, length)
    assert answer.answer.finished is not None
    assert answer.answer.finished.prompt_tokens == len(qwen2.rows)


@pytest.mark.thinned(4)
@EITHER_WAY
@pytest.mark.parametrize("arguments", PROCESSORS[:12], ids=str)
def test_beam_search_gives_the_ids_and_scores_of_transformers(
    qwen2: Both, ids: list[int], arguments: dict[str, Any]
) -> None:
    qwen2.check(ids, {"num_beams": 4, "max_new_tokens": 12, "num_return_sequences": 2, **arguments})


@pytest.mark.parametrize("arguments", [{}, {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}])
def test_prompt_lookup_gives_the_ids_of_transformers(qwen2: Both, arguments: dict[str, Any]) -> None:
    # With ids transformers verifies the first drafts at the wrong rows: see the guide.
    more = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 30, "repetition_penalty": 0.6}
    answer = qwen2.check([], {**more, **arguments})
    assert answer.answer.finished is not None
    assert answer.answer.finished.accepted_draft_tokens > 0


@EITHER_WAY
@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 0.6},
        # Few ids, so that drafts come from the first token on, while a context of ids is not whole yet.
        {
            "allowed_token_ids": [20, 21, 22],
            "watermarking_config": {"greenlist_ratio": 0.5, "bias": 50.0, "context_width": 12},
        },
    ],
    ids=["repetition", "watermark"],
)
def test_prompt_lookup_gives_the_ids_of_the_same_request_without_drafts(
    qwen2: Both, ids: list[int], arguments: dict[str, Any]
) -> None:
    options = {"max_new_tokens": 30, "inputs_embeds": qwen2.rows, **arguments}
    drafted = generate(qwen2.ours, ids, {**options, "prompt_lookup_num_tokens": 4})
    assert drafted.ids == generate(qwen2.ours, ids, options).ids
    assert drafted.answer.finished is not None
    assert drafted.answer.finished.accepted_draft_tokens > 0


@pytest.mark.thinned(3)
@pytest.mark.parametrize("arguments", [{}, {"guidance_scale": 0.5}, {"repetition_penalty": 1.4}], ids=str)
@pytest.mark.parametrize(("ids", "negative"), [([], [88, 89, 90]), (IDS, [88]), (IDS, None)])
def test_guidance_gives_the_ids_of_transformers(
    qwen2: Both, ids: list[int], negative: list[int] | None, arguments: dict[str, Any]
) -> None:
    more = {} if negative is None else {"negative_prompt_ids": negative}
    qwen2.check(ids, {"guidance_scale": 1.8, "max_new_tokens": 12, **more, **arguments})


@pytest.mark.thinned(4)
@EITHER_WAY
@pytest.mark.parametrize("arguments", [*WARPERS[:8:3], *PROCESSORS[::2]], ids=str)
@pytest.mark.parametrize("base", [{}, {"num_beams": 3}], ids=["sample", "beam-sample"])
def test_sampling_draws_from_the_scores_of_transformers(
    qwen2: Both, ids: list[int], base: dict[str, Any], arguments: dict[str, Any]
) -> None:
    given = qwen2.fill(ids, {"do_sample": True, "max_new_tokens": 8, "seed": 5, **base, "top_k": 0, **arguments})
    given["inputs_embeds"] = qwen2.rows[None]
    ours = generate(qwen2.ours, ids, given, record=True)
    reference = ReferenceScores(qwen2.reference, ids, given)
    assert ours.rows
    hidden = len(qwen2.rows) - len(ids)
    for _, grouped in groupby(ours.rows, key=lambda row: len(row.token_ids)):
        rows = list(grouped)
        rows += [rows[-1]] * (reference.num_rows - len(rows))
        logits_NV = torch.stack([row.logits for row in rows])
        written = [row.token_ids[len(qwen2.rows) :] for row in rows]
        expected_NV = reference_logits(qwen2.reference, written, qwen2.rows)
        torch.testing.assert_close(logits_NV, expected_NV, rtol=0.0, atol=LOGIT_TOLERANCE)
        scores_NV = torch.stack([row.scores for row in rows])
        processed_NV = reference.process([row.token_ids[hidden:] for row in rows], logits_NV)
        torch.testing.assert_close(scores_NV, processed_NV, rtol=0.0, atol=SCORE_TOLERANCE)


@EITHER_WAY
def test_a_seed_gives_the_same_ids_whatever_stands_for_the_rows(qwen2: Both, ids: list[int]) -> None:
    options = {"max_new_tokens": 16, "do_sample": True, "seed": 4}
    answers = [
        generate(qwen2.ours, ids, {**options, "inputs_embeds": rows}).ids
        for rows in (qwen2.rows, qwen2.rows.double().numpy(), qwen2.rows.tolist())
    ]
    assert answers[0] == answers[1] == answers[2]
    assert generate(qwen2.ours, ids, {**options, "inputs_embeds": qwen2.rows, "seed": 5}).ids != answers[0]


@pytest.fixture(scope="module")
def demo() -> tuple[LoadedModel, PreTrainedModel, Any]:
    torch.set_num_threads(1)
    folder = demo_folder()
    return load_service(folder), reference_model(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("stop", ["e", "ing", " the", "."])
def test_stop_strings_are_matched_in_the_answer_alone(
    demo: tuple[LoadedModel, PreTrainedModel, Any], stop: str
) -> None:
    ours, reference, tokenizer = demo
    prompt = tokenizer("Tell me about the sky.")["input_ids"]
    rows = reference.get_input_embeddings()(torch.tensor(prompt)).detach()
    arguments = {"inputs_embeds": rows[None], "max_new_tokens": 24, "stop_strings": [stop]}
    expected, _ = reference_answer(reference, [], arguments, tokenizer=tokenizer)
    assert generate(ours, [], arguments).ids == expected


@pytest.mark.parametrize("constraint", [{"regex": "[a-z]{3,9} [0-9]{2}"}, {"json_object": True}], ids=str)
def test_a_constraint_holds_as_after_the_ids(
    demo: tuple[LoadedModel, PreTrainedModel, Any], constraint: dict[str, Any]
) -> None:
    ours, reference, tokenizer = demo
    prompt = tokenizer("Write a poem about the sea.")["input_ids"]
    rows = reference.get_input_embeddings()(torch.tensor(prompt)).detach()
    options = {"max_new_tokens": 20, "constraint": constraint}
    assert generate(ours, [], {**options, "inputs_embeds": rows}).ids == generate(ours, prompt, options).ids
