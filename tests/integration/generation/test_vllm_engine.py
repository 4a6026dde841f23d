"""vLLM's gRPC protocol at a generation service: as a gateway for vLLM calls it, and by our own router."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.models.adapters import lora_folder
from factories.models.checkpoints import tiny_checkpoint
from factories.servers.generation import Client, generation_service, request
from penstock.common.errors import from_rpc_error
from penstock.engines import smg_common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from penstock.engines.vllm_engine_pb2 import SamplingParams
from penstock.router.backends.prefix_index import PrefixIndex, routing_hashes
from penstock.router.engines.engine_blocks import EngineBlocks
from penstock.v1 import admin_pb2, model_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = list(range(5, 25))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[Client]:
    async with generation_service(folder, vllm_engine=True) as running:
        yield running
        await running.until_idle()


def stub_of(client: Client) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(client.channel)


def asked(stream: bool = True, request_id: str = "", **sampling: Any) -> vllm_engine_pb2.GenerateRequest:
    """Make a request: greedy, unless told."""
    sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}
    message = vllm_engine_pb2.GenerateRequest(request_id=request_id, stream=stream)
    message.tokenized.input_ids.extend(PROMPT)
    message.sampling_params.CopyFrom(SamplingParams(**sampling))
    return message


async def read(client: Client, message: vllm_engine_pb2.GenerateRequest) -> list[vllm_engine_pb2.GenerateResponse]:
    return [part async for part in stub_of(client).Generate(message)]


def ids_of(parts: list[vllm_engine_pb2.GenerateResponse], index: int = 0) -> list[int]:
    """Ids of the chunks: those of the end repeat the last chunk's, as vLLM's do."""
    chunks = [part.chunk for part in parts if part.HasField("chunk")]
    return [one for chunk in chunks if chunk.index == index for one in chunk.token_ids]


async def test_a_stream_has_the_ids_of_our_own_and_one_end(client: Client) -> None:
    parts = await read(client, asked())
    own = await client.generate(request(PROMPT))
    assert ids_of(parts) == own.ids()
    end = parts[-1].complete
    assert (end.finish_reason, end.prompt_tokens) == ("length", len(PROMPT))
    assert [part.WhichOneof("response") for part in parts].count("complete") == 1
    assert list(end.output_ids) == own.ids()[-1:]


async def test_without_a_stream_there_is_one_message_a_sequence(client: Client) -> None:
    parts = await read(client, asked(stream=False, temperature=1.0, n=2, seed=7))
    assert sorted(part.complete.index for part in parts) == [0, 1]
    assert all(len(part.complete.output_ids) == 8 for part in parts)
    again = await read(client, asked(temperature=1.0, n=2, seed=7))
    assert [ids_of(again, index) for index in (0, 1)] == [
        list(part.complete.output_ids) for part in sorted(parts, key=lambda one: one.complete.index)
    ]


async def test_defaults_are_vllms(client: Client) -> None:
    """An unset temperature is 1 there, and no top_k is 50."""
    unset = asked(seed=3)
    unset.sampling_params.ClearField("temperature")
    parts = await read(client, unset)
    own = await client.generate(request(PROMPT, config={"do_sample": True, "top_k": 0, "seed": 3}))
    assert ids_of(parts) == own.ids()


async def test_log_probabilities_come_with_tokens_and_prompt(client: Client) -> None:
    parts = await read(client, asked(logprobs=2, prompt_logprobs=1))
    chunks = [part.chunk for part in parts if part.HasField("chunk")]
    assert [one for chunk in chunks for one in chunk.output_logprobs.token_ids] == ids_of(parts)
    assert all(len(top.token_ids) == 2 for chunk in chunks for top in chunk.output_logprobs.top_logprobs)
    prompt = chunks[0].input_logprobs
    assert len(prompt.token_logprobs) == len(PROMPT)
    assert not prompt.token_logprobs[0].HasField("value")
    assert list(prompt.token_ids)[1:] == PROMPT[1:]


async def test_a_stop_id_is_named(client: Client) -> None:
    ids = ids_of(await read(client, asked()))
    stop = next(one for one in ids if ids.index(one) > 0)
    end = (await read(client, asked(stop_token_ids=[stop])))[-1].complete
    assert (end.finish_reason, end.matched_token_id) == ("stop", stop)


async def test_a_constraint_is_kept(client: Client) -> None:
    choices = vllm_engine_pb2.ChoiceConstraint(choices=["yes", "no"])
    parts = await read(client, asked(choice=choices, ignore_eos=False, max_tokens=20))
    assert parts[-1].complete.finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"top_p": 2.0}, "sampling_params.top_p"),
        ({"logprobs": -1}, "sampling_params.logprobs"),
        ({"logprobs": 21}, "sampling_params.logprobs"),
        ({"structural_tag": "{}"}, "sampling_params.structural_tag"),
        ({"stop_token_ids": [1 << 30]}, "sampling_params.stop_token_ids"),
    ],
)
async def test_a_refusal_names_their_field(client: Client, change: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(client, asked(**change))
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.field or "").startswith(field)


async def test_text_is_refused(client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(client, vllm_engine_pb2.GenerateRequest(text="Hello"))
    assert from_rpc_error(caught.value).field == "text"


async def test_abort_ends_a_request_and_its_stream_says_so(client: Client) -> None:
    call = stub_of(client).Generate(asked(request_id="one", max_tokens=4000))
    first = await call.read()
    assert first.HasField("chunk")
    await stub_of(client).Abort(vllm_engine_pb2.AbortRequest(request_ids=["one", "nobody's"]))
    last = first
    while (part := await call.read()) is not grpc.aio.EOF:
        last = part
    assert last.complete.finish_reason == "abort"
    await client.until_idle()


async def test_a_caller_that_leaves_frees_its_request(client: Client) -> None:
    call = stub_of(client).Generate(asked(max_tokens=4000))
    await call.read()
    call.cancel()
    await client.until_idle()


async def test_the_process_describes_itself(client: Client, folder: Path) -> None:
    stub = stub_of(client)
    info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert (info.vocab_size, info.is_generation) == (4096, True)
    server = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
    assert server.max_num_seqs > 0
    assert server.block_size > 0
    load = (await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads[0]
    assert load.max_total_num_tokens > 0
    assert (await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy
    assert (await stub.FlushCache(smg_common_pb2.FlushCacheRequest())).success
    embedded = await stub.Embed(
        vllm_engine_pb2.EmbedRequest(tokenized=vllm_engine_pb2.TokenizedInput(input_ids=PROMPT))
    )
    assert len(embedded.embedding) == embedded.embedding_dim > 0


async def test_the_room_of_a_model_with_groups_of_layers_counts_each_token_once(tmp_path: Path) -> None:
    async with generation_service(tiny_checkpoint(tmp_path, "gemma3_text"), vllm_engine=True) as grouped:
        kv = (await grouped.model.GetModelInfo(model_pb2.GetModelInfoRequest())).kv
        bundle = sum(group.num_blocks for group in kv.groups)
        assert bundle > 1
        load = (await stub_of(grouped).GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads[0]
        assert load.max_total_num_tokens == kv.num_blocks // bundle * kv.block_size


async def test_its_tokenizer_comes_whole(client: Client, folder: Path) -> None:
    chunks = [one async for one in stub_of(client).GetTokenizer(smg_common_pb2.GetTokenizerRequest())]
    archive = b"".join(one.data for one in chunks)
    assert hashlib.sha256(archive).hexdigest() == chunks[-1].sha256
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        assert files.read("tokenizer.json") == (folder / "tokenizer.json").read_bytes()


async def test_it_is_off_unless_asked_for(folder: Path) -> None:
    async with generation_service(folder) as plain:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(plain).HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_draining_shows_as_unhealthy(folder: Path) -> None:
    async with generation_service(folder, vllm_engine=True) as own:
        service: Any = own.running.service
        service._lifecycle.start_drain()
        told = await stub_of(own).HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert not told.healthy
        service._lifecycle.resume()


async def test_metrics_have_the_names_that_pickers_read(folder: Path, tmp_path: Path) -> None:
    """Queue, KV cache and adapters of the model-server protocol of the Gateway API's inference extension."""
    lora_folder(tmp_path / "mine", folder, seed=1)
    async with generation_service(folder, vllm_engine=True, lora=(f"mine={tmp_path / 'mine'}",)) as running:
        info = await running.model.GetModelInfo(model_pb2.GetModelInfoRequest())
        labels = {"model_name": info.model}
        value = running.running.registry.get_sample_value
        names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
        assert [value(f"vllm:{name}", labels) for name in names] == [0.0, 0.0, 0.0]
        cache = {"block_size": str(info.kv.block_size), "num_gpu_blocks": str(info.kv.num_blocks)}
        assert value("vllm:cache_config_info", labels | cache) == 1.0
        adapters = {"max_lora": "8", "running_lora_adapters": "mine", "waiting_lora_adapters": ""}
        before = value("vllm:lora_requests_info", labels | adapters)
        assert before is not None
        assert before <= (value("vllm:lora_requests_info", labels | adapters) or 0.0)


