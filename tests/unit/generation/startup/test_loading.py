"""Start-up around the weights: it tells where its time goes, and measures steps without touching the pool."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from factories.models.emulated_cuda import EmulatedCUDA
from factories.models.emulated_npu import EmulatedNPU
from penstock.common.progress import LOAD_WEIGHTS, TUNE, WARM_UP, StageProgress, show_nothing
from penstock.generation.app import GenerationApp
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.captured_decode import CapturedLM
from penstock.generation.models.registry import load_model
from penstock.generation.startup import load_weights
from penstock.generation.startup.batch_tuning import LARGEST_SIZE, PromptTimer
from penstock.generation.startup.load import load
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

STAGES = ["tokenizer", "weights", "tuning", "warm_up", "rest"]


def test_the_log_tells_when_steps_are_measured_and_what_each_part_took(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    config = GenerationServiceConfig(model=str(folder), kv_memory="4MiB", kernels="torch")
    with capture_logs() as logs:
        loaded = load(config, "tiny", show_nothing)
    events = [entry["event"] for entry in logs]
    assert events.index("measuring step sizes") < events.index("batch size") < events.index("loaded")
    last = logs[events.index("loaded")]
    assert list(last["seconds"]) == STAGES
    assert list(last["processor_seconds"]) == STAGES
    assert sum(last["processor_seconds"].values()) > 0
    assert (last["weights_bytes"], last["kv_bytes"]) == (loaded.weights.model.num_bytes, loaded.pools.kv.num_bytes)


@pytest.mark.parametrize("device", [EmulatedCUDA, EmulatedNPU])
@pytest.mark.parametrize("capture_steps", [True, False])
def test_decode_steps_are_captured_unless_the_flag_says_no(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: type[EmulatedCUDA | EmulatedNPU],
    capture_steps: bool,
) -> None:
    monkeypatch.setattr(load_weights, "open_device", lambda _name: device())
    config = GenerationServiceConfig(
        model=str(tiny_checkpoint(tmp_path)), kv_memory="4MiB", dtype="float32", capture_steps=capture_steps
    )
    loaded = load(config, "tiny", show_nothing)
    assert isinstance(loaded.engine.runner._model, CapturedLM) == capture_steps
    assert (loaded.pools.kv.scrap_block is not None) == capture_steps


async def test_the_stages_of_a_start_with_a_draft_model_and_the_percentage_of_both(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    config = GenerationServiceConfig(
        model=str(folder),
        assistant_model=str(folder),
        served_model_name=("both",),
        kv_memory="4MiB",
        assistant_kv_memory="1MiB",
        kernels="torch",
    )
    app = GenerationApp(config, CollectorRegistry())
    seen: list[tuple[StageProgress, float]] = []
    app.bind_progress(lambda progress: seen.append((progress, app._lifecycle.percent_loaded)))
    await app.start()
    await app.close()
    begun = [progress for progress, _ in seen if not progress.done and not progress.ended]
    ended = [progress for progress, _ in seen if progress.ended]
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    expected = [(LOAD_WEIGHTS, "both"), (LOAD_WEIGHTS, folder.name), (TUNE, ""), (WARM_UP, "both")]
    assert [(one.stage, one.subject) for one in begun] == [(one.stage, one.subject) for one in ended] == expected
    assert all(0 < one.done == one.total < weights for one in ended[:2])
    percents = [percent for _, percent in seen]
    assert percents == sorted(percents)
    assert {0.0, 50.0, 100.0} <= set(percents)
    # Of one model the percentage is told as it is read.
    assert len({percent for percent in percents if percent < 50}) > 10


async def test_a_start_that_is_cancelled_ends_its_thread(tmp_path: Path) -> None:
    config = GenerationServiceConfig(model=str(tiny_checkpoint(tmp_path)), kv_memory="4MiB", kernels="torch")
    app = GenerationApp(config, CollectorRegistry())
    reached, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def show(progress: StageProgress) -> None:
        reached.set()
        assert go_on.wait(60)
        if progress.stage == WARM_UP:
            ended.set()

    app.bind_progress(show)
    starting = asyncio.create_task(app.start())
    assert await asyncio.to_thread(reached.wait, 60)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go_on.set()
    await app.close()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert not ended.is_set()


def test_measuring_steps_leaves_the_pool_as_it_is(tmp_path: Path) -> None:
    device = CPUDevice()
    model = load_model(tiny_checkpoint(tmp_path), device=device)
    config = model.config
    kv = KVCachePool(config.num_layers, 8, 8, config.num_kv_heads, config.head_dim, model.dtype, device.torch_device)
    timer = PromptTimer(model, kv, device, most_tokens=LARGEST_SIZE)
    assert timer.longest_prompt == 8 * 8 - 1
    step, spent = timer(32)
    assert step > 0
    assert spent > 0
    assert not kv.tensors[0].any()


def test_a_shallow_model_has_the_first_layers_and_the_whole_ones_head(tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint(tmp_path), device=CPUDevice())
    assert model.shallow(1).layers == model.layers[:1]
    hidden = torch.randn(2, model.config.hidden_size, dtype=model.dtype)
    assert torch.equal(model.shallow(0).compute_logits(hidden), model.compute_logits(hidden))


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice about files")
def test_the_disk_is_asked_for_every_byte_of_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(tmp_path, max_shard_size="30KB")
    asked: dict[Path, list[tuple[int, int]]] = {}

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.setdefault(Path(os.readlink(f"/proc/self/fd/{descriptor}")), []).append((offset, offset + length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    load_model(folder, device=CPUDevice())
    for path in folder.glob("*.safetensors"):
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert min(begin for begin, _ in asked[path.resolve()]) <= header
        assert max(end for _, end in asked[path.resolve()]) >= path.stat().st_size
