"""The table that ids are looked up in, used where the page cache has the checkpoint: same numbers, less memory."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.native import use_native
from factories.models.paged import PagedDriver, PagedSequence
from penstock.common.errors import StartupError
from penstock.common.progress import show_nothing
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.base import Device
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.host.cpu_features import packing_obstacle
from penstock.generation.host.mapped import MappedFile, weights_written
from penstock.generation.host.memory import format_weights
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.startup.load import load as load_service
from penstock.generation.weights import safetensors_folder
from penstock.generation.weights.files import stored_tensors
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HIDDEN = 48


def device_of(kernels: str) -> CPUDevice:
    device = CPUDevice()
    if kernels == "native":
        use_native()
        device.instruction_set = "avx2"
    return device


def load(folder: Path, *, kernels: str = "torch", **options: object) -> CausalLM:
    return load_model(folder, device=device_of(kernels), **options)  # type: ignore[arg-type]


def logits(model: CausalLM) -> torch.Tensor:
    """Logits of a prompt that looks up the first and the last row, too."""
    sequence = PagedSequence([0, VOCAB_SIZE - 1, *range(5, 25)])
    PagedDriver(model, num_blocks=4, block_size=8).step([(sequence, 22)])
    return torch.stack(sequence.logits)


def assert_same(folder: Path, mapped_bytes: int, **options: object) -> None:
    mapped, copied = (load(folder, map_embeddings=on, **options) for on in (True, False))
    assert (mapped.mapped_bytes, copied.mapped_bytes) == (mapped_bytes, 0)
    assert mapped.num_bytes == copied.num_bytes
    assert torch.equal(logits(mapped), logits(copied))


def shift_header(path: Path, odd: int) -> None:
    """So many spaces behind the header's text, as any writer may put there."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    path.write_bytes((size + odd).to_bytes(8, "little") + content[8 : 8 + size] + b" " * odd + content[8 + size :])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shards", ["5GB", "30KB"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_a_table_in_memory(
    tmp_path: Path, kernels: str, quantization: str, dtype: torch.dtype, shards: str, tied: bool
) -> None:
    folder = tiny_checkpoint(tmp_path, dtype=dtype, max_shard_size=shards, tie_word_embeddings=tied)
    # A tied embedding is looked up in the head where that stays as it is: on the kernels, or where oneDNN packs none.
    keeps_head = quantization == "none" and (kernels == "native" or packing_obstacle(dtype) is not None)
    has_table = not (keeps_head and tied)
    size = VOCAB_SIZE * HIDDEN * dtype.itemsize if has_table else 0
    assert_same(folder, size, kernels=kernels, quantization=quantization)


@pytest.mark.parametrize(("stored", "dtype"), [(torch.float16, "bfloat16"), (torch.bfloat16, "float32")])
def test_what_is_stored_in_another_dtype_is_copied(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    assert_same(tiny_checkpoint(tmp_path, dtype=stored), 0, dtype=dtype, quantization="int8")


def test_float16_computed_as_float16_is_mapped(tmp_path: Path) -> None:
    assert_same(tiny_checkpoint(tmp_path, dtype=torch.float16), VOCAB_SIZE * HIDDEN * 2, dtype="float16")


@pytest.mark.parametrize(("odd", "mapped"), [(1, False), (2, False), (4, True)])
def test_a_table_between_two_numbers_places_is_copied(tmp_path: Path, odd: int, mapped: bool) -> None:
    folder = tiny_checkpoint(tmp_path)
    begin = stored_tensors((folder / WEIGHTS).read_bytes())[EMBEDDING].begin
    shift_header(folder / WEIGHTS, odd)
    assert stored_tensors((folder / WEIGHTS).read_bytes())[EMBEDDING].begin == begin + odd
    assert_same(folder, VOCAB_SIZE * HIDDEN * 4 if mapped else 0)


def test_two_tied_tensors_that_differ_are_a_table_and_a_head(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "lm_head.weight": tensors[EMBEDDING] * 2}, folder / WEIGHTS)
    assert_same(folder, VOCAB_SIZE * HIDDEN * 4, kernels="native")


def test_a_device_that_maps_nothing_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUDevice, "mapped_tensor", Device.mapped_tensor)
    device = CPUDevice()
    model = load_model(tiny_checkpoint(tmp_path), device=device)
    assert (model.mapped_bytes, device.mapped_files) == (0, ())
    assert Device.mapped_files.fget(device) == ()  # type: ignore[attr-defined]


