"""The model as graphs over Forward: Generate's ids by hand and on named sequences, refusals, quotas, nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
import pytest_asyncio
from factories.models.checkpoints import tiny_checkpoint
from factories.servers.generation import PATIENCE_SECONDS, Client, generation_service, request
from factories.servers.graph_driver import GraphDriver, call_of
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import PenstockError, from_rpc_error
from penstock.v1 import common_pb2, config_pb2, graphs_pb2, model_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [5, 6, 7, 8, 9, 10, 11]
LAYERS, HIDDEN, VOCAB = 2, 48, 320
ROWS = np.linspace(-1, 1, 4 * HIDDEN, dtype="<f4").reshape(1, 4, HIDDEN)
FLOAT = common_pb2.D_TYPE_FLOAT32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[Client]:
    settings = {"graph_lengths": (32, 64), "graph_batches": (1, 2), "graph_kv_tokens": 64, "max_graph_streams": 3}
    tensors = {"max_graph_tensors": 4, "max_graph_tensor_bytes": 1 << 16, "max_graph_leases": 2}
    async with generation_service(folder, **settings, **tensors) as running:
        yield running
        await running.until_idle()
        await nothing_is_left(running)


def access(client: Client) -> Any:
    """The running service's own ModelAccess."""
    service: Any = client.running.service
    return service._lifecycle.core.access


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition of the service holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - nothing tells when a stream of another process's kind has ended
            await asyncio.sleep(0.005)


async def nothing_is_left(client: Client) -> None:
    """Wait until no stream, lease, tensor or block is held."""
    await until(lambda: not any(access(client).figures()._replace(blocks=0, expired=0)))


async def refused(call: Any) -> PenstockError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def generated(client: Client, prompt: list[int], count: int) -> list[int]:
    outcome = await client.generate(
        request(prompt, config={"max_new_tokens": count, "do_sample": False, "repetition_penalty": 1.0})
    )
    assert outcome.error is None
    return outcome.ids()


# With the C++ kernels where they are built, which draw without logits and go on from step to step.
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("model", ["llama", "qwen3", "demo"])
async def test_by_hand_and_in_the_pool_the_ids_are_those_of_generate(model: str, kernels: str, tmp_path: Path) -> None:
    folder = demo_folder() if model == "demo" else tiny_checkpoint(tmp_path / model, model)
    async with generation_service(folder, kernels=kernels) as client:
        layers = (await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())).kv.num_layers
        wanted = await generated(client, PROMPT, 12)
        async with GraphDriver(client.model, layers) as driver:
            assert await driver.by_hand(PROMPT, 12) == wanted
            assert await driver.in_pool(PROMPT, 12, "one") == wanted
        await nothing_is_left(client)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_beside_sixteen_chats_nobodys_ids_change(folder: Path, kernels: str) -> None:
    prompts = [[3 + number, *range(20, 30 + number)] for number in range(16)]
    async with generation_service(folder, max_running_sequences=16, kernels=kernels) as client:
        alone = [await generated(client, prompt, 60) for prompt in prompts]
        wanted = await generated(client, PROMPT, 24)
        chats = [asyncio.create_task(generated(client, prompt, 60)) for prompt in prompts]
        await client.until(lambda load: load.running_requests > 0)
        async with GraphDriver(client.model, LAYERS) as one, GraphDriver(client.model, LAYERS) as two:
            found = await asyncio.gather(one.in_pool(PROMPT, 24, "x"), two.in_pool(PROMPT, 24, "x"))
            assert found == [wanted, wanted]
        assert await asyncio.gather(*chats) == alone
        await client.until_idle()
        await nothing_is_left(client)


async def test_a_prompt_may_come_in_parts_and_tokens_be_taken_back(client: Client) -> None:
    async with GraphDriver(client.model, LAYERS) as driver:
        wanted = await driver.by_hand(PROMPT, 3)
        (hidden,) = await driver.run("embedding", {0: np.array([PROMPT], "<i4")})
        for first, last in ((0, 3), (3, 7)):
            rows = hidden[:, first:last]
            for layer in range(LAYERS):
                rows, *_ = await driver.run(f"block_cache_{layer}", {0: np.ascontiguousarray(rows)}, sequence="x")
        assert int((await driver.head(rows))[0, 0]) == wanted[0]
        # Two wrong tokens, then the right one in their place.
        for ids, start in (([1, 2], None), (wanted[:1], len(PROMPT))):
            (rows,) = await driver.run("embedding", {0: np.array([ids], "<i4")})
            for layer in range(LAYERS):
                rows, *_ = await driver.run(f"block_cache_{layer}", {0: rows}, sequence="x", start=start)
        assert int((await driver.head(rows))[0, 0]) == wanted[1]


