"""--device names a device, or is refused with the reason; an NPU says what it cannot do by the flag to change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from factories.models.emulated_npu import EmulatedNPU
from penstock.common import environment
from penstock.common.errors import StartupError
from penstock.generation import attention
from penstock.generation.attention.npu import NPUAttention
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.devices import device_registry
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.devices.cuda import CUDADevice
from penstock.generation.devices.device_registry import open_device
from penstock.generation.devices.npu import NPUDevice
from penstock.generation.host.arena import Arena
from penstock.generation.layers.layer_kernels import LayerKernels
from penstock.generation.layers.linear.dense import PlainLinearMethod
from structlog.testing import capture_logs


def test_names_choose_a_device() -> None:
    assert isinstance(open_device("cpu"), CPUDevice)
    for name, number in {"npu": 0, "npu:0": 0, "npu:12": 12}.items():
        device = open_device(name)
        assert isinstance(device, NPUDevice)
        assert device.number == number


@pytest.mark.parametrize("name", ["", "gpu", "cpu:0", "npu:", "npu:x", "npu:-1", "npu:1000", "NPU", "cuda:"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(StartupError, match="--device must be auto, cpu, cuda") as caught:
        open_device(name)
    assert caught.value.flag == "--device"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:1", 1)])
def test_a_torch_without_cuda_is_refused_when_the_device_is_claimed(name: str, number: int) -> None:
    device = open_device(name)
    assert isinstance(device, CUDADevice)
    assert device.number == number
    with pytest.raises(
        StartupError, match=r"--device cuda needs a torch with CUDA: this one is .*extra \[cuda\]"
    ) as caught:
        device.start()
    assert caught.value.flag == "--device"


def test_a_gpu_is_asked_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime(_Runtime):
        def is_bf16_supported(self, *, including_emulation: bool) -> bool:
            assert not including_emulation
            return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "cuda", Runtime())
    device = CUDADevice(1)
    assert (device.memory().available, device.memory().total) == (11, 100)
    assert device.torch_device == torch.device("cuda:1")
    assert device.compute_dtype("auto", torch.bfloat16) is torch.float16
    assert device.compute_dtype("bfloat16", torch.float32) is torch.bfloat16
    assert (device.block_size(None), device.block_size(512)) == (256, 512)
    with pytest.raises(StartupError, match="--block-size must be a multiple of 256 with --device cuda, found 16"):
        device.block_size(16)
    assert device.linear_method(torch.bfloat16, "int8").name == "int8"
    with pytest.raises(StartupError, match="--quantization int3 is not there with --device cuda"):
        device.linear_method(torch.bfloat16, "int3")
    assert device.attention(torch.bfloat16, 128).name == "flash"
    for dtype, head_dim in ((torch.float32, 128), (torch.bfloat16, 320), (torch.bfloat16, 100)):
        assert device.attention(dtype, head_dim).name == "sdpa"
    with pytest.raises(StartupError, match=r"--device cuda:2: 2 GPUs are visible, numbered from 0 \(CUDA_VISIBLE"):
        CUDADevice(2).memory()


@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler"), PermissionError("~/.triton")])
def test_a_triton_that_cannot_compile_is_done_without(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here(CUDADevice):
        torch_device = torch.device("cpu")

    def refuse(*_: object) -> None:
        raise error

    operators = ModuleType("gpu_operators")
    operators.rms_norm = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock.generation.attention.gpu_operators", operators)
    monkeypatch.setattr(attention, "gpu_operators", operators, raising=False)
    device = Here()
    with capture_logs() as logs:
        assert type(device.layer_kernels(torch.bfloat16)) is LayerKernels
        assert type(device.linear_method(torch.bfloat16)) is PlainLinearMethod
        assert device.attention(torch.bfloat16, 128).name == "flash"
    assert [line["reason"] for line in logs] == [str(error)]


@pytest.mark.parametrize(("count", "kind"), [(0, CPUDevice), (2, NPUDevice)])
def test_auto_takes_an_npu_where_there_is_one(count: int, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_registry, "num_npus", lambda: count)
    assert type(open_device("auto")) is kind


@pytest.mark.parametrize(
    ("files", "listed", "count"),
    [
        (["davinci0", "davinci1", "davinci_manager", "null"], None, 2),
        (["davinci0", "davinci1", "davinci2"], "2,0", 2),
        (["davinci0"], "", 0),
        (["davinci_manager"], None, 0),
    ],
)
def test_npus_are_counted_by_their_files(
    files: list[str], listed: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.util, "find_spec", lambda name: name)
    monkeypatch.setattr(environment.os, "listdir", lambda folder: files)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", listed)
    assert environment.num_npus() == count


def test_without_torch_npu_the_flag_is_named() -> None:
    with pytest.raises(StartupError, match=r"--device npu needs torch-npu \(the extra \[npu\]\)") as caught:
        NPUDevice().start()
    assert caught.value.flag == "--device"


class _Runtime:
    """torch.npu of a machine with two devices."""

    def device_count(self) -> int:
        return 2

    def mem_get_info(self, number: int) -> tuple[int, int]:
        return 10 + number, 100

    def get_device_name(self, number: int) -> str:
        return "Ascend910B4"


def test_a_number_that_is_not_visible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.generation.devices.npu.import_module", lambda name: None)
    monkeypatch.setattr(torch, "npu", _Runtime(), raising=False)
    device = NPUDevice(1)
    assert (device.memory().available, device.memory().total) == (11, 100)
    assert device.describe() == "npu:1 (Ascend910B4)"
    with pytest.raises(StartupError, match="--device npu:2: 2 NPUs are visible, numbered from 0"):
        NPUDevice(2).memory()


@pytest.mark.parametrize(
    ("refused", "flag"),
    [
        (lambda device: device.start(kernels="native"), "--kernels"),
        (lambda device: device.start(kernels="abacus"), "--kernels"),
        (lambda device: device.start(num_threads=0), "--threads"),
        (lambda device: device.start(compact_weights="on"), "--compact-weights"),
        (lambda device: device.block_size(16), "--block-size"),
        (lambda device: device.linear_method(torch.float32, "int8"), "--quantization"),
        (lambda device: device.linear_method(torch.float32, "int4"), "--quantization"),
        (lambda device: device.linear_method(torch.bfloat16, "int3"), "--quantization"),
        (lambda device: device.compute_dtype("int3", torch.bfloat16), "--dtype"),
        (lambda device: device.mapped_weights(None, "it"), "--device"),
    ],
)
def test_what_an_npu_cannot_do_names_the_flag(refused: Callable[[NPUDevice], Any], flag: str) -> None:
    with pytest.raises(StartupError) as caught:
        refused(NPUDevice())
    assert caught.value.flag == flag


def test_an_npu_has_blocks_of_128_and_the_cpu_of_16() -> None:
    assert (NPUDevice().block_size(None), NPUDevice().block_size(128)) == (128, 128)
    assert (CPUDevice().block_size(None), CPUDevice().block_size(8)) == (16, 8)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kind"),
    [
        (torch.bfloat16, 128, NPUAttention),
        (torch.float16, 64, NPUAttention),
        (torch.bfloat16, 256, SDPAAttention),
        (torch.float32, 128, SDPAAttention),
    ],
)
def test_heads_outside_the_operator_take_the_portable_attention(dtype: torch.dtype, head_dim: int, kind: type) -> None:
    assert type(NPUDevice().attention(dtype, head_dim)) is kind


def test_memory_begun_for_the_cpus_kernels_is_given_back() -> None:
    arena = Arena(1 << 20)
    EmulatedNPU().start(num_threads=1, arena=arena)
    assert not arena.take(16)
