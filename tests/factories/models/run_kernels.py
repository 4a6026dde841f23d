"""Kernels of a run of the tests: by PENSTOCK_KERNELS, which the services that the tests start read as well. With
`pytest --device npu` or `cuda` the models that tests load themselves run through that device's operators, emulated."""

from __future__ import annotations

from typing import Any

import torch
from factories.models.emulated_cuda import EmulatedCUDA
from factories.models.emulated_npu import EmulatedNPU
from penstock.common.environment import current_environment
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.devices.base import Device
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.decoder import CausalLM
from penstock.generation.runner.model_runner import ModelRunner
from penstock.generation.sampling.sampler import Sampler

KERNELS = current_environment().get("PENSTOCK_KERNELS", "torch")
_DEVICES: dict[str, type[Device]] = {"cpu": CPUDevice, "npu": EmulatedNPU, "cuda": EmulatedCUDA}
_DEVICE = current_environment().get("PENSTOCK_TESTED_DEVICE", "cpu")
_devices: list[Device] = []


def cpu_device() -> Device:
    """Make the CPU device on one thread, with this run's kernels; kernels that are named but not built are an error.
    With `--device npu` or `cuda` it is the emulated one."""
    if not _devices:
        device = _DEVICES[_DEVICE]()
        device.start(num_threads=1, kernels=KERNELS)
        _devices.append(device)
    torch.set_num_threads(1)
    return _devices[0]


def new_sampler() -> Sampler:
    """Make a sampler without sequences."""
    return Sampler(torch.device("cpu"), cpu_device().sampling_kernels())


def new_runner(model: CausalLM, kv: KVCachePool, **options: Any) -> ModelRunner:
    """Make a runner that samples with the kernels of this run, and captures graphs where its device does."""
    device = cpu_device()
    return ModelRunner(model, kv, kernels=device.sampling_kernels(), graphs=device.graph_capture(), **options)