async def test_a_padded_batch_with_masks_is_each_alone(client: Client) -> None:
    async with GraphDriver(client.model, LAYERS) as driver:
        ids = np.zeros((2, 32), "<i4")
        ids[0, :7], ids[1, :3] = PROMPT, [9, 9, 4]
        mask = np.full((2, 1, 32, 32), -10000.0, "<f4")
        for row, length in enumerate((7, 3)):
            mask[row, 0, :length] = np.where(np.tri(length, 32, dtype=bool), 0.0, -10000.0)
        (hidden,) = await driver.run("embedding", {0: ids}, stage=2)
        (alone,) = await driver.run("embedding", {0: ids[1:, :3].copy()})
        keys = []
        for layer in range(LAYERS):
            hidden, *kept = await driver.run(f"block_{layer}", {0: hidden, 2: mask}, stage=2)
            alone, key, _ = await driver.run(f"block_{layer}", {0: alone})
            keys.append(kept)
            np.testing.assert_allclose(hidden[1, :3], alone[0], rtol=0, atol=2e-6)
            np.testing.assert_allclose(kept[0][1, :3], key[0], rtol=0, atol=2e-6)
        assert not hidden[1, 3:].any()
        # One more token of each, behind histories of different lengths in tensors of one size.
        (more,) = await driver.run("embedding_cache", {0: np.array([[4], [5]], "<i4")})
        (one,) = await driver.run("embedding_cache", {0: np.array([[5]], "<i4")})
        seen = np.zeros((2, 1, 1, 33), "<f4")
        seen[0, 0, 0, 7:32] = seen[1, 0, 0, 3:32] = -np.inf
        inputs = {0: more, 1: np.array([[7], [3]], "<i4"), 2: seen, 3: keys[0][0], 4: keys[0][1]}
        found, *_ = await driver.run("block_cache_0", inputs)
        history = {0: one, 3: keys[0][0][1:, :3].copy(), 4: keys[0][1][1:, :3].copy()}
        expected, *_ = await driver.run("block_cache_0", history)
        np.testing.assert_allclose(found[1], expected[0], rtol=0, atol=2e-6)


BAD_CALLS: list[tuple[graphs_pb2.ForwardRequest, str, str]] = [
    (call_of("block_2", {0: ROWS}), "GRAPH_NOT_FOUND", "graph"),
    (call_of("block_0", {0: ROWS}, model="other"), "MODEL_NOT_FOUND", "model"),
    (call_of("block_0", {0: ROWS}, stage=4), "INVALID_FIELD", "stage"),
    (call_of("block_0", {0: ROWS}, stage=0), "INVALID_FIELD", "stage"),
    (call_of("block_0", {0: ROWS, 3: ROWS}), "INVALID_FIELD", "inputs.index"),
    (call_of("block_0", {}), "INVALID_FIELD", "inputs"),
    (call_of("block_0", {0: ROWS[0]}), "INVALID_FIELD", "inputs[0].shape"),
    (call_of("block_0", {0: ROWS[:, :, :8].copy()}), "INVALID_FIELD", "inputs[0].shape"),
    (call_of("block_0", {0: np.zeros((1, 65, HIDDEN), "<f4")}), "INVALID_FIELD", "inputs[0].shape"),
    (call_of("block_0", {0: np.zeros((3, 4, HIDDEN), "<f4")}), "INVALID_FIELD", "inputs[0].shape"),
    (call_of("block_0", {0: np.zeros((1, 0, HIDDEN), "<f4")}), "INVALID_FIELD", "inputs[0].shape"),
    (call_of("block_0", {0: ROWS.astype("<i4")}), "INVALID_FIELD", "inputs[0].dtype"),
    (call_of("block_0", {0: ROWS, 1: np.zeros((1, 3), "<i4")}), "INVALID_FIELD", "inputs[1].shape"),
    (call_of("block_0", {0: ROWS, 1: np.full((1, 4), 512, "<i4")}), "INVALID_FIELD", "inputs[1]"),
    (call_of("block_0", {0: ROWS, 2: np.zeros((1, 1, 4, 4), "<f4")}), "INVALID_FIELD", "inputs[2]"),
    (call_of("block_cache_0", {0: ROWS, 3: np.zeros((1, 4, 2, 12), "<f4")}), "INVALID_FIELD", "inputs"),
    (call_of("embedding", {0: np.array([[VOCAB]], "<i4")}), "TOKEN_OUT_OF_VOCABULARY", "inputs[0]"),
    (call_of("embedding", {0: np.array([[-1]], "<i4")}), "TOKEN_OUT_OF_VOCABULARY", "inputs[0]"),
    (call_of("lm_head", {0: ROWS[:, 0]}, sequence="x"), "INVALID_FIELD", "sequence"),
    (call_of("block_0", {0: ROWS}, start=0), "INVALID_FIELD", "start"),
    (call_of("block_cache_0", {0: ROWS}, sequence="x", start=1), "INVALID_FIELD", "start"),
    (call_of("block_0", {0: ROWS.repeat(2, 0)}, sequence="x"), "INVALID_FIELD", "inputs[0].shape"),
    (call_of("block_0", {0: ROWS, 2: np.zeros((1, 1, 4, 4), "<f4")}, sequence="x"), "INVALID_FIELD", "inputs[2]"),
    (call_of("block_0", {0: np.zeros((1, 65, HIDDEN), "<f4")}, sequence="x"), "INVALID_FIELD", "inputs[0].shape"),
    (call_of("block_0", {0: ROWS}, lease_id="none"), "LEASE_NOT_FOUND", "lease_id"),
    (
        graphs_pb2.ForwardRequest(graph="block_0", inputs=[graphs_pb2.GraphInput(index=0, handle=9)]),
        "TENSOR_NOT_FOUND",
        "inputs[0].handle",
    ),
    (
        graphs_pb2.ForwardRequest(
            graph="block_0", inputs=[graphs_pb2.GraphInput(dtype=FLOAT, shape=[1, 1, HIDDEN], data=b"1234")]
        ),
        "INVALID_FIELD",
        "inputs[0].data",
    ),
    (call_of("greedy_head", {0: np.full((1, VOCAB), np.nan, "<f4")}), "INVALID_FIELD", "inputs[0]"),
    (call_of("greedy_head", {0: np.full((1, VOCAB), -np.inf, "<f4")}), "NO_TOKEN_LEFT", "inputs[0]"),
    (
        call_of("sample_head", {0: np.zeros((1, VOCAB), "<f4"), 3: np.zeros(1, "<f4")}),
        "INVALID_FIELD",
        "inputs[3]",
    ),
]


