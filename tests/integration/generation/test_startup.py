"""A process that cannot start says why in one line that names the flag to change."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
import torch
from factories.models.checkpoints import tiny_checkpoint
from factories.servers.generation import Client, generation_service, request, text_checkpoint
from penstock.cli.inspect_model import inspect_model
from penstock.common.config import from_env_and_flags
from penstock.common.errors import InvalidArgument, StartupError, Unavailable
from penstock.generation.app import GenerationApp
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.base import DeviceMemory
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.startup.batch_tuning import BatchTuning
from penstock.serving.server import RunningServer
from penstock.v1 import common_pb2, config_pb2, generation_pb2, model_pb2
from prometheus_client import CollectorRegistry, generate_latest
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = text_checkpoint(tmp_path_factory.mktemp("model"))
    return folder


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}))


async def refusal(model: Path | str, **config: Any) -> StartupError:
    with pytest.raises(StartupError) as refused:
        async with generation_service(Path(model), **config):
            pass
    assert "\n" not in refused.value.message
    return refused.value


async def test_a_missing_folder(tmp_path: Path) -> None:
    error = await refusal(tmp_path / "nowhere")
    assert (error.flag, "nowhere" in error.message) == ("MODEL", True)


async def test_a_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert (await refusal(folder)).flag == "MODEL"


async def test_truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    error = await refusal(folder)
    assert error.flag == "MODEL"
    assert "model.safetensors" in error.message


class _Planted:
    """Object whose unpickling makes a file."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self._mark,)


async def test_pickled_weights_are_no_weights_and_are_not_read(folder: Path) -> None:
    mark = folder / "unpickled"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Planted(mark)))
    error = await refusal(folder)
    assert error.flag == "MODEL"
    assert "safetensors" in error.message
    assert not mark.exists()


async def test_a_checkpoint_of_pickles_is_told_how_to_convert_and_starts_then(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    told = (await refusal(folder)).message
    assert "pytorch_model.bin" in told
    assert inspect_model(str(folder), measures=False)["why"] == told
    # The very program that it names.
    program = re.search(r'python -c "(.*)", and copy', told)
    assert program is not None
    converted = folder / "converted"
    exec(program[1].replace("MODEL", str(folder)).replace("FOLDER", str(converted)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (converted / name).write_bytes((folder / name).read_bytes())
    async with generation_service(converted) as client:
        assert (await client.generate(request())).error is None


async def test_code_that_a_folder_brings_is_not_run(folder: Path) -> None:
    mark = folder / "ran"
    (folder / "planted.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n")
    edit(folder / "config.json", auto_map={"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"})
    async with generation_service(folder):
        assert not mark.exists()


async def test_weights_of_another_shape_name_the_tensor(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=81)
    error = await refusal(folder)
    assert "mlp" in error.message
    assert "81" in error.message


async def test_a_broken_generation_config(folder: Path) -> None:
    edit(folder / "generation_config.json", top_p=7)
    error = await refusal(folder)
    assert "generation_config.json" in error.message
    assert "top_p" in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", "NaN"),
        ("max_new_tokens", "Infinity"),
        ("temperature", "1" + 400 * "0"),
        ("stop_strings", "5"),
        ("bos_token_id", "4294967296"),
    ],
)
async def test_a_generation_config_with_impossible_numbers(folder: Path, field: str, value: str) -> None:
    (folder / "generation_config.json").write_text(f'{{"{field}": {value}}}')
    error = await refusal(folder)
    assert error.flag == "MODEL"
    assert field in error.message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["null", "[]", '"x"', 100_000 * "["])
async def test_files_of_another_shape(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    error = await refusal(folder)
    assert error.flag == "MODEL"
    assert name in error.message


async def test_a_link_to_weights_that_are_gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "gone")
    error = await refusal(folder)
    assert error.flag == "MODEL"
    assert "model.safetensors" in error.message


async def test_kv_memory_beyond_all_numbers(folder: Path) -> None:
    assert (await refusal(folder, kv_memory=400 * "9" + "GiB")).flag == "--kv-memory"