@pytest.mark.parametrize("shards", ["5GB", "30KB"])
def test_progress_ends_at_a_hundred(tmp_path: Path, shards: str) -> None:
    told: list[tuple[int, int]] = []
    load(tiny_checkpoint(tmp_path, max_shard_size=shards), progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


def test_only_the_table_is_unavailable_to_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def host_memory(*, mapped: int) -> tuple[int, int]:
        told.append(mapped)
        return 2**40, 2**39

    monkeypatch.setattr("penstock.generation.devices.cpu.host_memory", host_memory)
    device = CPUDevice()
    device.memory()
    load_model(tiny_checkpoint(tmp_path), device=device)
    device.memory()
    assert told == [0, VOCAB_SIZE * HIDDEN * 4]


def test_a_service_says_what_it_maps_of_both_its_models(tmp_path: Path) -> None:
    folders = [tiny_checkpoint(tmp_path / name) for name in ("served", "drafting")]
    config = GenerationServiceConfig(
        model=str(folders[0]),
        assistant_model=str(folders[1]),
        kv_memory="1MiB",
        assistant_kv_memory="1MiB",
        tune_seconds=0.0,
        kernels="torch",
    )
    loaded = load_service(config, "both", show_nothing)
    assert [file.path.parent for file in loaded.weights.device.mapped_files] == folders
    lines = loaded.status_lines()
    assert ["60 KiB of it mapped" in line for line in (lines[0], lines[-1])] == [True, True]
    off = load_service(GenerationServiceConfig(**{**vars(config), "map_embeddings": False}), "both", show_nothing)
    assert off.weights.device.mapped_files == ()
    assert not [line for line in off.status_lines() if "mapped" in line]


def test_memory_of_weights_is_told_with_what_is_mapped() -> None:
    assert format_weights(2048, 0) == "2 KiB"
    assert format_weights(2048, 2048) == "2 KiB mapped"
    assert format_weights(2048, 1024) == "2 KiB, 1 KiB of it mapped"


def test_the_model_keeps_a_file_that_is_replaced_or_removed(tmp_path: Path) -> None:
    device = CPUDevice()
    folder = tiny_checkpoint(tmp_path / "one")
    model = load_model(folder, device=device)
    before = logits(model)
    (file,) = device.mapped_files
    os.replace(tiny_checkpoint(tmp_path / "two", seed=1) / WEIGHTS, folder / WEIGHTS)
    assert torch.equal(logits(model), before)
    assert not file.was_written()
    shutil.rmtree(folder)
    assert torch.equal(logits(model), before)
    assert not file.was_written()


def test_a_header_that_changes_while_it_is_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = tiny_checkpoint(tmp_path / "one"), tiny_checkpoint(tmp_path / "two", vocab_size=VOCAB_SIZE + 8)

    def swapped(path: Path) -> MappedFile:
        assert path == folder / WEIGHTS
        return MappedFile(other / WEIGHTS)

    monkeypatch.setattr(safetensors_folder, "MappedFile", swapped)
    with pytest.raises(StartupError, match="changed while it was being loaded") as caught:
        load(folder)
    assert caught.value.flag == "MODEL"
    broken = other / WEIGHTS
    broken.write_bytes(broken.read_bytes()[:-1000])
    with pytest.raises(StartupError, match=WEIGHTS):
        load(folder)
    broken.write_bytes(b"\xff" * 100)
    with pytest.raises(StartupError, match="not a complete safetensors file"):
        load(folder)


def test_a_truncated_file_is_refused_before_anything_is_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path)
    content = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(content[:8], "little")
    begin = json.loads(content[8 : 8 + size])[EMBEDDING]["data_offsets"][0]
    short = tmp_path / "short"
    short.write_bytes(content[: 8 + size + begin + 100])
    monkeypatch.setattr(safetensors_folder, "MappedFile", lambda path: MappedFile(short))
    with pytest.raises(StartupError, match="changed while it was being loaded"):
        load(folder)


async def test_a_watch_ends_when_a_byte_of_the_file_is_written(tmp_path: Path) -> None:
    first, second, name = tmp_path / "first", tmp_path / "second", tmp_path / "name"
    for path in (first, second):
        path.write_bytes(b"weights")
    os.link(second, name)
    files = [MappedFile(path) for path in (first, second)]
    replacement = tmp_path / "replacement"
    replacement.write_bytes(b"others!")
    os.replace(replacement, second)
    watch = asyncio.create_task(weights_written(files, 0.001))
    done, _ = await asyncio.wait([watch], timeout=0.1)
    assert not done
    assert bytes(files[1].memory) == b"weights"
    # Not a byte longer, and by another name.
    with name.open("r+b") as out:
        out.write(b"WEIGHTS")
    error = await watch
    assert str(error).startswith(f"{second} was written to")
    assert "renaming" in str(error)


def test_a_time_of_modification_that_is_put_back_does_not_hide_a_write(tmp_path: Path) -> None:
    path, name = tmp_path / "weights", tmp_path / "name"
    path.write_bytes(bytes(3 << 20))
    file = MappedFile(path)
    assert not file.was_written()
    before = path.stat()
    # Other changes than of data also change the time that cannot be put back.
    os.link(path, name)
    path.chmod(0o600)
    until_later(path, before.st_ctime_ns)
    assert not file.was_written()
    with name.open("r+b") as out:
        out.write(b"\1" * (3 << 20))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert file.was_written()


def until_later(path: Path, changed: int) -> None:
    """Clocks of file systems move in steps of milliseconds."""
    while path.stat().st_ctime_ns == changed:
        path.chmod(0o600)


async def test_a_file_that_cannot_be_looked_at_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    file = MappedFile(path)

    def stale(self: MappedFile) -> tuple[int, int]:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(MappedFile, "_look", stale)
    error = await weights_written([file], 0.001)
    assert str(path) in str(error)
    assert "Stale file handle" in str(error)
