"""A service with a file of blocks: restarts, damage, two services with one file, new weights, and what is refused."""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from factories.servers.generation import Client, generation_service, request, text_checkpoint
from penstock.common.errors import StartupError
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.host.block_file import BlockFile
from penstock.v1 import admin_pb2
from prometheus_client import generate_latest

BLOCK_SIZE, PROMPT_TOKENS = 16, 100
# Whole blocks before the last token.
HIT_TOKENS = 96


def settings(file: Path, **changes: Any) -> dict[str, Any]:
    return {"kv_disk": str(file), "kv_memory": "4MiB", "max_context": 256, "dtype": "float32", **changes}


def long_request(number: int = 0, **fields: Any) -> Any:
    prompt = range(10 + 50 * number, 10 + 50 * number + PROMPT_TOKENS)
    return request(prompt, config={"max_new_tokens": 8}, **fields)


def metrics_of(client: Client) -> list[str]:
    return generate_latest(client.running.registry).decode().splitlines()


def figure(client: Client, name: str) -> float:
    line = next(line for line in metrics_of(client) if line.startswith(f"penstock_{name}{{"))
    return float(line.rpartition(" ")[2])


async def ids_of(client: Client, **fields: Any) -> Any:
    return (await client.generate(long_request(**fields))).ids()


async def test_a_restart_finds_what_the_last_process_had(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "blocks"
    async with generation_service(folder, **settings(file)) as client:
        computed = await ids_of(client)
        assert figure(client, "kv_disk_blocks") > 100
        assert figure(client, "kv_disk_hits_total") == 0
    async with generation_service(folder, **settings(file)) as client:
        assert await ids_of(client) == computed
        assert figure(client, "kv_disk_hits_total") == figure(client, "prefix_cache_hits_total") == HIT_TOKENS
        assert figure(client, "kv_disk_read_blocks_total") == HIT_TOKENS // BLOCK_SIZE
        assert figure(client, "kv_disk_read_bytes_total") > 0
        # A tenant finds its own blocks alone.
        assert await ids_of(client, cache_salt="another") == computed
        assert figure(client, "kv_disk_hits_total") == HIT_TOKENS


async def test_a_damaged_file_costs_time_alone(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "blocks"
    async with generation_service(folder, **settings(file, kv_disk_size=4 << 20)) as client:
        computed = await ids_of(client)
    data = bytearray(file.read_bytes())
    # All after the head.
    for at in range(4096, len(data)):
        data[at] ^= 0x55 if data[at] else 0
    file.write_bytes(data)
    async with generation_service(folder, **settings(file, kv_disk_size=4 << 20)) as client:
        assert await ids_of(client) == computed
        assert figure(client, "prefix_cache_hits_total") == 0


async def test_a_block_with_wrong_bytes_is_refused_and_counted(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "blocks"
    async with generation_service(folder, **settings(file, kv_disk_size=4 << 20)) as client:
        computed = await ids_of(client)
    data = bytearray(file.read_bytes())
    _, block_bytes, _, _ = struct.unpack_from("<16sQQQ", data)
    opened = BlockFile(file, block_bytes, 4 << 20)
    opened.close()
    for at in range(opened._first_block, len(data)):
        data[at] ^= 0x55 if data[at] else 0
    file.write_bytes(data)
    async with generation_service(folder, **settings(file, kv_disk_size=4 << 20)) as client:
        assert await ids_of(client) == computed
        assert figure(client, "prefix_cache_hits_total") == 0
        assert figure(client, "kv_disk_refused_blocks_total") == 1


async def test_two_services_share_a_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "blocks"
    async with generation_service(folder, **settings(file)) as second:
        async with generation_service(folder, **settings(file)) as first:
            computed = await ids_of(first)
        # The first has stopped and written.
        assert await ids_of(second) == computed
        assert figure(second, "kv_disk_hits_total") == HIT_TOKENS


async def test_blocks_that_leave_the_pool_are_written_while_it_serves(folder: Path, tmp_path: Path) -> None:
    small = settings(tmp_path / "blocks", kv_memory="64KiB", max_running_sequences=2)
    async with generation_service(folder, **small) as client:
        computed = [await ids_of(client, number=number) for number in range(4)]
        async with asyncio.timeout(60):
            while figure(client, "kv_disk_queued_blocks"):  # noqa: ASYNC110  metrics tell no event
                await asyncio.sleep(0.01)
        assert figure(client, "kv_disk_written_blocks_total") > 0
        assert [await ids_of(client, number=number) for number in range(4)] == computed


async def test_other_weights_and_a_cleared_cache_find_nothing(folder: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "blocks", text_checkpoint(tmp_path / "other", seed=5)
    async with generation_service(folder, **settings(file)) as client:
        await ids_of(client)
    async with generation_service(other, **settings(file)) as client:
        await ids_of(client)
        assert figure(client, "kv_disk_hits_total") == 0
    async with generation_service(folder, **settings(file)) as client:
        await client.admin.ClearCache(admin_pb2.ClearCacheRequest())
        await client.generate(long_request(3))
    async with generation_service(folder, **settings(file)) as client:
        await ids_of(client)
        assert figure(client, "kv_disk_hits_total") == 0


async def test_a_model_with_windows_finds_the_blocks_of_all_its_layers(tmp_path: Path) -> None:
    folder = text_checkpoint(tmp_path / "model", family="gemma2", sliding_window=32)
    found = []
    for _ in range(2):
        async with generation_service(folder, **settings(tmp_path / "blocks-%b")) as client:
            found.append(await ids_of(client))
            hits = figure(client, "kv_disk_hits_total"), figure(client, "prefix_cache_hits_total")
            names = {
                line.split('layers="')[1].split('"')[0] for line in metrics_of(client) if "group_blocks_used{" in line
            }
    assert found[0] == found[1]
    assert hits[0] == hits[1] > 0
    assert len(names) == 2, "the model's layers are one group"
    (size,) = [name.removeprefix("blocks-") for name in os.listdir(tmp_path) if name.startswith("blocks-")]
    assert int(size) > 0


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "int8"), ("deepseek_v3", "auto"), ("youtu", "int8")], ids=lambda value: value
)
async def test_keys_and_values_of_any_form_come_back_as_they_were(tmp_path: Path, family: str, dtype: str) -> None:
    file, folder = tmp_path / "blocks", text_checkpoint(tmp_path / "model", family=family)
    found = []
    for _ in range(2):
        async with generation_service(folder, **settings(file, kv_cache_dtype=dtype)) as client:
            found.append(await ids_of(client))
            hits = figure(client, "kv_disk_hits_total")
    assert found[0] == found[1]
    assert hits == HIT_TOKENS


@pytest.mark.parametrize(
    "changes",
    [{"tensor_parallel": 2, "threads": 2}, {"prefix_cache": False}, {"host_prefix_cache": False}],
)
def test_what_it_does_not_go_with_is_named(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="--kv-disk does not go with") as caught:
        GenerationServiceConfig(model=str(folder), **settings(tmp_path / "blocks", **changes)).validate()
    assert caught.value.flag == "--kv-disk"


async def test_a_file_of_somebody_else_is_no_file_of_blocks(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "thesis"
    file.write_text("It was a dark and stormy night.")
    with pytest.raises(StartupError, match="no file of blocks") as caught:
        async with generation_service(folder, **settings(file)):
            pass
    assert caught.value.flag == "--kv-disk"
    assert file.read_text() == "It was a dark and stormy night."
