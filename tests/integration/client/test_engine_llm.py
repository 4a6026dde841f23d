"""EngineLLM against a generation service: every method, tensors of all kinds, errors, and nothing left behind."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import re
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import penstock_client.sail as sail
import pytest
import pytest_asyncio
import torch
from factories.models.checkpoints import tiny_checkpoint
from factories.servers.generation import Client, generation_service, request
from factories.servers.router import backend, running_router, until
from penstock.common.checkpoint import demo_folder
from penstock.router.backends.discovery import resolve
from penstock.v1 import common_pb2, model_pb2
from penstock_client import Client as ModelClient
from penstock_client import ClientConfig
from penstock_client._exceptions import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from penstock_client.compat.sail import BmrtFlag, Dtype, EngineLLM, ServerTensor

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [5, 6, 7, 8, 9]
HIDDEN, HEADS, SIZE, VOCAB = 48, 2, 12, 320
EXAMPLE = Path(__file__).parents[3] / "examples" / "engine_llm.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[Client]:
    async with generation_service(folder, graph_lengths=(16, 32), graph_batches=(1, 2), graph_kv_tokens=64) as running:
        yield running
        await nothing_is_left(running)


async def nothing_is_left(client: Client) -> None:
    service: Any = client.running.service
    access = service._lifecycle.core.access
    await until(lambda: not any(access.figures()._replace(blocks=0, expired=0)))


def engine_of(client: Client, *arguments: Any, **named: Any) -> EngineLLM:
    return EngineLLM(client.running.address, *(arguments or ([0],)), **named)


async def test_the_graphs_and_their_tensors_are_told(client: Client) -> None:
    def look() -> None:
        with engine_of(client, BmrtFlag.BM_RUNTIME_SHARE_MEM, [0]) as engine:
            assert engine.flags is BmrtFlag.BM_RUNTIME_SHARE_MEM
            assert engine.get_device_ids() == [0]
            blocks = ["block_0", "block_1", "block_cache_0", "block_cache_1"]
            heads = ["lm_head", "greedy_head", "sample_head"]
            assert engine.get_graph_names() == ["embedding", "embedding_cache", *blocks, *heads]
            name = "block_cache_1"
            assert (engine.get_addr_mode(name), engine.get_stage_num(name), engine.get_is_dynamic(name)) == (1, 4, True)
            assert (engine.get_input_num(name), engine.get_output_num(name)) == (5, 3)
            names = ["hidden_states", "position_ids", "attention_mask", "history_k", "history_v"]
            assert [engine.get_input_name(name, index) for index in range(5)] == engine.get_input_names(name) == names
            assert engine.get_output_names(name) == ["hidden_states", "present_k", "present_v"]
            assert engine.get_output_name(name, 2) == "present_v"
            assert engine.get_input_tensor_devid(name, 3) == engine.get_output_tensor_devid(name, 0) == 0
            assert engine.get_input_shape(name, 3) == [1, 16, HEADS, SIZE]
            assert engine.get_input_shape(name, 3, 3) == [2, 32, HEADS, SIZE]
            assert engine.get_output_shape(name, 0, 2) == [2, 1, HIDDEN]
            assert engine.get_input_max_shape(name, 2) == [2, 1, 32, 64]
            assert engine.get_input_min_shape(name, 2) == [1, 1, 1, 2]
            assert engine.get_output_max_shape(name, 1) == [2, 32, HEADS, SIZE]
            assert engine.get_output_min_shape(name, 1) == [1, 1, HEADS, SIZE]
            assert engine.get_input_dtype(name, 0) is engine.get_output_dtype(name, 0) is Dtype.BM_FLOAT32
            assert engine.get_input_dtype("embedding", 0) is Dtype.BM_INT32
            assert engine.get_input_scale(name, 0) == engine.get_output_scale(name, 0) == 1.0
            assert engine.get_weight_format(name) == ("float32", 1.0)

    await asyncio.to_thread(look)


async def test_unknown_graphs_stages_and_indices_are_errors(client: Client) -> None:
    def look() -> None:
        with engine_of(client) as engine:
            for call in (engine.get_addr_mode, engine.get_input_tensors, engine.get_output_tensors_addrmode0):
                with pytest.raises(NotFound, match="no graph 'block_9'"):
                    call("block_9")
            with pytest.raises(NotFound):
                engine.process("block_9", {}, {})
            with pytest.raises(IndexError, match="index must be below 3"):
                engine.get_input_name("block_0", 3)
            with pytest.raises(IndexError):
                engine.get_output_shape("block_0", -1)
            with pytest.raises(IndexError, match="stage must be below 4"):
                engine.get_input_shape("block_0", 0, 4)
            with pytest.raises(IndexError):
                engine.get_input_tensors("block_0", 4)
            with pytest.raises(IndexError):
                engine.get_input_tensor("block_0", 7)
            with pytest.raises(NotFound, match="no tensor 'other'"):
                engine.get_input_tensors("block_0", "other")
            with pytest.raises(IndexError):
                engine.process("block_0", {5: np.zeros(1)}, {})

    await asyncio.to_thread(look)


async def test_arrays_and_tensors_at_the_service_give_the_same(client: Client) -> None:
    def run() -> None:
        rows = np.random.default_rng(2).standard_normal((1, 16, HIDDEN)).astype("f4")
        with engine_of(client) as engine:
            here = engine.get_output_tensors_addrmode0("block_0")
            assert [tensor.shape() for tensor in here.values()] == [[1, 16, HIDDEN], *[[1, 16, HEADS, SIZE]] * 2]
            assert engine.process("block_0", {0: rows}, here, stage=0) == 0
            assert here[1].asnumpy().any()
            # Only what is wanted, into arrays of another type and shape.
            part = np.zeros((16, HIDDEN), np.float64)
            engine.process("block_0", {0: rows}, {0: part})
            np.testing.assert_array_equal(part, here[0].asnumpy()[0])
            inputs, outputs = engine.get_input_tensors("block_0"), engine.get_output_tensors("block_0", 0)
            assert list(inputs) == [0, 1, 2]
            assert isinstance(inputs[0], ServerTensor)
            assert (inputs[0].shape(), inputs[0].dtype()) == ([1, 16, HIDDEN], Dtype.BM_FLOAT32)
            # Memory of the stage: the same every time.
            assert engine.get_input_tensors("block_0", "hidden_states", 0)[0] is inputs[0]
            assert engine.get_input_tensor("block_0", 0) is inputs[0]
            assert engine.get_output_tensor("block_0", 2) is outputs[2]
            inputs[0].update_data(rows)
            inputs[1].update_data(np.arange(16))
            inputs[2].update_data(np.where(np.tri(16, dtype=bool), 0.0, -10000.0))
            engine.process("block_0", inputs, outputs)
            for index, tensor in outputs.items():
                np.testing.assert_array_equal(tensor.asnumpy(), here[index].asnumpy())
            # On from there, without a way through the client; then one row of it.
            last = engine.get_input_tensors_addrmode0("lm_head")[0]
            engine.process("block_1", {0: outputs[0]}, {0: outputs[0]})
            one = engine.get_input_tensor("lm_head", 0)
            one.sync_d2d(outputs[0], 15 * HIDDEN, 0, HIDDEN)
            assert [*np.asarray(one).shape] == last.shape() == [1, HIDDEN]
            np.testing.assert_array_equal(np.asarray(one)[0], outputs[0].asnumpy()[0, 15])
            one.reshape([HIDDEN])
            assert one.shape() == [HIDDEN]
            for bad in ([7], [HIDDEN, 2]):
                with pytest.raises(ValueError, match="elements"):
                    one.reshape(bad)
            with pytest.raises(ValueError, match="elements"):
                one.update_data(np.zeros(3))

    await asyncio.to_thread(run)


async def test_arrays_that_do_not_fit_are_refused_here_or_there(client: Client) -> None:
    def run() -> None:
        with engine_of(client) as engine:
            with pytest.raises(TypeError, match="input 0"):
                engine.process("embedding", {0: np.zeros((1, 2))}, {})
            with pytest.raises(ValueError, match="input 0"):
                engine.process("embedding", {0: np.array([[1 << 40]])}, {})
            with pytest.raises(InvalidArgument, match=r"inputs\[0\].shape"):
                engine.process("lm_head", {0: np.zeros((1, 7))}, {})
            with pytest.raises(InvalidArgument, match="stage"):
                engine.process("block_0", {0: np.zeros((1, 3, HIDDEN))}, {}, stage=1)
            with pytest.raises(ValueError, match="the array 5"):
                engine.process("lm_head", {0: np.zeros((1, HIDDEN))}, {0: np.zeros(5)})
            # The engine goes on.
            logits = np.zeros((1, VOCAB), "f4")
            assert engine.process("lm_head", {0: np.ones((1, HIDDEN))}, {0: logits}) == 0
            assert logits.any()

    await asyncio.to_thread(run)


async def test_a_named_sequence_and_draws_give_the_ids_of_generate(client: Client) -> None:
    config = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    outcome = await client.generate(request(PROMPT, config=config, seed=5))

    def run() -> list[int]:
        found: list[int] = []
        with engine_of(client) as engine:
            ids, graph = np.array([PROMPT]), "block"
            for _ in range(8):
                hidden = np.zeros((1, ids.size, HIDDEN), "f4")
                engine.process("embedding", {0: ids}, {0: hidden})
                for layer in range(2):
                    engine.process(f"{graph}_{layer}", {0: hidden}, {0: hidden}, sequence="mine")
                logits = np.zeros((1, VOCAB), "f4")
                engine.process("lm_head", {0: hidden[:, -1]}, {0: logits})
                token, entry = engine.sample(
                    logits[0], PROMPT, found, seed=5, top_logprobs=1, **{**config, "eos_token_id": VOCAB - 1}
                )
                assert entry is not None
                assert entry.token_id == token
                found.append(token)
                ids, graph = np.array([[token]]), "block_cache"
            with pytest.raises(InvalidArgument, match="start"):
                engine.process("block_cache_0", {0: hidden}, {}, sequence="mine", start=99)
            engine.free_sequence("mine")
            engine.free_sequence("other")
            with pytest.raises(TypeError, match="no_such_option"):
                engine.sample(logits, PROMPT, no_such_option=1)
        return found

    assert await asyncio.to_thread(run) == outcome.ids()
    await nothing_is_left(client)


async def test_a_service_that_keeps_no_tensors_has_address_mode_0(folder: Path) -> None:
    async with generation_service(folder, max_graph_tensors=0) as client:

        def run() -> None:
            with engine_of(client) as engine:
                assert engine.get_addr_mode("embedding") == 0
                with pytest.raises(FailedPrecondition) as caught:
                    engine.get_input_tensors("embedding")
                assert caught.value.reason == "NO_GRAPH_TENSORS"
                here = engine.get_input_tensors_addrmode0("embedding", 1)
                assert {index: tensor.dtype() for index, tensor in here.items()} == {0: Dtype.BM_INT32}

        await asyncio.to_thread(run)
    async with generation_service(folder, max_graph_tensor_bytes=1000) as client:

        def run_out() -> None:
            with engine_of(client) as engine, pytest.raises(ResourceExhausted, match="--max-graph-tensor-bytes"):
                engine.get_input_tensors("block_0")

        await asyncio.to_thread(run_out)


async def test_bfloat16_comes_as_bits_and_is_converted(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    async with generation_service(folder, dtype="bfloat16") as client:

        def run() -> None:
            with engine_of(client) as engine:
                assert engine.get_output_dtype("embedding", 0) is Dtype.BM_BFLOAT16
                bits, numbers = np.zeros((1, 3, HIDDEN), np.uint16), np.zeros((1, 3, HIDDEN), np.float32)
                for array in (bits, numbers):
                    engine.process("embedding", {0: np.array([[3, 4, 5]])}, {0: array})
                np.testing.assert_array_equal((bits.astype(np.uint32) << 16).view(np.float32), numbers)
                found = [np.zeros_like(numbers) for _ in range(2)]
                # Rounded to the same bits.
                engine.process("block_0", {0: bits}, {0: found[0]})
                engine.process("block_0", {0: numbers * (1 + 2**-10)}, {0: found[1]})
                np.testing.assert_array_equal(found[0], found[1])

        await asyncio.to_thread(run)


async def test_what_is_no_service_with_graphs_is_told(folder: Path, client: Client, tmp_path: Path) -> None:
    address = client.running.address
    archive = EngineLLM.archive(folder)

    def refuse() -> None:
        with pytest.raises(ValueError, match=r"\[0\]"):
            EngineLLM(address, [0, 1])
        for arguments in ((), (1,), ("x", [0]), (1, 2, [0]), (["0"],)):
            if arguments:
                with pytest.raises(TypeError):
                    EngineLLM(address, *arguments)
        for size in (0, len(archive) + 1, None):
            with pytest.raises(TypeError, match="size"):
                EngineLLM(archive, size, [0], address=address)
        with pytest.raises(TypeError, match="address"):
            EngineLLM(address, [0], address=address)
        with pytest.raises(NotFound):
            EngineLLM(address, [0], name="other")
        with pytest.raises(Unavailable):
            EngineLLM("127.0.0.1:1", [0])
        for no_archive in (b"x" * 2000, b"x"):
            with pytest.raises(TypeError, match="tar archive"):
                EngineLLM(no_archive, len(no_archive), [0], address=address)
        for arguments in ((str(tmp_path / "m"), [0]), (str(tmp_path / "m"), 1, [0]), (archive, len(archive), [0])):
            with pytest.raises(FailedPrecondition) as caught:
                EngineLLM(*arguments, address=address)
            assert caught.value.reason == "MODEL_LOADED"
        # Nothing was unloaded by it.
        with EngineLLM(address, [0]) as engine:
            assert engine.get_graph_names()

    await asyncio.to_thread(refuse)
    async with generation_service(folder, model_access="off") as closed:
        with pytest.raises(FailedPrecondition) as caught:
            await asyncio.to_thread(engine_of, closed)
        assert caught.value.reason == "MODEL_ACCESS_OFF"


async def test_a_service_without_a_model_loads_what_an_engine_gives_it(folder: Path, tmp_path: Path) -> None:
    """By the path of a folder there and by its bytes, directly and through a router; and is empty again afterwards."""
    archive = EngineLLM.archive(folder)
    # As `tar` makes it of a hub's folder: paths, and files that are no part of a model.
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as other:
        for name in ("README.md", "original/params.json"):
            (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "files" / name).write_text("{}")
        other.add(tmp_path / "files", arcname=".")
        other.add(folder, arcname="./model")
    settings: dict[str, Any] = {"model_root": str(folder.parent), "graph_lengths": (16, 32), "graph_kv_tokens": 64}
    config = {"max_new_tokens": 5, "do_sample": False, "repetition_penalty": 1.0}
    async with generation_service(folder) as full:
        wanted = (await full.generate(request(PROMPT, config=config))).ids()
    async with (
        generation_service(None, **settings) as client,
        backend() as ready,
        running_router(ready, backend=(ready.address, client.running.address), resolver=resolve) as router,
    ):
        address = client.running.address
        routed = {"address": router.server.address, "backend": address}

        def info() -> model_pb2.GetModelInfoResponse:
            with ModelClient(address) as one:
                return one.model_info()

        def run() -> None:
            for arguments, where, name in (
                ((folder.name, [0]), {"address": address}, folder.name),
                ((str(folder), BmrtFlag.BM_RUNTIME_AUTO, [0]), {"address": address, "name": "mine"}, "mine"),
                ((archive, len(archive), [0]), {"address": address, "name": "bytes"}, "bytes"),
                ((archive, len(archive), [0]), {"address": address}, "model"),
                ((made.getvalue(), len(made.getvalue()), [0]), {"address": address}, "model"),
                ((folder.name, [0]), routed, folder.name),
                ((archive, len(archive), [0]), routed, "model"),
            ):
                with sail.EngineLLM(*arguments, **where) as engine:
                    assert engine.get_device_ids() == [0]
                    assert info().model == name
                    driver = driver_module().Driver(sail.Handle(0), engine)
                    assert driver.generate(PROMPT, 5, set()) == wanted
                    engine.get_input_tensors("lm_head")
                assert info().state == common_pb2.MODEL_STATE_EMPTY
            with pytest.raises(ValueError, match=r"\[0\]"):
                EngineLLM(folder.name, [0, 1], address=address)
            # By the argument, the path and the root; the message's field is nobody's word here.
            told = rf"^path: 'nothing' is no folder below --model-root {re.escape(str(folder.parent))}"
            with pytest.raises(InvalidArgument, match=told):
                EngineLLM("nothing", [0], address=address)
            with ModelClient(address) as one, pytest.raises(InvalidArgument, match=told):
                one.load_model(path="nothing")
            tar = tmp_path / "model.tar"
            tar.write_bytes(archive)
            with EngineLLM(str(tar), [0], address=address):
                assert info().model == "model"
            assert info().state == common_pb2.MODEL_STATE_EMPTY
            with pytest.raises(InvalidArgument) as refused:
                EngineLLM("nowhere", [0], address=address)
            assert refused.value.reason == "MODEL_REFUSED"
            half = len(archive) // 2
            with pytest.raises((InvalidArgument, TypeError)):
                EngineLLM(archive, half, [0], address=address)
            assert info().state == common_pb2.MODEL_STATE_EMPTY

        await asyncio.to_thread(run)


async def test_one_token_does_for_an_engine(folder: Path, tmp_path: Path) -> None:
    for name in ("text", "model"):
        (tmp_path / name).write_text(f"for-{name}\n")
    tokens = {"auth_token_file": str(tmp_path / "text"), "model_access_token_file": str(tmp_path / "model")}
    async with generation_service(folder, **tokens) as client:

        def run() -> None:
            with engine_of(client, config=ClientConfig(token="for-model")) as engine:
                engine.process("lm_head", {0: np.zeros((1, HIDDEN))}, {})
            with engine_of(client, config=ClientConfig(token="for-text")) as engine, pytest.raises(Unauthenticated):
                engine.process("lm_head", {0: np.zeros((1, HIDDEN))}, {})

        await asyncio.to_thread(run)


async def test_closing_twice_and_losing_the_service_is_no_error(folder: Path) -> None:
    async with generation_service(folder) as client:

        def run() -> EngineLLM:
            engine = engine_of(client)
            engine.get_input_tensors("lm_head")
            engine.close()
            engine.close()
            return engine_of(client)

        lost = await asyncio.to_thread(run)
    await asyncio.to_thread(lost.close)


def driver_module() -> Any:
    spec = importlib.util.spec_from_file_location("engine_llm_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", ["llama", "demo"])
async def test_a_driver_in_sails_names_gives_the_ids_of_generate(model: str, folder: Path) -> None:
    path = demo_folder() if model == "demo" else folder
    async with generation_service(path, graph_lengths=(64,)) as client:
        config = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.0}
        wanted = (await client.generate(request(PROMPT, config=config))).ids()

        def run() -> list[int]:
            with sail.EngineLLM(client.running.address, [0]) as engine:
                found: list[int] = driver_module().Driver(sail.Handle(0), engine).generate(PROMPT, 12, set())
                return found

        assert await asyncio.to_thread(run) == wanted


async def test_sails_tensors_are_arrays_here(client: Client) -> None:
    tensor = sail.Tensor(sail.Handle(0), [2, 3], Dtype.BM_FLOAT16)
    tensor.update_data(np.arange(6, dtype=np.float16).view(np.uint16))
    assert tensor.asnumpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    tensor.reshape([6])
    other = sail.Tensor(sail.Handle(0), np.zeros(4, np.float16))
    other.sync_d2d(tensor, 1, 2, 2)
    assert (other.asnumpy().tolist(), other.shape(), other.dtype()) == ([0, 0, 1, 2], [4], Dtype.BM_FLOAT16)
    one = sail.Tensor(sail.Handle(0), np.full((1, 1), 7, np.int32)).asnumpy()
    assert (int(one), float(one), one.shape) == (7, 7.0, (1, 1))
    with pytest.raises(ValueError, match="size 1"):
        int(other.asnumpy())
    for bad in ((5, 0, 2), (0, 3, 2), (-1, 0, 1)):
        with pytest.raises(ValueError, match="not all there"):
            other.sync_d2d(tensor, *bad)
    with pytest.raises(TypeError):
        sail.Tensor(sail.Handle(0), np.zeros(3, np.complex64))

    def run() -> None:
        with sail.EngineLLM(client.running.address, [0]) as engine:
            inputs = engine.get_input_tensors_addrmode0("lm_head")
            outputs = engine.get_output_tensors_addrmode0("lm_head")
            assert isinstance(inputs[0], sail.Tensor)
            inputs[0].update_data(np.ones((1, HIDDEN)))
            engine.process("lm_head", inputs, outputs)
            assert outputs[0].asnumpy().any()

    await asyncio.to_thread(run)