async def test_a_tokenizer_with_more_ids_than_the_model(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["more"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    error = await refusal(folder)
    assert "do not belong together" in error.message
    assert "do not belong together" in inspect_model(str(folder), measures=False)["why"]


@pytest.mark.parametrize("number", [4096, 4097, 5000])
@pytest.mark.parametrize("special", [True, False])
async def test_added_ids_beyond_the_rows_are_never_made_and_refused_in_prompts(
    folder: Path, number: int, special: bool
) -> None:
    """As of a model of text whose tokenizer has the image token of its larger siblings."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    # An entry of the vocabulary as well.
    tokenizer["model"]["vocab"]["<image>"] = number
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][0], "id": number, "content": "<image>", "special": special}
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with structlog.testing.capture_logs() as logs:
        async with generation_service(folder, model_access="off") as client:
            plain = await client.generate(request([5, 6, 7], config={"max_new_tokens": 4}))
            assert len(plain.ids()) == 4
            refused = (await client.generate(request([5, number]))).error
            assert isinstance(refused, InvalidArgument)
            assert (refused.reason, refused.field) == ("TOKEN_OUT_OF_VOCABULARY", "prompt")
            # A grammar over all tokens, which the end of output is one more than.
            constrained = await client.generate(
                request([5, 6], config={"max_new_tokens": 8}, constraint=config_pb2.Constraint(regex="[<a-z>]{4}"))
            )
            assert constrained.error is None
            assert max(constrained.ids()) < 4096
    told = [line for line in logs if "has no rows for" in line["event"]]
    assert [(line["rows"], line["ids"], line["first"]) for line in told] == [(4096, 1, number)]
    assert inspect_model(str(folder), measures=False)["starts"]


async def test_stop_strings_of_the_model_without_a_tokenizer(folder: Path) -> None:
    edit(folder / "generation_config.json", stop_strings=["END"])
    (folder / "tokenizer.json").unlink()
    assert (await refusal(folder)).flag == "MODEL"


async def test_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert (await refusal(folder)).flag == "MODEL"


@pytest.mark.parametrize("amount", ["1KiB", "1000TiB", "much"])
async def test_kv_memory_too_small_too_large_or_unreadable(checkpoint: Path, amount: str) -> None:
    assert (await refusal(checkpoint, kv_memory=amount)).flag == "--kv-memory"


async def test_a_context_longer_than_the_models(checkpoint: Path) -> None:
    assert (await refusal(checkpoint, max_context=10_000)).flag == "--max-context"


async def test_an_unknown_dtype_or_device(checkpoint: Path) -> None:
    assert (await refusal(checkpoint, dtype="int3")).flag == "--dtype"
    assert (await refusal(checkpoint, device="abacus")).flag == "--device"


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--max-batch-tokens", {"max_batch_tokens": 8}),
        ("--kv-memory", {"kv_memory": "much"}),
        ("--block-size", {"block_size": 0}),
        ("--kv-cache-dtype", {"kv_cache_dtype": "int4"}),
    ],
)
def test_options_that_cannot_work(flag: str, values: dict[str, Any]) -> None:
    with pytest.raises(StartupError) as refused:
        from_env_and_flags(GenerationServiceConfig, values)
    assert refused.value.flag == flag


async def test_what_fits_only_when_quantised_is_refused_otherwise(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = int((checkpoint / "model.safetensors").stat().st_size * 0.9)
    monkeypatch.setattr(CPUDevice, "memory", lambda self: DeviceMemory(1 << 40, free))
    error = await refusal(checkpoint, kv_memory="auto")
    assert (error.flag, "of memory is free" in error.message) == ("MODEL", True)
    for quantization in ("int8", "int4"):
        async with generation_service(checkpoint, kv_memory="auto", quantization=quantization) as client:
            assert (await client.generate(request())).error is None


async def test_the_token_budget_is_told_whether_given_measured_or_fixed(checkpoint: Path) -> None:
    async def budget(**config: Any) -> int:
        async with generation_service(checkpoint, **config) as client:
            return (await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())).limits.max_batch_tokens

    assert await budget(max_batch_tokens=100) == 100
    assert await budget() == 512
    assert await budget(tune_seconds=1.0, target_step_seconds=3600.0) == 512
    assert await budget(tune_seconds=1.0, target_step_seconds=0.001, max_running_sequences=20) in (64, 128, 256, 512)


async def test_a_smaller_context_and_a_name_of_ones_own_are_served(checkpoint: Path) -> None:
    async with generation_service(checkpoint, max_context=64, served_model_name=("mine",), block_size=8) as client:
        info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest(model="mine"))
        assert (info.model, info.limits.max_context_tokens, info.kv.block_size) == ("mine", 64, 8)
        assert info.kv.total_bytes == info.kv.num_blocks * info.kv.bytes_per_block <= 8 << 20
        assert info.state == common_pb2.MODEL_STATE_READY
        assert len(info.tokenizer_fingerprint) == 64
        outcome = await client.generate(request([1] * 60, config={"max_new_tokens": 100}))
        assert len(outcome.ids()) == 4
        assert "exceeds the context" in outcome.started.warnings[0]
        assert client.running.service.status_lines()


async def test_int8_keys_and_values_are_told_and_hold_more_tokens(checkpoint: Path) -> None:
    geometry = []
    for dtype in ("auto", "int8"):
        async with generation_service(checkpoint, kv_cache_dtype=dtype, kv_memory="1MiB") as client:
            geometry.append((await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())).kv)
            outcome = await client.generate(request([1, 2, 3], config={"max_new_tokens": 5}))
            assert len(outcome.ids()) == 5
            assert ("int8" in " ".join(client.running.service.status_lines())) is (dtype == "int8")
    own, int8 = geometry
    assert int8.dtype == common_pb2.D_TYPE_INT8
    # Of one token and head: head_dim numbers of a byte, and a scale of four.
    assert own.bytes_per_block * (int8.head_dim + 4) == int8.bytes_per_block * own.head_dim * 4
    assert int8.num_blocks == (1 << 20) // int8.bytes_per_block > own.num_blocks


async def test_the_models_own_defaults_are_told_and_used(folder: Path) -> None:
    edit(
        folder / "generation_config.json",
        do_sample=True,
        temperature=0.7,
        top_k=20,
        eos_token_id=[3, 4],
        stop_strings=["zz"],
    )
    async with generation_service(folder) as client:
        info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert (info.default_config.do_sample, info.default_config.top_k) == (True, 20)
        assert list(info.eos_token_ids) == [3, 4]
        assert list(info.default_stop.stop_strings) == ["zz"]
        outcome = await client.generate(request())
        assert outcome.started.generation_mode == common_pb2.GENERATION_MODE_SAMPLE


async def test_the_first_steps_are_held_against_what_the_start_measured(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a slow model that takes longer than --hung-step-seconds is no hang, also when it is the first."""
    tuned = BatchTuning(512, ((64, 5.0), (512, 40.0)))
    monkeypatch.setattr("penstock.generation.startup.tune_engine._tune_batch", lambda *_: tuned)
    async with generation_service(checkpoint) as client:
        app: Any = client.running.service
        watch = app._holder.running._loop._engine.watch
        watch.begin()
        watch.num_tokens = 512
        view = watch.look(time.monotonic() + 60.0)
        assert (view.is_overdue, view.is_hung) == (False, False)
        assert watch.look(time.monotonic() + 500.0).is_hung
        watch.end()


async def test_while_it_loads_it_tells_how_far_and_takes_no_work(checkpoint: Path) -> None:
    config = GenerationServiceConfig(model=str(checkpoint), port=0, metrics_port=-1, kv_memory="8MiB", threads=1)
    registry = CollectorRegistry()
    running = RunningServer(GenerationApp(config, registry), config, registry)
    await running.listen()
    try:
        async with grpc.aio.insecure_channel(running.address) as channel:
            client = Client(running, channel)
            info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
            assert (info.state, info.percent_loaded) == (common_pb2.MODEL_STATE_LOADING, 0)
            refused = await client.generate(generation_pb2.GenerateRequest(prompt_token_ids=[1]))
            assert isinstance(refused.error, Unavailable)
            assert refused.error.reason == "STARTING"
            assert (await client.load()).state == common_pb2.MODEL_STATE_LOADING
            await running.start()
            assert (await client.generate(request())).error is None
    finally:
        await running.stop(drain=False)


async def test_a_start_that_is_cancelled_ends_soon(checkpoint: Path) -> None:
    config = GenerationServiceConfig(model=str(checkpoint), port=0, metrics_port=-1, kv_memory="8MiB", threads=1)
    registry = CollectorRegistry()
    running = RunningServer(GenerationApp(config, registry), config, registry)
    await running.listen()
    start = asyncio.create_task(running.start())
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await running.stop(drain=False)


async def test_groups_of_layers_are_named_and_can_be_turned_off(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "gemma3_text")
    for grouped in (True, False):
        async with generation_service(folder, kv_groups=grouped, block_size=8) as client:
            info = await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())
            groups = [(one.num_layers, one.num_blocks, one.window) for one in info.kv.groups]
            layers = info.kv.num_layers
            assert groups == ([(1, 1, 0), (layers - 1, layers - 1, 9)] if grouped else [(layers, 1, 0)])
            whole = sum(one.bytes_per_token for one in info.kv.groups)
            assert whole == layers * 2 * info.kv.num_kv_heads * info.kv.head_dim * 4
            # Named sequences have whole contexts in every layer, and requests their window.
            outcome = await client.generate(request([1] * 30, config={"max_new_tokens": 20}))
            assert outcome.error is None
            assert client.running.service.status_lines()
            scraped = generate_latest(client.running.registry).decode()
            names = re.findall(r'penstock_kv_cache_group_blocks_used\{layers="(\w+)"', scraped)
            assert sorted(names) == (["all", "window_9"] if grouped else ["all"])
