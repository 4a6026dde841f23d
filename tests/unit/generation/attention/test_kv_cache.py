"""The KV pool's tensors, and how many blocks fit the memory it is given."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.common.errors import StartupError
from penstock.generation.attention.kv_cache import KVCachePool, kv_bytes_per_block, quantise
from penstock.generation.host.memory import AUTO_FRACTION, REST, host_memory, kv_pool_blocks, parse_memory
from penstock.generation.host.small_pages import has_small_pages


def pool(num_blocks: int = 6, layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> KVCachePool:
    return KVCachePool(layers, num_blocks, 4, 2, 8, dtype, torch.device("cpu"))


def test_views_are_blocks_of_one_layer() -> None:
    kv = pool()
    assert kv.key(1).shape == kv.value(0).shape == (6, 4, 2, 8)
    kv.key(1)[3] = 7
    assert kv.key(0).abs().max() == 0
    assert kv.value(1).abs().max() == 0
    assert kv.num_slots == 24


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's memory")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_memory_is_taken_as_blocks_are_written(dtype: torch.dtype) -> None:
    before = anonymous_bytes()
    kv = pool(num_blocks=2**21, dtype=dtype)
    assert kv.num_bytes >= 2**28
    assert anonymous_bytes() - before < kv.num_bytes / 4
    assert kv.tensors[0].data_ptr() % 64 == 0
    assert not kv.key(1)[-1].any()


@pytest.mark.skipif(not has_small_pages(), reason="this system cannot make large pages of small ones")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_the_first_tokens_take_little_memory_and_stay_when_pages_become_large(dtype: torch.dtype) -> None:
    """A large page for the first token of each layer's keys and values was 120 MiB of 30 layers."""
    layers, slots = 24, torch.arange(6)
    kv = KVCachePool(layers, 2**14, 16, 2, 32, dtype, torch.device("cpu"), begins_small=True)
    rows = torch.randn(layers, 2, 6, 2, 32).to(torch.bfloat16)
    before = anonymous_bytes()
    for layer in range(layers):
        kv.write(layer, slots, rows[layer, 0], rows[layer, 1])
    assert anonymous_bytes() - before < 2**22
    stored = [[x.clone() for x in kv.read_stored(layer, slots, torch.float32)] for layer in range(layers)]
    kv.leave_small_pages()
    kv.leave_small_pages()
    for thread in threading.enumerate():
        if thread.name == "large-pages":
            thread.join()
    # As many pages as the system has: a machine in use may have fewer than all.
    assert anonymous_bytes() - before > layers * 2**21
    for layer, pair in enumerate(stored):
        again = kv.read_stored(layer, slots, torch.float32)
        assert torch.equal(again[0], pair[0])
        assert torch.equal(again[1], pair[1])


def test_bytes_count_keys_and_values_of_all_layers() -> None:
    assert pool().bytes_per_block == 2 * 2 * 4 * 2 * 8 * 2
    assert pool().num_bytes == 6 * kv_bytes_per_block(2, 4, 2, 8, torch.bfloat16)


def test_copy_reads_every_source_before_it_writes() -> None:
    kv = pool()
    for layer in range(2):
        for block in range(6):
            kv.key(layer)[block] = block
            kv.value(layer)[block] = 10 + block
    kv.copy_blocks([(0, 1), (1, 2), (5, 4)])
    for layer in range(2):
        assert kv.key(layer)[:, 0, 0, 0].tolist() == [0, 0, 1, 3, 5, 5]
        assert kv.value(layer)[:, 3, 1, 7].tolist() == [10, 10, 11, 13, 15, 15]


def test_int8_takes_a_byte_a_number_and_a_scale_for_each_token_and_head() -> None:
    kv = pool(dtype=torch.int8)
    assert kv.bytes_per_block == 2 * 2 * 4 * 2 * (8 + 4)
    assert kv.key_scale(1) is not None
    assert kv.key_scale(1).shape == (6, 4, 2)  # type: ignore[union-attr]
    assert pool().key_scale(0) is pool().value_scale(0) is None


def test_what_is_written_in_int8_is_read_to_half_a_scale_and_travels_with_its_block() -> None:
    kv, slots = pool(dtype=torch.int8), torch.tensor([5, 23, 4])
    k, v = torch.randn(3, 2, 8), 100 * torch.randn(3, 2, 8)
    as_read = kv.write(1, slots, k, v)
    for found, written, returned in zip(kv.read(1, slots, torch.float32), (k, v), as_read, strict=True):
        assert torch.equal(found, returned)
        assert ((found - written).abs() <= written.abs().amax(-1, keepdim=True) / 127 * 0.5001).all()
    kv.copy_blocks([(1, 3), (5, 1)])
    copied = kv.read(1, torch.tensor([13, 7, 12]), torch.float32)
    assert all(torch.equal(*pair) for pair in zip(copied, as_read, strict=True))
    kv.clear()
    assert not any(part.any() for part in (*kv.read(1, slots, torch.float32), kv.key(1), kv.key_scale(1)))


@given(
    rows=st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4), min_size=1
    )
)
def test_int8_is_within_half_a_step_of_any_numbers(rows: list[list[float]]) -> None:
    x = torch.tensor(rows).unsqueeze(1)
    whole, scale = quantise(x)
    assert whole.dtype is torch.int8
    assert whole.abs().max() <= 127
    error = (whole.double() * scale.double().unsqueeze(-1) - x.double()).abs()
    assert (error <= 0.5001 * x.double().abs().amax(-1, keepdim=True) / 127 + 1e-30).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_in_int8_is_nan_to_whoever_attends_to_it(bad: float) -> None:
    kv, good = pool(dtype=torch.int8), torch.ones(2, 2, 8)
    for sick in (good.clone(), good.clone()):
        sick[0, 1, 3] = bad
    for k, v in ((sick, good), (good, sick)):
        found, _ = kv.write(0, torch.tensor([2, 9]), k, v)
        assert found.isnan().all(-1).tolist() == [[False, True], [False, False]]


