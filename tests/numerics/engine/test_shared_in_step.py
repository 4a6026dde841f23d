"""The model's property by which the scheduler shares a prompt's beginning in the step that computes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from factories.models.native import use_native
from factories.models.paged import PagedDriver, PagedSequence
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.registry import load_model

BLOCK_SIZE = 4
COMMON = list(range(20, 36))


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("later_first", [False, True])
def test_rows_read_what_another_sequence_writes_in_the_same_step(
    kernels: str, later_first: bool, tmp_path: Path
) -> None:
    device = CPUDevice()
    device.start(num_threads=2, kernels="torch")
    if kernels == "native":
        use_native()
        device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(tiny_checkpoint(tmp_path, "qwen2", seed=3), dtype="float32", device=device)
    alone = PagedSequence([*COMMON, 7, 8, 9])
    PagedDriver(model, num_blocks=20, block_size=BLOCK_SIZE).step([(alone, alone.left)])
    together = PagedDriver(model, num_blocks=20, block_size=BLOCK_SIZE)
    writes, reads = PagedSequence([*COMMON, 5, 6]), PagedSequence([*COMMON, 7, 8, 9])
    writes.blocks.extend(together.take_blocks(5))
    reads.blocks.extend(writes.blocks[: len(COMMON) // BLOCK_SIZE])
    reads.computed = len(COMMON)
    work = [(writes, writes.left), (reads, reads.left)]
    together.step(work[::-1] if later_first else work)
    torch.testing.assert_close(torch.stack(reads.logits), torch.stack(alone.logits[-3:]), rtol=1e-4, atol=1e-5)
