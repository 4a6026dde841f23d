"""Tensors of output positions over a real generation service, through a real router, to the Python client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import torch
from factories.engine.step_gate import held_after
from factories.models.checkpoints import reference_model
from factories.servers.generation import Client, generation_service, request, text_checkpoint
from factories.servers.router import Router, chat, collect, generate, running_router
from penstock.common.errors import InvalidArgument, from_rpc_error
from penstock.v1 import common_pb2, config_pb2, generation_pb2
from penstock_client import AsyncClient

EVERYTHING = {
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("model"), family="qwen2", seed=8)


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[Client]:
    async with generation_service(folder, block_size=4, max_batch_tokens=64) as one:
        yield one


@pytest.fixture
async def router(client: Client) -> AsyncIterator[Router]:
    async with running_router(backend=(client.running.address,)) as one:
        yield one


def array(tensor: common_pb2.Tensor) -> npt.NDArray[Any]:
    dtypes: dict[int, str] = {common_pb2.D_TYPE_FLOAT32: "<f4", common_pb2.D_TYPE_INT64: "<i8"}
    return np.frombuffer(tensor.data, dtypes[tensor.dtype]).reshape(tuple(tensor.shape))


def check_all(folder: Path, prompt: list[int], ids: list[int], tensors: list[common_pb2.StepTensors]) -> None:
    """Greedy, without processors: everything from one forward pass of transformers."""
    with torch.inference_mode():
        theirs: Any = reference_model(folder)(
            torch.tensor([prompt + ids]), output_hidden_states=True, output_attentions=True
        )
    assert len(tensors) == len(ids)
    for step, one in enumerate(tensors):
        row = len(prompt) - 1 + step
        np.testing.assert_allclose(array(one.scores), theirs.logits[0, row], atol=1e-4)
        np.testing.assert_allclose(array(one.logits), theirs.logits[0, row], atol=1e-4)
        hidden = torch.stack([state[0, row] for state in theirs.hidden_states])
        np.testing.assert_allclose(array(one.hidden_states), hidden, atol=1e-4)
        weights = torch.stack([layer[0, :, row, : row + 1] for layer in theirs.attentions])
        np.testing.assert_allclose(array(one.attentions), weights, atol=1e-5)
        assert not one.HasField("score_ids")


async def test_a_stream_carries_an_entry_per_token(client: Client, folder: Path) -> None:
    outcome = await client.generate(request(PROMPT, output=EVERYTHING))
    check_all(folder, PROMPT, outcome.ids(), [one for delta in outcome.deltas for one in delta.tensors])
    await client.until_idle()


async def test_merged_deltas_keep_entries_and_tokens_together(client: Client, folder: Path) -> None:
    outcome = await client.generate(request(PROMPT, output={**EVERYTHING, "stream_interval": 3}))
    assert [len(delta.token_ids) for delta in outcome.deltas] == [3, 3, 2]
    assert all(len(delta.tensors) == len(delta.token_ids) for delta in outcome.deltas)
    check_all(folder, PROMPT, outcome.ids(), [one for delta in outcome.deltas for one in delta.tensors])


async def test_positions_that_were_not_chosen_are_empty_entries(client: Client) -> None:
    asked = {"output_scores": True, "scores_top_k": 4, "tensor_steps": [1, 5]}
    outcome = await client.generate(request(PROMPT, output=asked))
    entries = [one for delta in outcome.deltas for one in delta.tensors]
    assert [entry.HasField("scores") for entry in entries] == [step in (1, 5) for step in range(8)]
    for step in (1, 5):
        assert array(entries[step].score_ids)[0] == outcome.ids()[step]
        assert array(entries[step].scores).shape == (4,)


async def test_scores_show_the_grammars_mask_and_logits_do_not(client: Client) -> None:
    constraint = config_pb2.Constraint(choice=config_pb2.Choices(values=["yes", "no"]))
    asked = {"output_scores": True, "output_logits": True}
    outcome = await client.generate(
        request(PROMPT, output=asked, constraint=constraint, stop={"ignore_eos": False}), timeout=60
    )
    assert outcome.error is None
    entries = [one for delta in outcome.deltas for one in delta.tensors]
    assert len(entries) == len(outcome.ids()) > 0
    for token, one in zip(outcome.ids(), entries, strict=True):
        scores, logits = array(one.scores), array(one.logits)
        allowed = np.isfinite(scores)
        assert allowed[token]
        assert allowed.sum() < 20
        assert np.isfinite(logits).all()
        np.testing.assert_allclose(scores[allowed], logits[allowed], atol=1e-5)


async def test_other_requests_get_no_tensors(client: Client) -> None:
    plain, asked = await asyncio.gather(
        client.generate(request(PROMPT)), client.generate(request(PROMPT, output=EVERYTHING))
    )
    assert plain.ids() == asked.ids()
    assert not any(delta.tensors for delta in plain.deltas)


LONG = {"config": {"max_new_tokens": 8000}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"output": {"output_scores": True}, **LONG}, "output.output_scores"),
        ({"output": {"output_logits": True, "output_hidden_states": True}, **LONG}, "output.output_logits"),
        ({"output": {"output_attentions": True}, **LONG}, "output.output_attentions"),
        ({"output": {"output_scores": True, "tensor_steps": range(5000)}}, "output.tensor_steps"),
    ],
)
async def test_what_cannot_be_sent_is_refused_by_name(
    client: Client, router: Router, fields: dict[str, Any], field: str
) -> None:
    message = request(PROMPT, **fields)
    error = (await client.generate(message)).error
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(router.stub.Generate(generate(config=message.config, output=message.output)))
    public = from_rpc_error(caught.value)
    assert isinstance(public, InvalidArgument)
    assert public.field == field


async def test_a_refusal_names_the_bytes_that_it_would_take(client: Client) -> None:
    error = (await client.generate(request(PROMPT, output={"output_logits": True}, **LONG))).error
    assert isinstance(error, InvalidArgument)
    assert str(8000 * 4096 * 4) in error.description
    allowed = {"output_logits": True, "tensor_steps": [0, 7999]}
    call = client.generation.Generate(request(PROMPT, output=allowed, **LONG))
    async for event in call:
        if event.HasField("delta"):
            assert event.delta.tensors[0].HasField("logits")
            break
    call.cancel()
    await client.until_idle()


MODES = [
    ({}, common_pb2.GENERATION_MODE_GREEDY_SEARCH),
    ({"do_sample": True}, common_pb2.GENERATION_MODE_SAMPLE),
    ({"num_beams": 3}, common_pb2.GENERATION_MODE_BEAM_SEARCH),
    ({"num_beams": 3, "do_sample": True}, common_pb2.GENERATION_MODE_BEAM_SAMPLE),
    (
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        common_pb2.GENERATION_MODE_GROUP_BEAM_SEARCH,
    ),
    ({"penalty_alpha": 0.6, "top_k": 4}, common_pb2.GENERATION_MODE_CONTRASTIVE_SEARCH),
    ({"prompt_lookup_num_tokens": 3}, common_pb2.GENERATION_MODE_ASSISTED_GENERATION),
    ({"dola_layers": config_pb2.DolaLayers(preset="low")}, common_pb2.GENERATION_MODE_DOLA_GENERATION),
]


@pytest.mark.parametrize(("config", "mode"), MODES, ids=[str(mode) for _, mode in MODES])
async def test_started_says_the_mode_through_the_router(client: Client, router: Router, config: Any, mode: int) -> None:
    message = config_pb2.GenerationConfig(max_new_tokens=4, **config)
    answer = await collect(router.stub.Generate(generate("Hello", config=message)))
    assert answer.started.generation_mode == mode
    await client.until_idle()


async def test_the_beam_score_is_the_cumulative_logprob_through_the_router(
    client: Client, router: Router, folder: Path
) -> None:
    config = config_pb2.GenerationConfig(max_new_tokens=6, num_beams=3, num_return_sequences=3)
    stop = config_pb2.StopConfig(ignore_eos=True)
    answer = await collect(router.stub.Generate(generate("Hello", config=config, stop=stop)))
    ids = await router.encode("Hello")
    with torch.inference_mode():
        theirs: Any = reference_model(folder).generate(
            torch.tensor([ids]),
            max_new_tokens=6,
            num_beams=3,
            num_return_sequences=3,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    scores = [result.cumulative_logprob for result in answer.finished.sequences]
    assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)


async def test_tensors_come_through_the_router_in_order(client: Client, router: Router, folder: Path) -> None:
    output = config_pb2.OutputConfig(return_token_ids=True, **EVERYTHING)  # type: ignore[arg-type]
    config = config_pb2.GenerationConfig(max_new_tokens=12)
    stop = config_pb2.StopConfig(ignore_eos=True)
    answer = await collect(router.stub.Generate(generate("Hello", config=config, output=output, stop=stop)))
    tensors = [one for delta in answer.deltas for one in delta.tensors]
    check_all(folder, await router.encode("Hello"), answer.ids(), tensors)
    talk = await collect(router.stub.Chat(chat("Hello", config=config, output=output, stop=stop)))
    assert [len(delta.tensors) for delta in talk.deltas] == [len(delta.token_ids) for delta in talk.deltas]
    assert len(talk.ids()) == 12


async def test_a_reader_that_is_behind_gets_whole_messages_below_the_limit(client: Client, router: Router) -> None:
    """32 kB a token, 600 of them while the client does not read: merged, and split again where they do not fit."""
    output = config_pb2.OutputConfig(return_token_ids=True, output_scores=True, output_logits=True)
    config = config_pb2.GenerationConfig(max_new_tokens=600)
    stop = config_pb2.StopConfig(ignore_eos=True)
    with held_after(1):
        call = router.stub.Generate(generate("Hello", config=config, output=output, stop=stop))
        await client.until(lambda load: load.running_requests > 0)
    await client.until_idle()
    ids: list[int] = []
    async for response in call:
        assert response.ByteSize() < 4 << 20
        if response.HasField("delta"):
            assert len(response.delta.tensors) == len(response.delta.token_ids)
            for token, one in zip(response.delta.token_ids, response.delta.tensors, strict=True):
                assert array(one.scores).argmax() == token
            ids += response.delta.token_ids
    assert len(ids) == 600
    assert router.metric("coalesced_deltas_total") > 0


async def test_a_session_message_never_holds_more_than_one_large_delta(client: Client) -> None:
    output = {"output_scores": True, "output_logits": True}
    submits = [
        generation_pb2.SessionRequest(
            submit=request([5 + index, 6, 7], output=output, config={"max_new_tokens": 20}, request_id=f"r{index}")
        )
        for index in range(40)
    ]
    tokens = 0
    async for message in client.generation.Session(iter(submits)):
        assert message.ByteSize() < 1 << 20
        tokens += sum(len(event.delta.tensors) for event in message.events)
    assert tokens == 40 * 20


async def test_the_python_client_hands_out_buffers(router: Router) -> None:
    async with AsyncClient(router.server.address) as client:
        answer = await client.generate(
            "Hello",
            max_new_tokens=5,
            ignore_eos=True,
            return_token_ids=True,
            output_scores=True,
            scores_top_k=3,
            output_hidden_states=True,
            output_attentions=True,
        )
    choice = answer.choices[0]
    assert len(choice.tensors) == 5
    for token, one in zip(choice.token_ids, choice.tensors, strict=True):
        assert one.score_ids is not None
        assert one.score_ids.values.tolist()[0] == token
        assert one.hidden_states is not None
        assert one.hidden_states.values.shape == one.hidden_states.shape == (3, 48)
        assert one.attentions is not None
        assert np.asarray(one.attentions.values).shape == one.attentions.shape
        assert all(
            math.isclose(sum(head), 1.0, abs_tol=1e-4) for layer in one.attentions.values.tolist() for head in layer
        )
        assert one.logits is None
