"""Responses that the gateway keeps: whose they are, how many, how long, and on what file."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from factories.full_disk import full_disk
from factories.servers.shared_store import needs_shared_store, shared_store
from penstock.common.errors import StartupError
from penstock.gateway.redis_place import is_shared
from penstock.gateway.redis_responses import RedisResponses
from penstock.gateway.response_store import ResponseStore, StoredResponse, StoreFailed
from penstock.gateway.sqlite_responses import SqliteResponses


@asynccontextmanager
async def store(place: str = "memory", **bounds: Any) -> AsyncIterator[ResponseStore]:
    bounds = {"max_responses": 100, "max_bytes": 1 << 20, "seconds": 60.0, **bounds}
    made: ResponseStore = (
        RedisResponses(place, timeout_seconds=5.0, connections=4, **bounds)
        if is_shared(place)
        else SqliteResponses(place, **bounds)
    )
    try:
        await made.open()
        yield made
    finally:
        await made.close()


@pytest.fixture(params=["memory", pytest.param("server", marks=needs_shared_store)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Place of an empty store, of each kind."""
    if request.param == "memory":
        yield request.param
    else:
        with shared_store(tmp_path) as server:
            yield server.url


def response(name: str, text: str = "hello") -> StoredResponse:
    return StoredResponse({"id": name, "output": [text]}, [{"id": f"in-{name}", "text": text}])


async def test_a_caller_sees_its_own_only(place: str) -> None:
    async with store(place) as kept:
        await kept.put("a", response("1", "a \ud83d half"), None)
        await kept.put("b", response("2"), "1")
        found = await kept.get("a", "1")
        assert found is not None
        # Half of a character is what UTF-8 has not.
        assert found.input == [{"id": "in-1", "text": "a ? half"}]
        assert await kept.get("b", "1") is None
        assert await kept.get("a", "3") is None
        # Its own, but built on what it may not see.
        assert await kept.chain("b", "2", 1 << 20) is None
        assert not await kept.delete("b", "1")
        assert (await kept.delete("a", "1"), await kept.delete("a", "1")) == (True, False)
        assert kept.num_responses == 1


async def test_a_chain_is_oldest_first_and_bounded(place: str) -> None:
    async with store(place) as kept:
        previous = None
        for name in "1234":
            await kept.put("a", response(name), previous)
            previous = name
        chain = await kept.chain("a", "3", 1 << 20)
        assert chain is not None
        assert [one.response_id for one in chain] == ["1", "2", "3"]
        with pytest.raises(OverflowError):
            await kept.chain("a", "4", kept.num_bytes - 1)
        assert await kept.chain("a", "4", kept.num_bytes) is not None
        await kept.delete("a", "2")
        assert await kept.chain("a", "4", 1 << 20) is None


async def test_the_oldest_leave_where_there_are_too_many_or_too_large(place: str) -> None:
    async with store(place, max_responses=3) as kept:
        for name in "12345":
            await kept.put("a", response(name), None)
        assert [name for name in "12345" if await kept.get("a", name)] == ["3", "4", "5"]
        for name in "345":
            assert await kept.delete("a", name)
    async with store(place, max_bytes=1000) as kept:
        for name in "12345":
            await kept.put("a", response(name, "x" * 150), None)
            assert kept.num_bytes <= 1000
        assert kept.num_responses == 2
        assert await kept.get("a", "5") is not None


async def test_a_life_ends(place: str) -> None:
    async with store(place, seconds=0.01) as kept:
        await kept.put("a", response("1"), None)
        await asyncio.sleep(0.02)  # the life itself is what is waited for
        assert await kept.get("a", "1") is None
        await kept.put("a", response("2"), None)
        assert kept.num_responses == 1