def test_copy_of_nothing_changes_nothing() -> None:
    kv = pool()
    kv.copy_blocks([])
    assert kv.key(0).abs().max() == 0


def test_a_pool_that_cannot_be_had_names_the_flag() -> None:
    with pytest.raises(StartupError, match="--kv-memory"):
        pool(num_blocks=2**50)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2**31),
        ("512MB", 512 * 10**6),
        ("1.5g", 1_500_000_000),
        ("4096", 4096),
        ("8 MiB", 2**23),
        ("auto", None),
        ("-1", REST),
    ],
)
def test_memory_is_written_as_people_write_it(text: str, expected: int | None) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "-1GiB", "2 apples", "GiB", "1e9", "0x10"])
def test_what_is_no_size_names_the_flag(text: str) -> None:
    with pytest.raises(StartupError, match="--kv-memory") as caught:
        parse_memory(text)
    assert caught.value.flag == "--kv-memory"


def test_given_memory_is_used_to_the_last_whole_block() -> None:
    assert blocks(memory=1050, available=2000) == 10


def test_auto_takes_a_share_of_what_is_left() -> None:
    assert blocks(memory=None, available=10_000) == int(10_000 * AUTO_FRACTION) // 100


def test_auto_takes_no_more_than_can_be_used() -> None:
    assert blocks(memory=None, available=10**9, max_blocks=77) == 77


@pytest.mark.parametrize(("memory", "available"), [(99, 2000), (None, 10), (None, -500), (2001, 2000)])
def test_too_little_memory_says_how_much_is_needed(memory: int | None, available: int) -> None:
    with pytest.raises(StartupError, match=r"one block takes 100 B.*1000 tokens\) 6\.15 KiB") as caught:
        blocks(memory=memory, available=available)
    assert caught.value.flag == "--kv-memory"


def test_minus_one_takes_what_is_left_of_four_fifths_of_all() -> None:
    assert blocks(memory=REST, available=10_000, total=10_000) == 80
    assert blocks(memory=REST, available=7_000, total=10_000) == 50


def test_minus_one_of_too_little_says_so_and_how_much_is_needed() -> None:
    with pytest.raises(StartupError, match=r"--kv-memory -1.*80%.*holds no KV block: one block takes 100 B") as caught:
        blocks(memory=REST, available=2_050, total=10_000)
    assert caught.value.flag == "--kv-memory"


def blocks(memory: int | None, available: int, max_blocks: int | None = None, total: int = 0) -> int:
    return kv_pool_blocks(
        memory,
        bytes_per_block=100,
        blocks_of_context=-(-1000 // 16),
        available=available,
        max_context_tokens=1000,
        max_blocks=max_blocks,
        total=total,
    )


def fake_host(root: Path, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n"} | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    root = fake_host(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert host_memory(root) == (1000 * 1024, 800 * 1024)


def test_the_tightest_enclosing_group_counts_and_file_cache_does_not(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": "500000\n",
        "sys/fs/cgroup/outer/memory.current": "300000\n",
        "sys/fs/cgroup/outer/memory.stat": "anon 100\ninactive_file 200000\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
    }
    assert host_memory(fake_host(tmp_path, files)) == (500000, 400000)


def test_the_first_version_of_groups_counts_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "400000\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "100000\n",
    }
    assert host_memory(fake_host(tmp_path, files)) == (400000, 300000)


@pytest.mark.parametrize(("inactive", "active"), [(200000, 0), (80000, 120000), (0, 200000)])
def test_mapped_files_count_once_wherever_the_system_counts_their_pages(
    tmp_path: Path, inactive: int, active: int
) -> None:
    files = {
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": "500000\n",
        "sys/fs/cgroup/box/memory.current": "300000\n",
        "sys/fs/cgroup/box/memory.stat": f"anon 100000\ninactive_file {inactive}\nactive_file {active}\n",
    }
    root = fake_host(tmp_path, files)
    assert host_memory(root, mapped=200000) == (500000, 200000)
    assert host_memory(root)[1] == 200000 + inactive
    # The machine's own figure has them as available whatever they are.
    free = fake_host(tmp_path / "free", {"proc/self/cgroup": "0::/\n"})
    assert host_memory(free, mapped=200000) == (1000 * 1024, 800 * 1024 - 200000)


@pytest.mark.parametrize("num_blocks", [2**50, 2**60])
def test_a_pool_that_no_memory_holds_is_refused_naming_its_flag(num_blocks: int) -> None:
    with pytest.raises(StartupError) as caught:
        KVCachePool(2, num_blocks, 16, 2, 8, torch.float32, torch.device("cpu"))
    assert caught.value.flag == "--kv-memory"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_shallow_pool_is_the_first_layers_memory(dtype: torch.dtype) -> None:
    kv = KVCachePool(3, 4, 8, 2, 16, dtype, torch.device("cpu"))
    some = kv.shallow(2)
    some.write(1, torch.tensor([9]), torch.ones(1, 2, 16), torch.ones(1, 2, 16))
    assert (some.num_layers, some.num_slots, some.num_bytes * 3) == (2, kv.num_slots, kv.num_bytes * 2)
    for whole, part in zip(kv.tensors, some.tensors, strict=True):
        assert (whole is None) == (part is None)
        assert whole is None or part is None or torch.equal(whole[:2], part)
    # In both heads; turned ones are one number.
    assert kv.key(1)[1, 1].any(-1).all()