async def test_without_the_protocol_there_are_no_names_of_vllm(folder: Path) -> None:
    async with generation_service(folder) as running:
        assert not [one.name for one in running.running.registry.collect() if one.name.startswith("vllm:")]


async def test_a_gateway_finds_by_cache_events_what_a_prompt_has(folder: Path) -> None:
    """In the names of our own router: it reads the same events of vLLM."""
    async with generation_service(folder, vllm_engine=True) as running:
        size = (await running.model.GetModelInfo(model_pb2.GetModelInfoRequest())).kv.block_size
        events = stub_of(running).SubscribeKvEvents(smg_common_pb2.SubscribeKvEventsRequest())
        first, asked = asyncio.ensure_future(events.read()), 0
        while not first.done():
            # Until the service has begun to note them.
            asked += 1
            await running.generate(request([asked] * 40))
        blocks, index = EngineBlocks(size, 1000), PrefixIndex(1000)
        prompt = list(range(100, 170))
        names = routing_hashes(prompt, size, "", 100)
        await running.generate(request(prompt))
        blocks.take(await first)
        async with asyncio.timeout(60):
            while index.match(names) < len(names):
                if (told := blocks.changes()) is not None:
                    index.take(told.kept, told.gone, begins_anew=told.begins_anew)
                else:
                    blocks.take(await events.read())
        await running.admin.ClearCache(admin_pb2.ClearCacheRequest())
        async with asyncio.timeout(60):
            while index.match(names):
                blocks.take(await events.read())
                if (told := blocks.changes()) is not None:
                    index.take(told.kept, told.gone, begins_anew=told.begins_anew)
        events.cancel()