async def test_a_file_outlives_the_process_and_is_its_owners_and_one_gateways(tmp_path: Path) -> None:
    file = tmp_path / "kept.sqlite"
    async with store(str(file)) as kept:
        await kept.put("a", response("1", "not for others"), None)
        with pytest.raises(StartupError, match=r"--response-store .*locked") as caught:
            SqliteResponses(str(file), max_responses=1, max_bytes=1024, seconds=1.0)
        assert caught.value.flag == "--response-store"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    async with store(str(file)) as kept:
        assert kept.num_responses == 1
        assert await kept.get("a", "1") is not None
        await kept.delete("a", "1")
    # Deleted is overwritten.
    assert b"not for others" not in file.read_bytes()


@pytest.mark.parametrize("place", ["/no/such/folder/x", "/dev", __file__])
def test_a_place_that_is_none_names_the_flag(place: str) -> None:
    with pytest.raises(StartupError, match=f"--response-store {place}: ") as caught:
        SqliteResponses(place, max_responses=1, max_bytes=1024, seconds=1.0)
    assert caught.value.flag == "--response-store"


async def test_a_put_that_fails_leaves_the_counts(tmp_path: Path) -> None:
    async with store(str(tmp_path / "x")) as kept:
        await kept.put("a", response("1"), None)
        before = kept.num_responses, kept.num_bytes
        with pytest.raises(StoreFailed):
            await kept.put("a", response("1"), None)
        assert (kept.num_responses, kept.num_bytes) == before


async def test_a_response_larger_than_all_may_be_is_not_kept_and_no_other_leaves(place: str) -> None:
    async with store(place, max_bytes=1000) as kept:
        await kept.put("a", response("1"), None)
        counts = kept.num_responses, kept.num_bytes
        with pytest.raises(StoreFailed, match="--max-response-bytes"):
            await kept.put("a", response("2", "x" * 1000), None)
        assert (kept.num_responses, kept.num_bytes) == counts
        assert await kept.get("a", "1") is not None


async def counted(kept: SqliteResponses) -> tuple[int, int]:
    """Rows and bytes that are in the file."""
    query = "SELECT count(*), coalesce(sum(size), 0) FROM responses"
    rows, size = await kept.place.run(lambda: kept.place.db.execute(query).fetchone())
    return rows, size


async def test_a_full_disk_keeps_what_there_was_and_counts_it(tmp_path: Path) -> None:
    place = tmp_path / "kept"
    async with store(str(place), max_responses=20) as kept:
        assert isinstance(kept, SqliteResponses)
        for number in range(5):
            await kept.put("a", response(str(number), "x" * 5000), None)
        with full_disk(place, tmp_path / "kept-wal"):
            for number in range(5, 45):
                with pytest.raises(StoreFailed):
                    await kept.put("a", response(str(number), "x" * 5000), None)
                with pytest.raises(StoreFailed):
                    await kept.delete("a", "0")
                assert (kept.num_responses, kept.num_bytes) == await counted(kept)
        for number in range(45, 60):
            await kept.put("a", response(str(number), "x" * 5000), None)
        assert (kept.num_responses, kept.num_bytes) == await counted(kept)
        # All that were stored, the first ones too, and no other.
        there = [number for number in range(60) if await kept.get("a", str(number)) is not None]
        assert there == [*range(5), *range(45, 60)]
        assert await kept.delete("a", "0")
        assert (kept.num_responses, kept.num_bytes) == await counted(kept)


async def test_rows_that_leave_with_a_put_that_fails_are_counted_again(tmp_path: Path) -> None:
    async with store(str(tmp_path / "kept")) as kept:
        assert isinstance(kept, SqliteResponses)
        for number in range(5):
            await kept.put("a", response(str(number)), None)
        await kept.place.run(lambda: kept.place.db.execute("UPDATE responses SET expires = 0 WHERE id = '0'"))
        await kept.place.run(lambda: kept.place.db.commit())
        for _ in range(10):
            with pytest.raises(StoreFailed):
                # Of an id that there is.
                await kept.put("a", response("4"), None)
            assert (kept.num_responses, kept.num_bytes) == await counted(kept)
            assert kept.num_responses == 5


