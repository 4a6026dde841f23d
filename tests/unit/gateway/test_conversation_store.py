"""Conversations that the gateway keeps: whose they are, how many, how large, and changed by several at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from factories.full_disk import full_disk
from factories.servers.shared_store import needs_shared_store, shared_store
from penstock.common.errors import ResourceExhausted
from penstock.gateway.config import GatewayConfig
from penstock.gateway.conversation_store import ConversationStore, KeptConversation
from penstock.gateway.http_errors import HttpError
from penstock.gateway.kept_stores import open_stores
from penstock.gateway.redis_conversations import RedisConversations
from penstock.gateway.response_store import StoreFailed
from penstock.gateway.sqlite_conversations import SqliteConversations


@asynccontextmanager
async def store(place: str = "memory", **bounds: Any) -> AsyncIterator[ConversationStore]:
    made = open_stores(GatewayConfig(response_store=place, **bounds))
    assert made is not None
    try:
        await made.open()
        yield made.conversations
    finally:
        await made.responses.close()


@pytest.fixture(params=["memory", pytest.param("server", marks=needs_shared_store)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Place of an empty store, of each kind."""
    if request.param == "memory":
        yield request.param
    else:
        with shared_store(tmp_path) as server:
            yield server.url


def conversation(name: str, text: str = "") -> KeptConversation:
    return KeptConversation(name, 1, {}, [{"id": "msg_1", "text": text}] if text else [])


async def test_a_caller_sees_and_changes_its_own_only(place: str) -> None:
    async with store(place) as kept:
        await kept.add("a", conversation("1", "half \ud83d"))
        found = await kept.get("a", "1")
        assert found is not None
        assert found.items == [{"id": "msg_1", "text": "half ?"}]
        assert await kept.get("b", "1") is None
        assert await kept.change("b", "1", lambda _: pytest.fail("not its own")) is None
        assert not await kept.delete("b", "1")
        assert (await kept.delete("a", "1"), await kept.delete("a", "1")) == (True, False)
        assert (kept.num_conversations, kept.num_bytes) == (0, 0)


async def test_changes_at_once_are_all_there(place: str) -> None:
    async with store(place) as kept:
        await kept.add("a", conversation("1"))

        async def add(number: int) -> None:
            def change(found: KeptConversation) -> None:
                found.items.append({"id": str(number)})

            assert await kept.change("a", "1", change) is not None

        await asyncio.gather(*(add(number) for number in range(8)))
        found = await kept.get("a", "1")
        assert found is not None
        assert sorted(item["id"] for item in found.items) == sorted(map(str, range(8)))
        assert kept.num_bytes == len(found.encoded())


async def test_what_a_change_raises_leaves_the_conversation(place: str) -> None:
    async with store(place, max_conversation_bytes=2048) as kept:
        await kept.add("a", conversation("1"))

        def fail(found: KeptConversation) -> None:
            found.metadata["a"] = "b"
            raise LookupError

        with pytest.raises(LookupError):
            await kept.change("a", "1", fail)
        with pytest.raises(HttpError, match="--max-conversation-bytes"):
            await kept.change("a", "1", lambda found: found.items.append({"text": "x" * 2048}))
        assert await kept.get("a", "1") == conversation("1")


async def test_those_that_nobody_changed_leave_first_and_a_share_is_refused(place: str) -> None:
    async with store(place, max_conversations=4, conversations_share=0.5) as kept:
        for caller in "ab":
            for number in range(2):
                await kept.add(caller, conversation(f"{caller}{number}"))
        with pytest.raises(ResourceExhausted, match="--conversations-share"):
            await kept.add("a", conversation("a2"))
        await kept.change("a", "a0", lambda found: found.metadata.update(x="y"))
        await kept.add("c", conversation("c0"))
        there = [name for name in ("a0", "a1", "b0", "b1", "c0") if await kept.get(name[0], name) is not None]
        assert there == ["a0", "b0", "b1", "c0"]
        # What left gave its place back.
        await kept.add("a", conversation("a3"))
        assert kept.num_conversations == 4
    async with store(place, max_conversations=4, conversations_share=0.5) as kept:
        # Callers without a token cannot be told apart: no share is theirs.
        for number in range(4):
            await kept.add("", conversation(f"n{number}"))
        assert kept.num_conversations == 4