@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: f"{bad[0].graph} {bad[1]} {bad[2]}")
async def test_a_bad_call_names_its_field_and_ends_the_stream_with_all_it_held(
    client: Client, bad: tuple[graphs_pb2.ForwardRequest, str, str]
) -> None:
    message, reason, field = bad
    async with GraphDriver(client.model, LAYERS) as driver:
        # Something to lose.
        await driver.run("block_0", {0: ROWS}, sequence="mine")
        error = await driver.refused(message)
    assert (error.reason, error.field) == (reason, field)
    await nothing_is_left(client)


async def test_an_output_that_is_not_there_or_does_not_fit_is_named(client: Client) -> None:
    for outputs, field in (
        ([graphs_pb2.GraphOutput(index=3)], "outputs.index"),
        ([graphs_pb2.GraphOutput(index=1), graphs_pb2.GraphOutput(index=1)], "outputs[1]"),
        ([graphs_pb2.GraphOutput(index=0, handle=77)], "outputs[0].handle"),
    ):
        async with GraphDriver(client.model, LAYERS) as driver:
            error = await driver.refused(call_of("block_0", {0: ROWS}, outputs=outputs))
            assert error.field == field


async def test_large_tensors_come_and_go_in_parts(folder: Path) -> None:
    async with generation_service(folder, graph_lengths=(512,), graph_batches=(32,)) as client:
        rows = np.random.default_rng(3).standard_normal((32, 512, HIDDEN)).astype("<f4")
        data, part = rows.tobytes(), 1 << 20
        assert len(data) == 3 * part
        messages = [call_of("block_0", {}, call_id=7, more=True)]
        messages[0].inputs.add(index=0, dtype=FLOAT, shape=rows.shape, data=data[:part])
        for first in range(part, len(data), part):
            message = graphs_pb2.ForwardRequest(call_id=7, more=first + part < len(data))
            message.inputs.add(index=0, data=data[first : first + part])
            messages.append(message)
        async with GraphDriver(client.model, LAYERS) as driver:
            answers = await driver.send(*messages)
            assert len(answers) > 2
            assert max(answer.ByteSize() for answer in answers) < 4 << 20
            whole = b"".join(one.data for answer in answers for one in answer.outputs if one.index == 0)
            found = np.frombuffer(whole, "<f4").reshape(rows.shape)
            (expected, *_) = await driver.run("block_0", {0: rows[17:18]})
            np.testing.assert_allclose(found[17:18], expected, rtol=0, atol=1e-4)
            # Another call amid this one.
            error = await driver.refused(messages[0], graphs_pb2.ForwardRequest(call_id=8))
            assert error.field == "call_id"
        # From one tensor at the server to another: so many bytes at once travel nowhere.
        spec = graphs_pb2.TensorSpec(dtype=FLOAT, shape=[1 << 20])
        made = await client.model.AllocateTensors(graphs_pb2.AllocateTensorsRequest(tensors=[spec, spec]))
        lease, (one, two) = made.lease_id, made.handles
        write = graphs_pb2.WriteTensorRequest(lease_id=lease, handle=one, offset=7, data=data[:4])
        await client.model.WriteTensor(write)
        whole_slice = graphs_pb2.TensorSlice(handle=one, count=1 << 20)
        await client.model.WriteTensor(graphs_pb2.WriteTensorRequest(lease_id=lease, handle=two, slice=whole_slice))
        read = await client.model.ReadTensor(graphs_pb2.ReadTensorRequest(lease_id=lease, handle=two, offset=7))
        assert (read.data[:4], read.num_elements) == (data[:4], (2 << 20) // 4)
        await client.model.FreeTensors(graphs_pb2.FreeTensorsRequest(lease_id=lease, all=True))
        await nothing_is_left(client)
    async with generation_service(folder, max_graph_call_bytes=1024) as client:
        async with GraphDriver(client.model, LAYERS) as driver:
            error = await driver.refused(call_of("block_0", {0: ROWS.repeat(2, 1)}))
            assert "--max-graph-call-bytes" in error.message
        async with GraphDriver(client.model, LAYERS) as driver:
            assert (await driver.refused(call_of("lm_head", {0: ROWS[:, 0]}))).field == "outputs"


async def test_half_a_call_is_refused(client: Client) -> None:
    async with GraphDriver(client.model, LAYERS) as driver:
        await driver.call.write(call_of("block_0", {0: ROWS}, more=True))
        await driver.call.done_writing()
        error = await driver.refused()
        assert error.field == "more"


async def test_outputs_stay_at_the_server_and_go_on_from_there(client: Client) -> None:
    async with GraphDriver(client.model, LAYERS) as driver:
        wanted, *_ = await driver.run("block_0", {0: ROWS})
        keep = [graphs_pb2.GraphOutput(index=0, keep=True)]
        (answer,) = await driver.send(call_of("block_0", {0: ROWS}, outputs=keep))
        kept = answer.outputs[0]
        assert kept.handle
        assert not kept.data
        again = graphs_pb2.ForwardRequest(graph="block_1", inputs=[graphs_pb2.GraphInput(index=0, handle=kept.handle)])
        (answer,) = await driver.send(again)
        expected, *_ = await driver.run("block_1", {0: wanted})
        assert answer.outputs[0].data == expected.tobytes()
        # Into itself: the input is read before the output is written.
        own = [graphs_pb2.GraphOutput(index=0, handle=kept.handle)]
        again.outputs.extend(own)
        await driver.send(again)
        assert access(client).figures().tensors == 1
    await nothing_is_left(client)


async def test_tensors_of_a_lease_are_written_read_copied_and_freed(client: Client) -> None:
    model = client.model
    spec = graphs_pb2.TensorSpec(dtype=FLOAT, shape=[2, 3])
    made = await model.AllocateTensors(graphs_pb2.AllocateTensorsRequest(tensors=[spec, spec]))
    lease, (one, two) = made.lease_id, made.handles
    values = np.arange(6, dtype="<f4")
    await model.WriteTensor(graphs_pb2.WriteTensorRequest(lease_id=lease, handle=one, data=values.tobytes()))
    part = graphs_pb2.TensorSlice(handle=one, offset=1, count=4)
    await model.WriteTensor(graphs_pb2.WriteTensorRequest(lease_id=lease, handle=two, offset=2, slice=part))
    read = await model.ReadTensor(graphs_pb2.ReadTensorRequest(lease_id=lease, handle=two))
    assert (read.dtype, list(read.shape), read.num_elements) == (FLOAT, [2, 3], 6)
    assert np.frombuffer(read.data, "<f4").tolist() == [0, 0, 1, 2, 3, 4]
    read = await model.ReadTensor(graphs_pb2.ReadTensorRequest(lease_id=lease, handle=two, offset=3, count=2))
    assert np.frombuffer(read.data, "<f4").tolist() == [2, 3]
    for bad, field in (
        (model.ReadTensor(graphs_pb2.ReadTensorRequest(lease_id=lease, handle=9999)), "handle"),
        (model.ReadTensor(graphs_pb2.ReadTensorRequest(lease_id=lease, handle=two, offset=6)), "offset"),
        (model.ReadTensor(graphs_pb2.ReadTensorRequest(lease_id=lease, handle=two, offset=5, count=2)), "count"),
        (model.WriteTensor(graphs_pb2.WriteTensorRequest(lease_id=lease, handle=two)), "data"),
        (model.WriteTensor(graphs_pb2.WriteTensorRequest(lease_id=lease, handle=two, data=b"123")), "data"),
        (
            model.WriteTensor(graphs_pb2.WriteTensorRequest(lease_id=lease, handle=two, offset=6, data=b"1234")),
            "offset",
        ),
    ):
        assert (await refused(bad)).field == field
    freed = await model.FreeTensors(graphs_pb2.FreeTensorsRequest(lease_id=lease, handles=[one, one, 9999]))
    assert freed.tensors == 1
    freed = await model.FreeTensors(graphs_pb2.FreeTensorsRequest(lease_id=lease, all=True))
    assert freed.tensors == 1
    assert (await refused(model.FreeTensors(graphs_pb2.FreeTensorsRequest(lease_id=lease)))).reason == "LEASE_NOT_FOUND"
    await nothing_is_left(client)


async def test_quotas_name_their_flags_and_leave_nothing(client: Client) -> None:
    model = client.model
    small, large = ([graphs_pb2.TensorSpec(dtype=FLOAT, shape=[size])] for size in (4, 1 << 15))

    def allocate(tensors: Any, **fields: Any) -> Any:
        return model.AllocateTensors(graphs_pb2.AllocateTensorsRequest(tensors=tensors, **fields))

    error = await refused(allocate(large))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "GRAPH_QUOTA")
    assert "--max-graph-tensor-bytes" in error.message
    assert "tensors" in (await refused(allocate(small * 5))).message
    lease = (await allocate(small * 3)).lease_id
    assert "--max-graph-tensors" in (await refused(allocate(small * 2, lease_id=lease))).message
    await allocate(())
    assert "--max-graph-leases" in (await refused(allocate(()))).message
    for bad in ([graphs_pb2.TensorSpec(shape=[1])], [graphs_pb2.TensorSpec(dtype=FLOAT, shape=[0])]):
        assert (await refused(allocate(bad, lease_id=lease))).code is grpc.StatusCode.INVALID_ARGUMENT
    assert (await refused(allocate((), lease_id=lease, lease_seconds=-1))).field == "lease_seconds"
    access(client).close()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            driver = await stack.enter_async_context(GraphDriver(client.model, LAYERS))
            await driver.run("block_0", {0: ROWS})
        late = GraphDriver(client.model, LAYERS)
        assert "--max-graph-streams" in (await late.refused()).message
    await nothing_is_left(client)


