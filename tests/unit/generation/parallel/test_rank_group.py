"""Ranks of a model meet by their device's process group, each on a device of its own where there are several."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from penstock.common.errors import StartupError
from penstock.generation.devices.base import Device
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.devices.cuda import CUDADevice
from penstock.generation.devices.npu import NPUDevice
from penstock.generation.parallel.processes import Ranks
from penstock.generation.parallel.rank_group import RankGroup
from penstock.generation.weights.sharding import Shard
from torch import Tensor


class _GathersAtAll(CPUDevice):
    """The CPU as if its process group could not gather at one rank, as an NPU's."""

    gathers_at_one = False


@pytest.mark.parametrize("device", [CPUDevice, _GathersAtAll])
@pytest.mark.parametrize("columns", [5, 6, 7])
def test_sums_and_columns_of_three_ranks(tmp_path: Path, device: Callable[[], Device], columns: int) -> None:
    whole = torch.arange(2.0 * columns).view(2, columns)
    each = -(-columns // 3)

    def of(rank: int) -> tuple[Tensor, Tensor | None]:
        group = RankGroup(Shard(rank, 3))
        group.join(tmp_path / "meeting", device())
        total = group.sum(torch.full((4,), float(rank + 1)))
        found = group.columns(whole[:, rank * each : (rank + 1) * each], columns)
        return total, found

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(of, range(3)))
    assert all(torch.equal(total, torch.full((4,), 6.0)) for total, _ in answers)
    first, *others = (found for _, found in answers)
    assert first is not None
    assert torch.equal(first, whole)
    assert others == [None, None]


def test_each_rank_has_a_device_of_its_own_where_there_are_several() -> None:
    assert [NPUDevice(2).of_rank(rank) for rank in (1, 2)] == ["npu:3", "npu:4"]
    assert CPUDevice().of_rank(1) == "cpu"
    assert (NPUDevice.ranks_share_memory, CPUDevice.ranks_share_memory) == (False, True)


def test_a_device_without_ranks_names_the_flag_before_a_process_starts() -> None:
    with pytest.raises(StartupError, match="--tensor-parallel is not there with --device cuda") as caught:
        Ranks(2, CUDADevice())
    assert caught.value.flag == "--tensor-parallel"


def test_npus_meet_by_hccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class ProcessGroupHCCL:
        Options = SimpleNamespace

        def __init__(self, *arguments: Any) -> None:
            made.extend(arguments)

    wheel = SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=ProcessGroupHCCL)))
    monkeypatch.setattr("penstock.generation.devices.npu.import_module", {"torch_npu": wheel}.__getitem__)
    group = RankGroup(Shard(1, 2))
    group.join(tmp_path / "meeting", NPUDevice(1))
    store, rank, count, options = made
    assert type(store).__name__ == "FileStore"
    assert (rank, count, options._timeout.total_seconds()) == (1, 2, 300)