@needs_shared_store
@pytest.mark.parametrize("evicted", ["sizes", "total", "ages", "entries"])
async def test_a_server_that_evicts_keys_takes_the_next_responses(tmp_path: Path, evicted: str) -> None:
    with shared_store(tmp_path) as server:
        async with store(server.url, max_responses=3, max_bytes=1000) as kept:
            assert isinstance(kept, RedisResponses)
            for number in range(3):
                await kept.put("a", response(str(number), "x" * 100), None)
            await kept._redis.delete(f"{{penstock:responses}}:{evicted}")
            for number in range(3, 12):
                await kept.put("a", response(str(number), "x" * 100), None)
                assert await kept.get("a", str(number)) is not None
            assert kept.num_responses == 3
            found = await kept.get("a", "11")
            assert found is not None
            assert kept.num_bytes <= 1000


@needs_shared_store
async def test_what_is_shared_is_counted_together_and_put_again_once(tmp_path: Path) -> None:
    with shared_store(tmp_path) as server:
        async with store(server.url, max_responses=3) as one, store(server.url, max_responses=3) as other:
            for number in range(4):
                await (one, other)[number % 2].put("a", response(str(number)), None)
            assert other.num_responses == 3
            assert [await one.get("a", name) is not None for name in "0123"] == [False, True, True, True]
            before = other.num_bytes
            await other.put("a", response("3"), None)
            assert (other.num_responses, other.num_bytes) == (3, before)
        async with store(server.url) as third:
            assert (third.num_responses, third.num_bytes) == (3, before)


@needs_shared_store
async def test_a_server_that_does_not_answer_fails_its_calls_and_is_used_again_when_it_does(tmp_path: Path) -> None:
    with shared_store(tmp_path) as server:
        server.kill()
        async with store(server.url) as kept:
            for call in (
                kept.put("a", response("1"), None),
                kept.get("a", "1"),
                kept.chain("a", "1", 1000),
                kept.delete("a", "1"),
            ):
                with pytest.raises(StoreFailed):
                    await call
            server.start()
            await kept.put("a", response("1"), None)
            server.kill()
            with pytest.raises(StoreFailed):
                await kept.get("a", "1")
            server.start()
            assert await kept.get("a", "1") is None


@needs_shared_store
async def test_a_wrong_password_ends_the_start_and_is_not_shown(tmp_path: Path) -> None:
    with shared_store(tmp_path, "--requirepass", "right") as server:
        async with store(server.url.replace("//", "//:right@")) as kept:
            await kept.put("a", response("1"), None)
        for given in ("", ":hidden@"):
            with pytest.raises(StartupError, match="--response-store redis://127") as caught:
                async with store(server.url.replace("//", f"//{given}")):
                    pass
            assert caught.value.flag == "--response-store"
            assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:port/0", "valkey://127.0.0.1:6379/0?health_check_interval=x"])
def test_an_address_that_is_none_names_the_flag(url: str) -> None:
    with pytest.raises(StartupError, match=r"--response-store \w+://127\.0\.0\.1") as caught:
        RedisResponses(url, max_responses=1, max_bytes=1024, seconds=1.0, timeout_seconds=1.0, connections=1)
    assert caught.value.flag == "--response-store"


async def test_a_response_is_written_anew_where_it_still_is(place: str) -> None:
    async with store(place, max_responses=2, max_bytes=1000) as kept:
        await kept.put("a", response("1"), None)
        await kept.put("a", response("2"), "1")
        assert await kept.replace("a", response("1", "another"), None)
        found = await kept.get("a", "1")
        assert found is not None
        assert found.response["output"] == ["another"]
        assert not await kept.replace("b", response("1"), None)
        assert not await kept.replace("a", response("3"), None)
        # It is as old as before: it leaves first.
        await kept.put("a", response("4"), None)
        assert [name for name in "124" if await kept.get("a", name)] == ["2", "4"]
        assert await kept.chain("a", "2", 1000) is None
        before = kept.num_bytes
        assert await kept.replace("a", response("2", "x" * 200), "1")
        # In its input and in itself.
        assert kept.num_bytes == before + 2 * 195
        await kept.delete("a", "2")
        assert not await kept.replace("a", response("2"), None)
