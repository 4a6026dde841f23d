"""Start-up around the weights: it tells where its time goes, and measures steps without touching the pool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.registry import load_model
from penstock.generation.startup.batch_tuning import LARGEST_SIZE, PromptTimer
from penstock.generation.startup.load import load
from structlog.testing import capture_logs

STAGES = ["tokenizer", "weights", "tuning", "warm_up", "rest"]


def test_the_log_tells_when_steps_are_measured_and_what_each_part_took(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    config = GenerationServiceConfig(model=str(folder), kv_memory="4MiB", kernels="torch")
    with capture_logs() as logs:
        loaded = load(config, "tiny", lambda percent: None)
    events = [entry["event"] for entry in logs]
    assert events.index("measuring step sizes") < events.index("batch size") < events.index("loaded")
    last = logs[events.index("loaded")]
    assert list(last["seconds"]) == STAGES
    assert (last["weights_bytes"], last["kv_bytes"]) == (loaded.model.num_bytes, loaded.kv.num_bytes)


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