async def test_named_sequences_have_their_own_blocks_and_no_more(client: Client) -> None:
    async with GraphDriver(client.model, LAYERS) as driver, GraphDriver(client.model, LAYERS) as other:
        rows = np.zeros((1, 40, HIDDEN), "<f4")
        await driver.run("block_0", {0: rows}, sequence="x")
        assert access(client).figures().used_blocks == 3
        assert (await client.load()).kv_blocks_used == 0
        error = await other.refused(call_of("block_0", {0: rows}, sequence="x"))
        assert (error.reason, "--graph-kv-tokens" in error.message) == ("GRAPH_QUOTA", True)
        # The first one goes on all the same, in the block that is left.
        await driver.run("block_cache_0", {0: rows[:, :24]}, sequence="x")
    await nothing_is_left(client)


async def test_a_lease_lives_as_long_as_its_stream_and_its_time(folder: Path) -> None:
    async with generation_service(folder, graph_lease_seconds=0.05) as client:
        made = await client.model.AllocateTensors(graphs_pb2.AllocateTensorsRequest(lease_seconds=3600))
        async with GraphDriver(client.model, LAYERS) as driver:
            first = await driver.in_pool(PROMPT, 2, "x", lease_id=made.lease_id)
        await until(lambda: access(client).figures().streams == 0)
        assert access(client).figures().used_blocks > 0
        # Another stream goes on where the first one was lost.
        async with GraphDriver(client.model, LAYERS) as driver:
            (rows,) = await driver.run("embedding_cache", {0: np.array([first[1:]], "<i4")})
            for layer in range(LAYERS):
                rows, *_ = await driver.run(f"block_cache_{layer}", {0: rows}, sequence="x", lease_id=made.lease_id)
            assert [*first, int((await driver.head(rows))[0, 0])] == await driver.by_hand(PROMPT, 3)
            freed = await client.model.FreeTensors(
                graphs_pb2.FreeTensorsRequest(lease_id=made.lease_id, sequences=["x", "y"])
            )
            assert freed.sequences == 1
            short = (await client.model.AllocateTensors(graphs_pb2.AllocateTensorsRequest())).lease_id
            await driver.run("block_0", {0: ROWS}, sequence="x", lease_id=short)
            # Held by the stream, far beyond its time.
            assert access(client)._leases.find(short).expiry is None
        await until(lambda: access(client).figures()[2:] == (1, 0, 0, 256, 0))
        access(client).close()
        await nothing_is_left(client)


