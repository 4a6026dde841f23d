"""A real service whose model transformers' modules run: streams, facts, refusals, reload; and as a process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from factories.models.adapters import lora_folder
from factories.models.checkpoints import tiny_checkpoint
from factories.models.model_types import greedy_ids, reference_of, tiny_model_type
from factories.servers.generation import Client, generation_service, request
from factories.servers.stack import start
from penstock.common.errors import StartupError, from_rpc_error
from penstock.v1 import admin_pb2, generation_pb2_grpc, graphs_pb2, model_pb2

PROMPT = [9, 44, 71, 5, 5, 102, 33, 80, 9, 44, 71, 5, 17, 64, 128, 6, 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_type(tmp_path_factory.mktemp("model"), "starcoder2")


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[Client]:
    async with generation_service(folder, dtype="float32") as client:
        yield client


async def test_it_streams_what_transformers_generates(client: Client, folder: Path) -> None:
    expected = greedy_ids(reference_of(folder), PROMPT, 24)
    message = request(PROMPT, config={"max_new_tokens": 24})
    outcome = await client.generate(message)
    assert outcome.ids() == expected
    info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
    assert (info.model_route, info.model_type, info.architecture) == ("fallback", "starcoder2", "Starcoder2ForCausalLM")
    assert info.kv.num_layers == 4
    assert info.kv.num_states == 0
    assert info.kv.prefix_cache
    assert not info.forward_graphs
    reloaded = await client.admin.Reload(admin_pb2.ReloadRequest())
    assert reloaded.weights_bytes > 0
    assert (await client.generate(message)).ids() == expected


async def test_it_tells_for_which_field_a_native_type_runs_by_it(tmp_path: Path) -> None:
    folder = tiny_model_type(tmp_path, "llama", hidden_act="gelu")
    async with generation_service(folder, dtype="float32") as client:
        info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert (info.model_route, info.model_type) == ("fallback", "llama")
        assert info.model_route_reason == "hidden_act 'gelu' is not supported; supported is silu"


async def test_what_it_cannot_do_is_refused_by_name(client: Client, tmp_path: Path) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await client.model.AllocateTensors(graphs_pb2.AllocateTensorsRequest())
    assert from_rpc_error(refused.value).reason == "NO_GRAPHS"
    checkpoint = tiny_checkpoint(tmp_path / "base")
    adapter = lora_folder(tmp_path / "adapter", checkpoint)
    with pytest.raises(StartupError, match="transformers' modules run it: merge it") as error:
        async with generation_service(checkpoint, model_route="fallback", lora=(f"one={adapter}",)):
            pass
    assert error.value.flag == "--lora"


async def test_a_route_that_does_not_exist_is_refused(folder: Path) -> None:
    for route, named in (("other", "--model-route must be one of"), ("native", "'starcoder2' is not native")):
        with pytest.raises(StartupError, match=named):
            async with generation_service(folder, model_route=route):
                pass


def test_a_process_leaves_nothing_out_that_transformers_needs(folder: Path) -> None:
    process = start("generation", str(folder), "--kv-memory", "8MiB", "--threads", "1", "--dtype", "float32")
    try:
        process.wait_ready()
        with grpc.insecure_channel(process.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            events = list(stub.Generate(request(PROMPT, config={"max_new_tokens": 24})))
        ids = [token for event in events for token in event.delta.token_ids]
        assert ids == greedy_ids(reference_of(folder), PROMPT, 24)
    finally:
        process.kill()
    assert "self-check passed" in process.output()


async def test_a_model_with_states_says_so(tmp_path: Path) -> None:
    folder = tiny_model_type(tmp_path, "granitemoehybrid")
    async with generation_service(folder, dtype="float32", state_snapshot_tokens=64) as client:
        outcome = await client.generate(request(PROMPT, config={"max_new_tokens": 12}))
        assert outcome.ids() == greedy_ids(reference_of(folder), PROMPT, 12)
        info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert info.kv.num_states == info.limits.max_running_sequences
        assert info.kv.bytes_per_state > 0
        assert info.kv.prefix_cache
        assert info.kv.num_state_snapshots == 32
