"""Memory that is taken before the weights are there: its parts, what is given back, and that ids stay."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.native import use_native
from factories.models.paged import PagedDriver, PagedSequence
from penstock.common.errors import StartupError
from penstock.common.progress import show_nothing
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices import cpu
from penstock.generation.devices.native import LIBRARY
from penstock.generation.host.arena import ALIGNMENT, PIECE_BYTES, Arena, open_arena
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.startup import preload
from penstock.generation.startup.load import load
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.generation.weights.files import least_weight_bytes

WEIGHTS = "model.safetensors"


def anonymous_bytes() -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def wait_until_touched(arena: Arena, num_bytes: int) -> None:
    while arena.num_touched + arena.num_taken < num_bytes:
        time.sleep(0.001)


def address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_pieces_are_aligned_follow_each_other_and_end_where_the_memory_ends() -> None:
    arena = Arena(PIECE_BYTES)
    first, second = arena.take(100), arena.take(ALIGNMENT)
    assert first is not None
    assert second is not None
    assert (len(first), len(second)) == (100, ALIGNMENT)
    assert address(first) % ALIGNMENT == 0
    assert address(second) - address(first) == 128
    assert arena.take(1 << 40) is None
    # There is some room beyond what is touched.
    rest = arena.take(2 * PIECE_BYTES)
    assert rest is not None
    assert arena.take(PIECE_BYTES) is None
    arena.close()
    assert arena.take(1) is None


def test_touching_never_meets_what_was_handed_out() -> None:
    """Takers write at once, in several threads, while the memory is still being touched."""
    arena = Arena(8 * PIECE_BYTES)
    kept: list[tuple[memoryview, int]] = []
    lock = threading.Lock()

    def take(mark: int) -> None:
        while (part := arena.take(PIECE_BYTES // 3)) is not None:
            ctypes.memset(address(part), mark, len(part))
            with lock:
                kept.append((part, mark))

    takers = [threading.Thread(target=take, args=(mark,)) for mark in (1, 2)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    arena.close()
    assert sum(len(part) for part, _ in kept) > 8 * PIECE_BYTES
    assert all(bytes(part) == bytes([mark]) * len(part) for part, mark in kept)


def test_it_is_touched_once_and_what_nobody_took_is_given_back() -> None:
    before = anonymous_bytes()
    arena = Arena(4 * PIECE_BYTES)
    wait_until_touched(arena, 4 * PIECE_BYTES)
    assert arena.num_touched == 4 * PIECE_BYTES
    assert anonymous_bytes() - before > 3 * PIECE_BYTES
    taken = arena.take(PIECE_BYTES)
    assert (arena.num_touched, arena.num_taken) == (3 * PIECE_BYTES, PIECE_BYTES)
    arena.close()
    assert taken is not None
    assert anonymous_bytes() - before < 2 * PIECE_BYTES
    memory = weakref.ref(arena._memory)
    tensor = torch.frombuffer(taken, dtype=torch.uint8)
    del arena, taken
    gc.collect()
    assert tensor.sum() == 0
    assert memory() is not None
    del tensor
    assert memory() is None


def test_little_is_not_worth_a_thread() -> None:
    assert open_arena(0) is None
    assert open_arena(PIECE_BYTES - 1) is None


def large_checkpoint(folder: Path, dtype: torch.dtype = torch.bfloat16, **config: object) -> Path:
    """Make a checkpoint of more than one piece, in widths that need no padding."""
    return tiny_checkpoint(
        folder, dtype=dtype, vocab_size=70_016, hidden_size=256, intermediate_size=512, num_hidden_layers=1, **config
    )


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels for `load`, and a cache in which the start finds them."""
    use_native()
    monkeypatch.setattr(preload, "UNTOUCHED_BYTES", 2**20)
    monkeypatch.setattr(cpu.library, "load", lambda *folders: "avx2")
    (tmp_path / "cache" / "penstock" / "0").mkdir(parents=True)
    (tmp_path / "cache" / "penstock" / "0" / f"{LIBRARY}-0.so").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(folder: Path, **options: object) -> GenerationServiceConfig:
    return replace(GenerationServiceConfig(model=str(folder), kv_memory="4MiB", tune_seconds=0), **options)


def started(config: GenerationServiceConfig, arena: Arena | None = None) -> LoadedModel:
    return load(config, "large", show_nothing, preload.Begun(arena))