async def test_a_stream_that_is_lost_amid_a_call_leaves_nothing(client: Client) -> None:
    for _ in range(5):
        driver = GraphDriver(client.model, LAYERS)
        await driver.run("block_0", {0: ROWS}, sequence="x")
        await driver.call.write(call_of("block_cache_0", {0: np.zeros((1, 40, HIDDEN), "<f4")}, sequence="x"))
        driver.call.cancel()
    await nothing_is_left(client)
    assert (await generated(client, PROMPT, 4)) == await _by_hand(client, 4)


async def _by_hand(client: Client, count: int) -> list[int]:
    async with GraphDriver(client.model, LAYERS) as driver:
        return await driver.by_hand(PROMPT, count)


async def test_sample_draws_the_tokens_of_generate(client: Client) -> None:
    config = {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3}
    outcome = await client.generate(
        request(PROMPT, config={"max_new_tokens": 10, **config}, seed=77, output={"top_logprobs": 3})
    )
    wanted = [
        (token, one) for delta in outcome.deltas for token, one in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    async with GraphDriver(client.model, LAYERS) as driver:
        (hidden,) = await driver.run("embedding", {0: np.array([PROMPT], "<i4")})
        found: list[tuple[int, Any]] = []
        graph = "block"
        while len(found) < 10:
            for layer in range(LAYERS):
                hidden, *_ = await driver.run(f"{graph}_{layer}", {0: hidden}, sequence="x")
            (logits,) = await driver.run("lm_head", {0: hidden[:, -1]})
            message = graphs_pb2.SampleRequest(
                logits=common_pb2.Tensor(dtype=FLOAT, shape=logits.shape, data=logits.tobytes()),
                config=config_pb2.GenerationConfig(max_new_tokens=10, **config),
                stop=config_pb2.StopConfig(ignore_eos=True),
                top_logprobs=3,
            )
            message.rows.add(prompt_token_ids=PROMPT, output_token_ids=[token for token, _ in found], seed=77)
            token = (await client.model.Sample(message)).tokens[0]
            found.append((token.token_id, token.logprobs))
            (hidden,) = await driver.run("embedding_cache", {0: np.array([[token.token_id]], "<i4")})
            graph = "block_cache"
    assert [token for token, _ in found] == [token for token, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        assert [entry.token_id for entry in one.top] == [entry.token_id for entry in other.top]
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)


async def test_sample_refuses_what_a_row_alone_cannot_decide(client: Client) -> None:
    logits = common_pb2.Tensor(dtype=FLOAT, shape=[1, VOCAB], data=bytes(4 * VOCAB))
    row = graphs_pb2.SampleRow(prompt_token_ids=[5])

    def sample(**fields: Any) -> Any:
        return client.model.Sample(graphs_pb2.SampleRequest(**{"logits": logits, "rows": [row], **fields}))

    for call, field in (
        (sample(rows=[]), "rows"),
        (sample(rows=[row] * 65), "rows"),
        (sample(rows=[row] * 2), "logits"),
        (sample(logits=common_pb2.Tensor(dtype=FLOAT, shape=[1, VOCAB], data=b"1")), "logits"),
        (sample(config=config_pb2.GenerationConfig(num_beams=2)), "config"),
        (sample(config=config_pb2.GenerationConfig(guidance_scale=1.5)), "config"),
        (
            sample(config=config_pb2.GenerationConfig(num_return_sequences=2, do_sample=True)),
            "config.num_return_sequences",
        ),
        (sample(config=config_pb2.GenerationConfig(top_p=2.0)), "config.top_p"),
        (sample(rows=[graphs_pb2.SampleRow(prompt_token_ids=[VOCAB])]), "prompt"),
        (sample(model="other"), "model"),
    ):
        error = await refused(call)
        assert error.field == field, error
    request_without = graphs_pb2.SampleRequest(rows=[row])
    assert (await refused(client.model.Sample(request_without))).field == "logits"
    # From a tensor at the server.
    spec = graphs_pb2.TensorSpec(dtype=FLOAT, shape=[1, VOCAB])
    made = await client.model.AllocateTensors(graphs_pb2.AllocateTensorsRequest(tensors=[spec]))
    lease, handle = made.lease_id, made.handles[0]
    one = np.float32(9).tobytes()
    await client.model.WriteTensor(graphs_pb2.WriteTensorRequest(lease_id=lease, handle=handle, offset=42, data=one))
    answer = await client.model.Sample(graphs_pb2.SampleRequest(handle=handle, lease_id=lease, rows=[row]))
    assert answer.tokens[0].token_id == 42
    await client.model.FreeTensors(graphs_pb2.FreeTensorsRequest(lease_id=lease, all=True))


async def test_sample_head_has_the_probabilities_that_generate_draws_from(client: Client) -> None:
    logits = np.random.default_rng(1).standard_normal((2, VOCAB)).astype("<f4") * 4
    ids = np.array([[7, 8, -1], [9, -1, -1]], "<i4")
    options = {2: np.array([0.8, 1.0], "<f4"), 3: np.array([0.7, 1.5], "<f4"), 4: np.array([1.2, 1.0], "<f4")}
    async with GraphDriver(client.model, LAYERS) as driver:
        probs, tokens = await driver.run("sample_head", {0: logits, 1: ids, **options})
    scores = logits[0].astype(np.float64)
    for token in (7, 8):
        scores[token] = scores[token] / 1.2 if scores[token] > 0 else scores[token] * 1.2
    scores /= 0.7
    order = np.argsort(-scores, kind="stable")[:50]
    share = np.exp(scores[order] - scores[order[0]])
    share /= share.sum()
    kept = np.cumsum(share) - share < 0.8
    share = np.where(kept, share, 0)
    assert tokens[0, : kept.sum()].tolist() == order[kept].tolist()
    np.testing.assert_allclose(probs[0], share / share.sum(), atol=1e-5)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)