async def test_bytes_of_all_and_of_one_caller_are_bounded(place: str) -> None:
    async with store(place, max_conversation_bytes=4000, conversations_share=0.5) as kept:
        await kept.add("a", conversation("1", "x" * 1500))
        with pytest.raises(ResourceExhausted):
            await kept.add("a", conversation("2", "x" * 1000))
        with pytest.raises(ResourceExhausted):
            await kept.change("a", "1", lambda found: found.items.append({"text": "x" * 1000}))
        await kept.change("a", "1", lambda found: found.items.clear())
        await kept.add("a", conversation("2", "x" * 1000))
        for caller in "bcd":
            await kept.add(caller, conversation(caller, "x" * 1500))
            assert kept.num_bytes <= 4000
        assert await kept.get("d", "d") is not None


async def end_of_life(kept: ConversationStore) -> float:
    """Return when the conversation 1 of caller a is over, by the store's clock."""
    if isinstance(kept, RedisConversations):
        return float(await kept._place.redis.zscore("{penstock:responses}:conversations:ages", "a:1"))
    assert isinstance(kept, SqliteConversations)
    rows = kept._rows.db
    (ends,) = await kept._place.run(lambda: rows.execute("SELECT expires FROM conversations").fetchone())
    return float(ends)


async def test_a_life_begins_again_with_a_change_and_ends(place: str) -> None:
    async with store(place, conversation_seconds=1.0) as kept:
        await kept.add("a", conversation("1"))
        before = await end_of_life(kept)
        await kept.change("a", "1", lambda found: found.metadata.update(x="y"))
        assert await end_of_life(kept) > before
        while await kept.get("a", "1") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await kept.add("a", conversation("2"))
        assert kept.num_conversations == 1


async def test_a_file_outlives_the_process(tmp_path: Path) -> None:
    place = str(tmp_path / "kept")
    async with store(place) as kept:
        await kept.add("a", conversation("1", "hello"))
    async with store(place) as kept:
        assert kept.num_conversations == 1
        assert await kept.get("a", "1") == conversation("1", "hello")


async def counted(kept: SqliteConversations) -> tuple[int, int]:
    """Rows and bytes that are in the file."""
    query = "SELECT count(*), coalesce(sum(size), 0) FROM conversations"
    rows, size = await kept._place.run(lambda: kept._rows.db.execute(query).fetchone())
    return rows, size


async def test_a_full_disk_keeps_what_there_was_and_counts_it(tmp_path: Path) -> None:
    place, log = tmp_path / "kept", tmp_path / "kept-wal"

    def grow(found: KeptConversation) -> None:
        found.items.append({"id": f"msg_{len(found.items) + 1}", "text": "y" * 5000})

    async with store(str(place), max_conversations=20) as kept:
        assert isinstance(kept, SqliteConversations)
        for number in range(5):
            await kept.add("a", conversation(str(number), "x" * 5000))
        with full_disk(place, log):
            for number in range(5, 25):
                with pytest.raises(StoreFailed):
                    await kept.add("a", conversation(str(number), "x" * 5000))
                with pytest.raises(StoreFailed):
                    await kept.change("a", "1", grow)
                with pytest.raises(StoreFailed):
                    await kept.delete("a", "0")
                assert (kept.num_conversations, kept.num_bytes) == await counted(kept)
            # What there was is read.
            assert await kept.get("a", "0") == conversation("0", "x" * 5000)
        await kept.add("a", conversation("25", "x" * 5000))
        await kept.change("a", "1", grow)
        assert await kept.delete("a", "0")
        assert (kept.num_conversations, kept.num_bytes) == await counted(kept)
        found = {number: await kept.get("a", str(number)) for number in range(26)}
        assert {number: len(one.items) for number, one in found.items() if one} == {1: 2, 2: 1, 3: 1, 4: 1, 25: 1}
    # A new process counts the same.
    async with store(str(place)) as kept:
        assert kept.num_conversations == 5
