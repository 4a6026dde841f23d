"""The server owner's logits processors and stopping criteria, against transformers' arguments of these names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import engine_config, run
from factories.engine.mode_cases import RANDOM_PROMPTS
from factories.engine.modes import generate, load_service, new_engine, prepare, to_message
from factories.engine.plugins import FLAGS, Favour, Multiple
from factories.models.golden_models import golden_checkpoint
from factories.models.transformers_reference import ReferenceScores, reference_answer
from penstock.common.errors import Internal, InvalidArgument
from penstock.generation.core.request import FinishReason, Request
from penstock.generation.sampling.row_plan import RowPlan
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.v1 import config_pb2
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

PROMPT = RANDOM_PROMPTS["nine"]
LENGTH = {"max_new_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return golden_checkpoint(tmp_path_factory.mktemp("models") / "golden-qwen2", "golden-qwen2")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_service(folder, assistant_model=str(folder), assistant_kv_memory="1MiB", **FLAGS)


def plugin(name: str, **parameters: Any) -> config_pb2.Plugin:
    return config_pb2.Plugin(name=name, parameters=json.dumps(parameters) if parameters else "")


OURS = {
    "logits_processor": [plugin("favour"), plugin("favour", bias=-1.5, parts=5)],
    "stopping_criteria": [plugin("multiple", of=5), plugin("multiple", of=31)],
}
THEIRS = {
    "logits_processor": LogitsProcessorList([Favour(), Favour(-1.5, 5)]),
    "stopping_criteria": StoppingCriteriaList([Multiple(5), Multiple(31)]),
}
MODES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [4, 5, 6]},
    {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    {"num_beams": 3, "early_stopping": True, "eos_token_id": [17]},
    {"guidance_scale": 1.5},
]
# Here transformers asks criteria about the last token of those that a draft brought, and misses others.
DRAFTS: list[dict[str, Any]] = [{"prompt_lookup_num_tokens": 3}, {"assistant_model": "golden-qwen2"}]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("mode", "which"),
    [
        *product(MODES, [("logits_processor",), ("stopping_criteria",), tuple(OURS)]),
        *product(DRAFTS, [("logits_processor",)]),
    ],
    ids=str,
)
def test_ids_are_those_of_transformers(
    loaded: LoadedModel, reference: PreTrainedModel, mode: Mapping[str, Any], which: tuple[str, ...]
) -> None:
    extra = {"assistant_model": reference} if "assistant_model" in mode else {}
    theirs = {**LENGTH, **mode, **{name: THEIRS[name] for name in which}}
    expected, scores = reference_answer(reference, PROMPT, theirs, **extra)
    ours = generate(loaded, PROMPT, {**LENGTH, **mode, **{name: OURS[name] for name in which}})
    assert ours.ids == expected
    if scores is not None:
        assert ours.scores == pytest.approx(scores, abs=1e-4)
    plain = generate(loaded, PROMPT, {**LENGTH, **mode})
    assert plain.ids != ours.ids


@pytest.mark.parametrize(
    "mode", [{"temperature": 0.7, "top_k": 20}, {"top_p": 0.9, "num_return_sequences": 3}], ids=str
)
def test_sampling_draws_from_the_scores_of_transformers(
    loaded: LoadedModel, reference: PreTrainedModel, mode: dict[str, Any]
) -> None:
    mode = {"do_sample": True, "top_k": 0, "seed": 5, **LENGTH, **mode}
    ours = generate(loaded, PROMPT, {**mode, **OURS}, record=True)
    theirs = ReferenceScores(reference, PROMPT, {**mode, **THEIRS})
    for row in ours.rows:
        expected_V = theirs.process([row.token_ids], row.logits[None])[0]
        torch.testing.assert_close(row.scores, expected_V, rtol=0.0, atol=1e-5)
    for ids in ours.ids:
        stops = [theirs.stops(PROMPT + ids[:end]) for end in range(1, len(ids) + 1)]
        assert stops == [False] * (len(ids) - 1) + [True]


@pytest.mark.parametrize(
    "mode",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 3, "force_words_ids": [[7]]},
        {"num_beams": 3, "do_sample": True, "seed": 2},
        {"token_healing": False},
    ],
    ids=str,
)
def test_every_mode_has_them(loaded: LoadedModel, mode: dict[str, Any]) -> None:
    """Modes that transformers 5 has no more: only the one token that is left comes, and the criterion ends it."""
    ours = generate(loaded, PROMPT, {**LENGTH, **mode, "logits_processor": [plugin("one-token", token_id=7)]})
    # DoLa's contrast may have removed it before.
    assert {7} <= set(ours.ids[0]) <= ({0, 7} if "dola_layers" in mode else {7})
    assert len(ours.ids[0]) == LENGTH["max_new_tokens"]
    stopped = generate(loaded, PROMPT, {**LENGTH, **mode, "stopping_criteria": [plugin("multiple", of=1)]})
    assert [len(ids) for ids in stopped.ids] == [1]
    assert stopped.answer.finished is not None
    assert stopped.answer.finished.sequences[0].reason is FinishReason.STOP_CRITERIA


def item(loaded: LoadedModel, **arguments: Any) -> Request:
    return prepare(loaded, to_message(PROMPT, {**LENGTH, **arguments}))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("plugins", "text"),
    [
        ({"logits_processor": [plugin("raising", after=12)]}, "raised LookupError"),
        ({"logits_processor": [plugin("favour"), plugin("wrong-shape")]}, "scores of the shape"),
        ({"logits_processor": [plugin("not-a-number")]}, "NaN or infinite"),
        ({"stopping_criteria": [plugin("raising", after=12)]}, "raised LookupError"),
        ({"logits_processor": [plugin("exiting")]}, "raised SystemExit"),
        ({"stopping_criteria": [plugin("exiting")]}, "raised SystemExit"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", [{}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}], ids=str)
def test_one_that_fails_ends_its_request_alone_and_says_which(
    loaded: LoadedModel, plugins: dict[str, Any], text: str, mode: dict[str, Any]
) -> None:
    others = [{"repetition_penalty": 1.2}, {"do_sample": True, "seed": 4, "output_scores": True}]
    expected = [generate(loaded, PROMPT, {**LENGTH, **one}).ids for one in others]
    engine = new_engine(loaded)
    items = [item(loaded, **one) for one in others]
    sick = item(loaded, **mode, **plugins)
    answers = run(engine, items[0], sick, items[1])
    finished = answers[sick.request_id].finished
    assert finished is not None
    assert isinstance(finished.error, Internal)
    (name,) = plugins
    assert (finished.error.reason, finished.error.field) == ("PLUGIN_FAILED", f"config.{name}")
    assert text in finished.error.message
    assert "secret" not in finished.error.message
    assert [list(answers[one.request_id].ids.values()) for one in items] == expected
    assert engine.load().kv_blocks_used == 0


def test_scores_of_any_size_break_no_step(loaded: LoadedModel) -> None:
    ours = generate(loaded, PROMPT, {**LENGTH, "logits_processor": [plugin("huge")], "do_sample": True, "top_p": 0.9})
    assert ours.ids == [[7] * 24]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (plugin("unknown"), "PLUGIN_NOT_FOUND"),
        (config_pb2.Plugin(name="favour", parameters="[1]"), "INVALID_FIELD"),
        (config_pb2.Plugin(name="favour", parameters="[" * 4000), "INVALID_FIELD"),
        (plugin("favour", no_such=1), "INVALID_FIELD"),
        (config_pb2.Plugin(name="favour", parameters=" " * 4097), "INVALID_FIELD"),
    ],
    ids=["unknown", "no object", "deep", "unknown parameter", "long"],
)
def test_what_cannot_be_made_is_refused_by_its_field(
    loaded: LoadedModel, choice: config_pb2.Plugin, reason: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        item(loaded, logits_processor=[choice])
    assert (refused.value.field, refused.value.reason) == ("config.logits_processor", reason)
    with pytest.raises(InvalidArgument) as refused:
        item(loaded, stopping_criteria=[plugin("multiple", of=0)])
    assert refused.value.field == "config.stopping_criteria"
    with pytest.raises(InvalidArgument) as refused:
        item(loaded, stopping_criteria=[plugin("multiple", of=2)] * 5)
    assert refused.value.field == "config.stopping_criteria"
    with pytest.raises(Internal, match="raised RuntimeError"):
        item(loaded, logits_processor=[plugin("broken")])
    with pytest.raises(Internal, match="raised SystemExit"):
        item(loaded, stopping_criteria=[plugin("exiting", at_once=True)])


def test_they_are_the_same_alone_and_preempted(loaded: LoadedModel) -> None:
    processors = {"logits_processor": OURS["logits_processor"]}
    specs = [
        {**processors, **mode} for mode in ({}, {"do_sample": True, "seed": 3}, {"num_beams": 3}, {"num_beams": 2})
    ]
    alone = [generate(loaded, PROMPT, {**LENGTH, **spec}).ids for spec in specs]
    tight = engine_config(num_blocks=20, block_size=4, max_running_sequences=16, max_batch_tokens=24, reserve_share=0.0)
    engine = new_engine(loaded, tight)
    items = [item(loaded, **spec) for spec in specs]
    answers = run(engine, *items)
    found = [[ids for _, ids in sorted(answers[one.request_id].ids.items())] for one in items]
    assert found == alone
    assert engine.stats.preemptions > 0


def test_only_processors_leave_the_fast_path(loaded: LoadedModel) -> None:
    assert RowPlan.of(item(loaded, stopping_criteria=[plugin("multiple", of=29)]).params).is_plain
    assert not RowPlan.of(item(loaded, logits_processor=[plugin("favour")]).params).is_plain


@pytest.mark.parametrize("ids", [[], PROMPT[:6]], ids=["embeds", "embeds-and-ids"])
@pytest.mark.parametrize("arguments", MODES[:3], ids=str)
def test_plugins_see_the_ids_beside_embeddings_as_transformers_own_do(
    loaded: LoadedModel, reference: PreTrainedModel, ids: list[int], arguments: dict[str, Any]
) -> None:
    rows = torch.randn(6, 48, generator=torch.Generator().manual_seed(3)) * 0.2
    given = {**LENGTH, **arguments, "inputs_embeds": rows[None]}
    # A remainder that a placeholder would change, and a criterion that breaks when it sees more ids than there are.
    too_many = len(ids) + LENGTH["max_new_tokens"] + 1
    ours = {
        "logits_processor": [plugin("favour", parts=7), *OURS["logits_processor"]],
        "stopping_criteria": [*OURS["stopping_criteria"], plugin("raising", after=too_many)],
    }
    theirs = {**THEIRS, "logits_processor": LogitsProcessorList([Favour(parts=7), *THEIRS["logits_processor"]])}
    expected, _ = reference_answer(reference, ids, {**given, **theirs})
    assert generate(loaded, ids, {**given, **ours}).ids == expected