async def test_the_graphs_are_listed_with_their_shapes(client: Client) -> None:
    info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
    graphs = {graph.name: graph for graph in info.forward_graphs}
    names = ["embedding", "embedding_cache", "block_0", "block_1", "block_cache_0", "block_cache_1"]
    assert list(graphs) == [*names, "lm_head", "greedy_head", "sample_head"]
    block = graphs["block_0"]
    assert [(one.batch, one.length) for one in block.stages] == [(1, 32), (1, 64), (2, 32), (2, 64)]
    mask = block.inputs[2]
    assert (mask.name, mask.is_optional, mask.dtype) == ("attention_mask", True, FLOAT)
    assert [list(shape.sizes) for shape in mask.shapes] == [
        [1, 1, 32, 32],
        [1, 1, 64, 64],
        [2, 1, 32, 32],
        [2, 1, 64, 64],
    ]
    assert list(mask.min_shape.sizes) == [1, 1, 1, 1]
    assert list(mask.max_shape.sizes) == [2, 1, 64, 64]
    assert (block.is_dynamic, block.addr_mode, list(block.device_ids)) == (True, 1, [0])
    assert (block.weight_format, block.weight_scale) == ("float32", 1.0)
    assert [one.name for one in graphs["block_cache_1"].outputs] == ["hidden_states", "present_k", "present_v"]


