"""Sums and parts between the ranks of one host, by the process group of their device."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.generation.weights.sharding import Shard

if TYPE_CHECKING:
    from penstock.generation.devices.base import Device

# Time that a rank waits for another, to meet or in one collective. The connection of a dead rank shows its death at
# once.
PATIENCE = timedelta(minutes=5)


class RankGroup:
    """Group of ranks, after `join`. Used by one thread at a time; all ranks make the same calls in the same order."""

    def __init__(self, shard: Shard) -> None:
        """Take this process's place."""
        self.shard = shard
        # torch's stubs leave out what its process groups do.
        self._group: Any = None
        self._gathers_at_one = True

    def join(self, meeting: Path, device: Device) -> None:
        """Meet the others by a file in a folder that only they may write to."""
        distributed: Any = dist
        store = distributed.FileStore(str(meeting), self.shard.count)
        self._group = device.process_group(store, self.shard.rank, self.shard.count, PATIENCE)
        self._gathers_at_one = device.gathers_at_one

    def leave(self) -> None:
        """Close the connections."""
        self._group = None

    def sum(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors, of one shape and dtype, in place; return it. All ranks get the same bits."""
        self._group.allreduce([x]).wait()
        return x

    def columns(self, part_NX: Tensor, num_columns: int) -> Tensor | None:
        """Return the ranks' columns side by side (N, num_columns), at rank 0; None at the others.

        Ranks have the columns of Shard.part.
        """
        each = -(-num_columns // self.shard.count)
        if part_NX.shape[1] < each:
            part_NX = torch.nn.functional.pad(part_NX, (0, each - part_NX.shape[1]))
        part_NX = part_NX.contiguous()
        parts = [torch.empty_like(part_NX) for _ in range(self.shard.count)]
        if self._gathers_at_one:
            options = dist.GatherOptions()
            options.rootRank = 0
            self._group.gather([] if self.shard.rank else [parts], [part_NX], options).wait()
        else:
            self._group.allgather([parts], [part_NX]).wait()
        if self.shard.rank:
            return None
        return torch.cat(parts, dim=1)[:, :num_columns].contiguous()