def logits(model: CausalLM) -> torch.Tensor:
    sequence = PagedSequence(list(range(5, 25)))
    PagedDriver(model, num_blocks=4, block_size=8).step([(sequence, 20)])
    return torch.stack(sequence.logits)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("quantization", "compact"), [("none", "off"), ("none", "on"), ("int8", "auto"), ("int4", "auto")]
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.usefixtures("native")
def test_the_model_is_the_same_and_lies_in_memory_that_was_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, compact: str, tied: bool
) -> None:
    # Without the table, which stays in the file, a quantised head is no more.
    monkeypatch.setattr("penstock.generation.host.arena.PIECE_BYTES", 2**23)
    folder = large_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    config = config_of(folder, quantization=quantization, compact_weights=compact)
    arena = preload.begin(config).arena
    assert arena is not None
    num_bytes = least_weight_bytes(folder, "auto", quantization, map_embeddings=True, compact=compact != "off")
    wait_until_touched(arena, num_bytes - 2**20)
    assert arena.num_touched == num_bytes - 2**20
    loaded = started(config, arena)
    assert arena.take(1) is None
    # No matrix needs padding here: what was reckoned is what they take, but for rare exponents.
    assert num_bytes <= arena.num_taken <= num_bytes * (1.03 if compact == "on" else 1.0)
    assert loaded.weights.model.num_bytes >= num_bytes + loaded.weights.model.mapped_bytes
    assert torch.equal(logits(loaded.weights.model), logits(started(config).weights.model))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_weights_that_need_padding_take_no_less_than_was_reckoned(
    tmp_path: Path, quantization: str, mapped: bool
) -> None:
    use_native()
    folder = tiny_checkpoint(tmp_path, max_shard_size="30KB")
    device = cpu.CPUDevice()
    device.instruction_set, device._arena = "avx2", Arena(PIECE_BYTES)
    load_model(folder, device=device, quantization=quantization, map_embeddings=mapped)
    taken = device._arena.num_taken
    device._arena.close()
    assert taken / 2 < least_weight_bytes(folder, "auto", quantization, map_embeddings=mapped) <= taken


@pytest.mark.usefixtures("native")
def test_a_small_arena_takes_what_fits(tmp_path: Path) -> None:
    folder = large_checkpoint(tmp_path / "model", torch.float32)
    arena = Arena(PIECE_BYTES)
    loaded = started(config_of(folder), arena)
    # The embedding is larger than all of it.
    assert 0 < arena.num_taken < PIECE_BYTES
    assert torch.equal(logits(loaded.weights.model), logits(started(config_of(folder)).weights.model))


@pytest.mark.usefixtures("native")
def test_a_load_that_fails_gives_the_memory_back(tmp_path: Path) -> None:
    folder = large_checkpoint(tmp_path / "model")
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])
    # Compact ones would be too few for an arena.
    config = config_of(folder, compact_weights="off")
    arena = preload.begin(config).arena
    assert arena is not None
    memory = weakref.ref(arena._memory)
    with pytest.raises(StartupError, match=WEIGHTS):
        started(config, arena)
    assert arena.take(1) is None
    del arena
    gc.collect()
    assert memory() is None


def test_a_device_without_kernels_gives_it_back_at_once(tmp_path: Path) -> None:
    arena = Arena(PIECE_BYTES)
    started(config_of(tiny_checkpoint(tmp_path), kernels="torch"), arena)
    assert (arena.take(1), arena.num_taken) == (None, 0)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "options",
    [
        {"prefault_weights": False},
        {"kernels": "torch"},
        {"device": "abacus"},
        {"dtype": "float16"},
        {"model": "owner/name"},
        {"model": "/nowhere"},
        {"model": None},
    ],
)
@pytest.mark.usefixtures("native")
def test_nothing_is_taken_that_would_not_be_used(tmp_path: Path, options: dict[str, object]) -> None:
    assert preload.begin(replace(config_of(large_checkpoint(tmp_path / "model")), **options)).arena is None


@pytest.mark.usefixtures("native")
def test_nothing_is_taken_without_kernels_or_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(large_checkpoint(tmp_path / "model"))
    with monkeypatch.context() as little:
        little.setattr(preload, "host_memory", lambda: (2**33, 2**28))
        assert preload.begin(config).arena is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(preload, "system_folder", lambda: str(tmp_path / "empty"))
    assert preload.begin(config).arena is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0{}", b'\x07\0\0\0\0\0\0\0{"a":1}'])
def test_of_a_broken_file_nothing_is_known(tmp_path: Path, content: bytes) -> None:
    folder = tiny_checkpoint(tmp_path)
    (folder / WEIGHTS).write_bytes(content)
    assert least_weight_bytes(folder, "auto", "none", map_embeddings=True) == 0


def reckoned(folder: Path, dtype: str, *, mapped: bool) -> int:
    return least_weight_bytes(folder, dtype, "none", map_embeddings=mapped)


def test_what_is_stored_larger_than_config_json_says_is_reckoned_smaller(tmp_path: Path) -> None:
    """The loader computes in the dtype of config.json."""
    folder = tiny_checkpoint(tmp_path)
    tables = [reckoned(folder, "auto", mapped=mapped) for mapped in (False, True)]
    assert tables[0] - tables[1] == VOCAB_SIZE * 48 * 4
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"float32"', '"bfloat16"'))
    assert reckoned(folder, "auto", mapped=False) * 2 == tables[0] == reckoned(folder, "fp32", mapped=False)
    # It is converted, whether it might be mapped or not.
    assert reckoned(folder, "auto", mapped=True) == reckoned(folder, "auto", mapped=False)