async def test_quantised_weights_have_their_format_and_scale(folder: Path) -> None:
    async with generation_service(folder, quantization="int8") as client:
        info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
        graphs = {graph.name: graph for graph in info.forward_graphs}
        assert graphs["block_0"].weight_format == graphs["lm_head"].weight_format == "int8"
        assert 0 < graphs["block_0"].weight_scale < 0.1
        assert graphs["greedy_head"].weight_format == ""
        wanted = await generated(client, PROMPT, 8)
        async with GraphDriver(client.model, LAYERS) as driver:
            assert await driver.by_hand(PROMPT, 8) == await driver.in_pool(PROMPT, 8, "x") == wanted


async def test_keys_and_values_in_int8_are_those_of_generate(folder: Path) -> None:
    async with generation_service(folder, kv_cache_dtype="int8") as client:
        wanted = await generated(client, PROMPT, 8)
        async with GraphDriver(client.model, LAYERS) as driver:
            assert await driver.by_hand(PROMPT, 8) == await driver.in_pool(PROMPT, 8, "x") == wanted


async def test_metrics_count_calls_tensors_and_sequences(client: Client) -> None:
    def value(name: str, **labels: str) -> float:
        labels["model_name"] = client.running.service._lifecycle.model_name  # type: ignore[attr-defined]
        return client.running.registry.get_sample_value(f"penstock_{name}", labels) or 0.0

    before = value("graph_calls_total", graph="block", outcome="ok")
    errors = value("graph_calls_total", graph="embedding", outcome="error")
    seconds = value("graph_seconds_count")
    async with GraphDriver(client.model, LAYERS) as driver:
        keep = [graphs_pb2.GraphOutput(index=0, keep=True)]
        await driver.send(call_of("block_0", {0: ROWS}, sequence="x", outputs=keep))
        assert value("graph_calls_total", graph="block", outcome="ok") == before + 1
        assert value("graph_seconds_count") == seconds + 1
        assert (value("graph_streams"), value("graph_tensors"), value("graph_tensor_bytes")) == (1, 1, ROWS.nbytes)
        assert (value("graph_kv_blocks"), value("graph_kv_blocks_used")) == (4, 1)
        await driver.refused(call_of("embedding", {0: np.array([[VOCAB]], "<i4")}))
        assert value("graph_calls_total", graph="embedding", outcome="error") == errors + 1
    await nothing_is_left(client)


