"""Assisted generation at a real generation service: a draft model, prompt lookup, usage, metrics and refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from factories.engine.free_drafts import free_drafts
from factories.servers.generation import TEXT_VOCAB_SIZE, Client, Outcome, generation_service, request, text_checkpoint
from penstock.common.checkpoint import DEMO_MODEL_NAME, demo_folder
from penstock.common.errors import NotFound, StartupError
from penstock.v1 import admin_pb2, common_pb2, config_pb2, model_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = tuple(range(20, 60))
DRAFT = {"assistant_model": DEMO_MODEL_NAME, "num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}
LOOKUP = {"prompt_lookup_num_tokens": 6}
MEMORY = {"ngram_memory_num_tokens": 8}
LOOKAHEAD = {"lookahead_window": 6}
KINDS = {"draft_model": DRAFT, "prompt_lookup": LOOKUP, "ngram_memory": MEMORY, "lookahead": LOOKAHEAD}
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.9, "top_k": 40}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    """The embedded model, which drafts for itself; in float32, where no id depends on the rows of a step."""
    with free_drafts():
        async with generation_service(
            demo_folder(), assistant_model=str(demo_folder()), assistant_kv_memory="2MiB", dtype="float32"
        ) as running:
            yield running


async def answer(client: Client, options: dict[str, Any], **fields: Any) -> Outcome:
    outcome = await client.generate(request(PROMPT, config={"max_new_tokens": 40, **options}, **fields))
    assert outcome.error is None
    return outcome


def figures(client: Client, name: str, **labels: str) -> float:
    value = client.running.registry.get_sample_value(name, {"model_name": DEMO_MODEL_NAME, **labels})
    assert value is not None
    return float(value)


def drafts(client: Client, verdict: str) -> dict[str, float]:
    """Verified drafts by kind."""
    name = f"penstock_generation_{verdict}_draft_tokens_total"
    return {kind: figures(client, name, kind=kind) for kind in KINDS}


async def test_the_model_says_which_draft_model_is_served(client: Client) -> None:
    info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
    assert info.assistant_model == DEMO_MODEL_NAME
    assert any(line.startswith("drafts") for line in client.running.service.status_lines())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("assistance", [DRAFT, LOOKUP, MEMORY, LOOKAHEAD, {**LOOKUP, **MEMORY, **LOOKAHEAD}])
@pytest.mark.parametrize("sampling", [{}, SAMPLED, {**SAMPLED, "num_return_sequences": 3}])
async def test_assistance_changes_no_token_and_is_told_as_the_mode(
    client: Client, assistance: dict[str, Any], sampling: dict[str, Any]
) -> None:
    plain = await answer(client, sampling, output={"top_logprobs": 1})
    assisted = await answer(client, {**sampling, **assistance}, output={"top_logprobs": 1})
    for index in range(sampling.get("num_return_sequences", 1)):
        assert assisted.ids(index) == plain.ids(index)
    assert assisted.started.generation_mode == common_pb2.GENERATION_MODE_ASSISTED_GENERATION
    assert sum(len(delta.logprobs) for delta in assisted.deltas) == sum(len(delta.token_ids) for delta in plain.deltas)
    assert len(assisted.deltas) <= len(plain.deltas)


async def test_usage_and_metrics_count_accepted_and_rejected_drafts(client: Client) -> None:
    names = ("accepted", "rejected")
    before = [sum(drafts(client, name).values()) for name in names]
    steps = figures(client, "penstock_engine_draft_seconds_count")
    own = (await answer(client, DRAFT)).finished.usage
    # Its own draft model draws what it draws: 4 drafts and a token after them in every step but the prompt's.
    assert (own.accepted_draft_tokens, own.rejected_draft_tokens) == (31, 0)
    unsure = (await answer(client, {**DRAFT, "assistant_confidence_threshold": 0.999})).finished.usage
    assert unsure.accepted_draft_tokens < 31
    lookup = (await answer(client, {**LOOKUP, **SAMPLED})).finished.usage
    assert lookup.rejected_draft_tokens > 0
    assert lookup.completion_tokens == 40
    after = [sum(drafts(client, name).values()) for name in names]
    used = [sum(getattr(usage, f"{name}_draft_tokens") for usage in (own, unsure, lookup)) for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == used
    assert figures(client, "penstock_engine_draft_seconds_count") > steps


@pytest.mark.parametrize("kind", KINDS)
async def test_metrics_have_the_kinds_apart(client: Client, kind: str) -> None:
    names = ("accepted", "rejected")
    # The second time there is a past output.
    for _ in range(2):
        before = [drafts(client, name) for name in names]
        usage = (await answer(client, KINDS[kind], cache_salt="kinds")).finished.usage
        after = [drafts(client, name) for name in names]
    grown = [{one: now[one] - then[one] for one in KINDS} for now, then in zip(after, before, strict=True)]
    nothing = dict.fromkeys(KINDS, 0)
    assert grown[0] == {**nothing, kind: usage.accepted_draft_tokens}
    assert grown[1] == {**nothing, kind: usage.rejected_draft_tokens}
    assert usage.accepted_draft_tokens + usage.rejected_draft_tokens > 0


async def test_what_was_written_before_is_drafted_for_the_same_tenant_only(client: Client) -> None:
    for salt, is_known in (("a", False), ("a", True), ("b", False)):
        for fair_share_key in ("one", "two"):
            used = (await answer(client, MEMORY, cache_salt=salt, fair_share_key=fair_share_key)).finished.usage
            known = used.accepted_draft_tokens > 25
            assert known == is_known, (salt, fair_share_key)
    assert figures(client, "penstock_ngram_memory_tenants") >= 4
    assert figures(client, "penstock_ngram_memory_tokens") > 4 * 40


async def test_drafts_are_of_no_use_unless_asked_for(client: Client) -> None:
    usage = (await answer(client, {"num_assistant_tokens": 4})).finished.usage
    assert (usage.accepted_draft_tokens, usage.rejected_draft_tokens) == (0, 0)
    assert (await answer(client, {"assistant_model": ""})).finished.usage.accepted_draft_tokens == 0


async def test_another_draft_model_is_not_found(client: Client) -> None:
    outcome = await client.generate(request(PROMPT, config={"assistant_model": "nobody"}))
    assert isinstance(outcome.error, NotFound)
    assert "config.assistant_model" in outcome.error.message


async def test_a_json_document_is_drafted_within_its_grammar(client: Client) -> None:
    constraint = config_pb2.Constraint(choice=config_pb2.Choices(values=["yes indeed", "yes please"]))
    plain = await answer(client, SAMPLED, constraint=constraint, stop={"ignore_eos": False})
    assisted = await answer(client, {**SAMPLED, **DRAFT}, constraint=constraint, stop={"ignore_eos": False})
    assert assisted.ids() == plain.ids()
    assert assisted.finished.usage.rejected_draft_tokens == 0


async def test_warming_up_again_leaves_the_draft_model_right(client: Client) -> None:
    expected = (await answer(client, DRAFT)).ids()
    await client.admin.WarmUp(admin_pb2.WarmUpRequest())
    outcome = await answer(client, DRAFT)
    assert outcome.ids() == expected
    assert outcome.finished.usage.rejected_draft_tokens == 0


async def refusal(folder: Path, **config: Any) -> StartupError:
    with pytest.raises(StartupError) as refused:
        async with generation_service(folder, **config):
            pass
    assert "\n" not in refused.value.message
    return refused.value


async def test_a_draft_model_that_does_not_fit_is_refused_by_its_flag(tmp_path: Path) -> None:
    model = text_checkpoint(tmp_path / "model")
    narrow = text_checkpoint(tmp_path / "narrow", vocab_size=4000)
    other = text_checkpoint(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for draft, words in ((narrow, "vocabulary of 4000"), (other, "another tokenizer"), (tmp_path / "no", "no such")):
        error = await refusal(model, assistant_model=str(draft))
        assert error.flag == "--assistant-model"
        assert "--assistant-model" in error.message
        assert words in error.message
    error = await refusal(model, assistant_model=str(model), assistant_kv_memory="1B")
    assert error.flag == "--assistant-kv-memory"
    assert (await refusal(model, assistant_kv_memory="much")).flag == "--assistant-kv-memory"


async def test_the_same_ids_written_otherwise_are_accepted(tmp_path: Path) -> None:
    model = text_checkpoint(tmp_path / "model")
    draft = text_checkpoint(tmp_path / "draft", num_hidden_layers=1)
    (draft / "tokenizer.json").write_text(json.dumps(json.loads((draft / "tokenizer.json").read_text()), indent=3))
    async with generation_service(model, assistant_model=str(draft)) as client:
        assisted = await answer(client, {"assistant_model": "draft", "assistant_confidence_threshold": 0.0})
        plain = await answer(client, {})
        assert assisted.ids() == plain.ids()
        usage = assisted.finished.usage
        assert usage.accepted_draft_tokens + usage.rejected_draft_tokens > 0


@pytest.mark.parametrize("padding", [-8, 8])
async def test_a_vocabulary_padded_to_another_size_is_accepted(tmp_path: Path, padding: int) -> None:
    model = text_checkpoint(tmp_path / "model", vocab_size=TEXT_VOCAB_SIZE + 16)
    draft = text_checkpoint(tmp_path / "draft", vocab_size=TEXT_VOCAB_SIZE + 16 + padding)
    options = {"do_sample": True, "seed": 3, "logit_bias": {TEXT_VOCAB_SIZE + 15: 3.0}}
    assistance = {"assistant_model": "draft", "assistant_confidence_threshold": 0.0}
    async with generation_service(model, assistant_model=str(draft)) as client:
        # An id that the smaller of the two has not.
        prompt = (*PROMPT, TEXT_VOCAB_SIZE + 15)
        ids = [
            (await client.generate(request(prompt, config={"max_new_tokens": 20, **options, **extra}))).ids()
            for extra in ({}, assistance)
        ]
        assert len(ids[0]) == 20
        assert ids[0] == ids[1]
