"""A draft head at a real generation service: its name, its drafts, usage, metrics, and what it is refused with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from factories.engine.free_drafts import free_drafts
from factories.models.checkpoints import tiny_checkpoint
from factories.models.draft_heads import eagle3_folder
from factories.models.model_types import tiny_model_type
from factories.servers.generation import Client, Outcome, generation_service, request
from penstock.common.checkpoint import DEMO_HEAD, DEMO_MODEL_NAME, demo_folder
from penstock.common.errors import NotFound, StartupError
from penstock.v1 import admin_pb2, model_pb2
from tokenizers import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAME = "penstock-demo-head"
HEAD = {"assistant_model": NAME, "num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}
PLAIN = {"assistant_model": None, "num_assistant_tokens": None, "assistant_confidence_threshold": None}
QUESTION = "<|im_start|>user\nWrite the numbers from 7 to 30.<|im_end|>\n<|im_start|>assistant\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    """The embedded model and its head; in float32, where no id depends on the rows of a step."""
    with free_drafts():
        async with generation_service(
            demo_folder(), draft_head=DEMO_HEAD, assistant_kv_memory="1MiB", dtype="float32"
        ) as running:
            yield running


async def answer(client: Client, options: dict[str, Any]) -> Outcome:
    prompt = tuple(Tokenizer.from_file(str(demo_folder() / "tokenizer.json")).encode(QUESTION).ids)
    given = {name: value for name, value in options.items() if value is not None}
    outcome = await client.generate(request(prompt, config={"max_new_tokens": 60, **given}))
    assert outcome.error is None
    return outcome


async def test_the_model_says_which_head_is_served(client: Client) -> None:
    info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
    assert info.assistant_model == NAME
    (line,) = [line for line in client.running.service.status_lines() if line.startswith("drafts")]
    assert "EAGLE-3 head on hidden states 1, 2, 3" in line


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 5, "temperature": 0.9}])
async def test_its_drafts_change_no_ids_and_are_counted_by_their_kind(client: Client, options: dict[str, Any]) -> None:
    def counted(verdict: str) -> float:
        labels = {"model_name": DEMO_MODEL_NAME, "kind": "draft_head"}
        value = client.running.registry.get_sample_value(f"penstock_generation_{verdict}_draft_tokens_total", labels)
        assert value is not None
        return float(value)

    before = counted("accepted")
    plain, drafted = await answer(client, {**options, **PLAIN}), await answer(client, {**options, **HEAD})
    assert drafted.ids() == plain.ids()
    usage = drafted.finished.usage
    assert plain.finished.usage.accepted_draft_tokens == 0
    assert usage.accepted_draft_tokens + usage.rejected_draft_tokens > 0
    assert counted("accepted") - before == usage.accepted_draft_tokens


async def test_warming_up_again_leaves_the_head_right(client: Client) -> None:
    expected = (await answer(client, HEAD)).ids()
    await client.admin.WarmUp(admin_pb2.WarmUpRequest())
    assert (await answer(client, HEAD)).ids() == expected


async def test_another_name_is_refused_with_the_served_one(client: Client) -> None:
    outcome = await client.generate(request((5, 6), config={"assistant_model": "other"}))
    assert isinstance(outcome.error, NotFound)
    assert NAME in outcome.error.message


async def refusal(folder: Path, **config: Any) -> StartupError:
    with pytest.raises(StartupError) as refused:
        async with generation_service(folder, **config):
            pass
    assert "\n" not in refused.value.message
    return refused.value


async def test_a_head_that_does_not_fit_is_refused_by_its_flag(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=5)
    other = eagle3_folder(tmp_path / "other", hidden_size=36)
    fallback = tiny_model_type(tmp_path / "fallback", "gpt2")
    for folder, head, said in (
        (model, str(other), "hidden states of 36 numbers"),
        (model, str(model), "architectures"),
        (model, str(tmp_path / "nowhere"), "nowhere"),
        (model, "checkpoint", "num_nextn_predict_layers"),
        (fallback, str(other), "native model"),
    ):
        error = await refusal(folder, draft_head=head)
        assert error.flag == "--draft-head", error.message
        assert said in error.message
    error = await refusal(model, draft_head=str(other), assistant_model=str(model))
    assert error.flag == "--draft-head"
    assert "--assistant-model" in error.message