async def test_a_caller_that_leaves_has_its_turn_to_the_end_and_pays_for_it(client: Client) -> None:
    """Else one call after the other, each left at once, would take the engine for itself."""
    opened, turns = access(client), list[tuple[str, float]]()
    begun, may_end, run = threading.Event(), threading.Event(), opened._runner.run

    def held(call: Any) -> Any:
        begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return run(call)

    took = opened._turns._took
    with mock.patch.object(opened._runner, "run", held), mock.patch.object(opened._turns, "_took") as paid:
        paid.side_effect = lambda seconds: turns.append(("took", seconds)) or took(seconds)
        call = client.model.Forward()
        await call.write(call_of("block_0", {0: ROWS}))
        await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
        call.cancel()
        async with GraphDriver(client.model, LAYERS) as driver:
            following = asyncio.ensure_future(driver.run("greedy_head", {0: np.zeros((1, VOCAB), "<f4")}))
            await until(lambda: opened.figures().streams == 2)
            assert opened._turns._turn.locked()
            assert not turns
            may_end.set()
            await following
    assert len(turns) == 2
    assert min(seconds for _, seconds in turns) > 0
    await nothing_is_left(client)


async def test_a_draining_service_takes_no_more_calls(folder: Path) -> None:
    async with generation_service(folder) as client, GraphDriver(client.model, LAYERS) as driver:
        await driver.run("block_0", {0: ROWS}, sequence="x")
        client.running.service._lifecycle.start_drain()  # type: ignore[attr-defined]
        assert (await driver.refused(call_of("block_0", {0: ROWS}))).reason == "DRAINING"
        await nothing_is_left(client)


async def test_where_the_model_is_not_open_all_calls_say_so_and_no_graph_is_listed(folder: Path) -> None:
    async with generation_service(folder, model_access="off") as client:
        model = client.model
        assert not (await model.GetModelInfo(model_pb2.GetModelInfoRequest())).forward_graphs
        for call in (
            model.AllocateTensors(graphs_pb2.AllocateTensorsRequest()),
            model.ReadTensor(graphs_pb2.ReadTensorRequest()),
            model.WriteTensor(graphs_pb2.WriteTensorRequest()),
            model.FreeTensors(graphs_pb2.FreeTensorsRequest()),
            model.Sample(graphs_pb2.SampleRequest()),
        ):
            error = await refused(call)
            assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_ACCESS_OFF")
        late = GraphDriver(model, LAYERS)
        assert (await late.refused()).reason == "MODEL_ACCESS_OFF"
        # No memory is set aside either.
        assert client.running.service._lifecycle.core.loaded.pools.kv.num_further_blocks == 0  # type: ignore[attr-defined]


async def test_the_calls_have_tokens_of_their_own(folder: Path, tmp_path: Path) -> None:
    usual, own = tmp_path / "usual", tmp_path / "own"
    usual.write_text("caller\n")
    own.write_text("looker\n")
    files = {"auth_token_file": str(usual), "model_access_token_file": str(own)}
    async with generation_service(folder, **files) as client:
        caller, looker = ((("authorization", f"Bearer {name}"),) for name in ("caller", "looker"))
        allocate, facts = graphs_pb2.AllocateTensorsRequest(), model_pb2.GetModelInfoRequest()
        for known in (caller, looker):
            assert (await client.model.GetModelInfo(facts, metadata=known)).forward_graphs
        assert (await refused(client.model.GetModelInfo(facts))).reason == "UNAUTHENTICATED"
        for metadata in (None, caller):
            assert (
                await refused(client.model.AllocateTensors(allocate, metadata=metadata))
            ).reason == "UNAUTHENTICATED"
        assert (await client.model.AllocateTensors(allocate, metadata=looker)).lease_id
        driver = GraphDriver(client.model, LAYERS, authorization="Bearer caller")
        assert (await driver.refused()).reason == "UNAUTHENTICATED"
        async with GraphDriver(client.model, LAYERS, authorization="Bearer looker") as driver:
            await driver.run("block_0", {0: ROWS})
