"""Files and batches in their store: one answer a line, whoever takes it when, and nobody sees another's."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from factories.full_disk import full_disk
from factories.servers.postgres import Postgres, needs_postgres, running_postgres
from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, StartupError
from penstock.database.postgres_database import PostgresDatabase
from penstock.database.transactions import Database, DatabaseFailed
from penstock.jobs.batch_store import BatchStore
from penstock.jobs.file_store import CHUNK_BYTES, FileStore
from penstock.jobs.job_database import open_job_database
from penstock.jobs.job_options import JobOptions
from penstock.jobs.job_records import BatchRecord, BatchState, FileRecord, NewLine

URL = "/v1/completions"


@dataclass
class Store:
    """An open store with a clock of its own."""

    database: Database
    options: JobOptions = field(default_factory=JobOptions)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.files = FileStore(self.database, self.options, lambda: self.now)
        self.batches = BatchStore(self.database, self.files, self.options, lambda: self.now)

    async def file(self, owner: str = "a", data: bytes = b"x", purpose: str = "batch") -> FileRecord:
        record = await self.files.begin(owner)
        for place in range(0, len(data), CHUNK_BYTES):
            await self.files.append(record, place, data[place : place + CHUNK_BYTES])
        return await self.files.finish(record, name="n", purpose=purpose, seconds=None)

    async def batch(self, lines: int = 2, owner: str = "a", seconds: float = 3600.0) -> BatchRecord:
        """Make a batch that is validated."""
        file = await self.file(owner)
        made = await self.batches.create(
            owner, input_file=file.file_id, endpoint=URL, window="60s", seconds=seconds, metadata={"k": "v"}
        )
        taken = await self.batches.take_new("one")
        assert taken is not None
        assert taken.batch_id == made.batch_id
        new = [NewLine(number, f"id-{number}", 0, 1) for number in range(1, lines + 1)]
        assert await self.batches.add_lines(made.batch_id, new) == []
        await self.batches.start(made.batch_id, lines)
        return await self.batches.get(owner, made.batch_id)

    async def content(self, owner: str, file_id: str | None) -> bytes:
        assert file_id is not None
        record = await self.files.get(owner, file_id)
        data = b"".join([piece async for piece in self.files.content(record)])
        assert len(data) == record.num_bytes
        return data


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with running_postgres() as running:
        yield running


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=needs_postgres)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    database: Database
    if request.param == "sqlite":
        database = open_job_database("temporary")
    else:
        database = open_job_database(request.getfixturevalue("server").database())
    await database.open()
    yield Store(database)
    await database.close()


def store_with(store: Store, **options: Any) -> Store:
    return Store(store.database, JobOptions(**options), store.now)


async def test_a_file_is_read_back_from_any_place_and_seen_by_its_owner_alone(store: Store) -> None:
    data = bytes(range(256)) * 3000
    record = await store.file(data=data)
    assert await store.content("a", record.file_id) == data
    for place in (0, 5, CHUNK_BYTES - 1, CHUNK_BYTES, len(data) - 3):
        assert await store.files.read(record.file_id, place, 300) == data[place : place + 300]
    with pytest.raises(NotFound):
        await store.files.get("b", record.file_id)
    with pytest.raises(NotFound):
        await store.files.delete("b", record.file_id)
    assert (await store.files.listed("b", purpose=None, after=None, limit=9, newest_first=True))[0] == []


async def test_nobody_sees_a_file_before_it_is_whole_and_a_new_process_forgets_it(store: Store) -> None:
    record = await store.files.begin("a")
    await store.files.append(record, 0, b"x")
    with pytest.raises(NotFound):
        await store.files.get("a", record.file_id)
    store.now += 1
    await store.files.sweep(store.now)
    assert (await store.batches.counts()).file_bytes == 0


async def test_files_have_bounds_of_size_of_a_caller_and_of_all(store: Store) -> None:
    bounded = store_with(store, max_file_bytes=2000, max_files_bytes=4000, max_files=4, files_share=0.5)
    with pytest.raises(ResourceExhausted) as caught:
        await bounded.file(data=b"x" * 2001)
    assert caught.value.reason == "FILE_TOO_LARGE"
    await store.files.sweep(store.now)
    store.now = bounded.now = bounded.now + 1
    await bounded.files.sweep(bounded.now)
    await bounded.file("a", b"x" * 1500)
    with pytest.raises(ResourceExhausted, match="--files-share of --max-files-bytes"):
        await bounded.file("a", b"x" * 600)
    bounded.now += 1
    await bounded.files.sweep(bounded.now)
    await bounded.file("b", b"x" * 2000)
    with pytest.raises(ResourceExhausted, match=r"\(--max-files-bytes\)"):
        await bounded.file("c", b"x" * 600)


async def test_the_last_answer_ends_a_batch_and_shows_its_files(store: Store) -> None:
    batch = await store.batch(lines=3)
    lines = await store.batches.take("one", 9, {})
    assert [line.custom_id for line in lines] == ["id-1", "id-2", "id-3"]
    assert await store.batches.take("two", 9, {}) == []
    for line in lines:
        assert await store.batches.answer(line, line.custom_id.encode(), has_failed=line.number == 2)
    ended = await store.batches.get("a", batch.batch_id)
    assert (ended.state, ended.completed, ended.failed) == (BatchState.COMPLETED, 2, 1)
    assert await store.content("a", ended.output_file) == b"id-1\nid-3\n"
    assert await store.content("a", ended.error_file) == b"id-2\n"


async def test_a_line_has_one_answer_whoever_took_it(store: Store) -> None:
    batch = await store.batch(lines=2)
    first = await store.batches.take("one", 2, {})
    store.now += store.options.job_lease_seconds + 1
    again = await store.batches.take("two", 2, {})
    assert [line.number for line in again] == [1, 2]
    assert await store.batches.answer(again[0], b"two", has_failed=False)
    assert not await store.batches.answer(first[0], b"one", has_failed=False)
    await store.batches.answer(first[1], b"one", has_failed=False)
    assert not await store.batches.answer(again[1], b"two", has_failed=True)
    ended = await store.batches.get("a", batch.batch_id)
    assert (ended.completed, ended.failed) == (2, 0)
    assert await store.content("a", ended.output_file) == b"two\none\n"


async def test_a_lease_that_is_renewed_is_not_taken_over(store: Store) -> None:
    await store.batch(lines=1)
    lines = await store.batches.take("one", 1, {})
    for _ in range(3):
        store.now += 0.9 * store.options.job_lease_seconds
        await store.batches.renew(lines, "one")
        assert await store.batches.take("two", 1, {}) == []
    await store.batches.release(lines[0], "one", 0.0)
    assert len(await store.batches.take("two", 1, {})) == 1


async def test_callers_take_turns(store: Store) -> None:
    await store.batch(lines=8, owner="a")
    await store.batch(lines=8, owner="b")
    owners = [line.owner for line in await store.batches.take("one", 4, {})]
    assert sorted(owners) == ["a", "a", "b", "b"]
    assert [line.owner for line in await store.batches.take("one", 2, {"a": 9, "b": 0})] == ["b", "b"]


async def test_a_line_that_is_given_back_rests_and_comes_after_those_never_tried(store: Store) -> None:
    await store.batch(lines=3)
    first, second = await store.batches.take("one", 2, {})
    for line in (first, second):
        await store.batches.release(line, "one", 5.0)
    assert [line.number for line in await store.batches.take("one", 2, {})] == [3]
    store.now += 5.0
    assert [line.number for line in await store.batches.take("one", 1, {})] == [1]


async def test_a_bound_on_the_lines_of_one_batch_leaves_others_their_turns(store: Store) -> None:
    slow, fast = await store.batch(lines=8), await store.batch(lines=8)
    taken = await store.batches.take("one", 6, {}, {slow.batch_id: 1})
    assert [line.batch_id for line in taken] == [slow.batch_id] + [fast.batch_id] * 5
    assert await store.batches.take("one", 6, {}, {slow.batch_id: 0, fast.batch_id: 0}) == []


async def test_a_cancelled_batch_keeps_its_answers_and_gives_the_rest_errors(store: Store) -> None:
    batch = await store.batch(lines=3)
    lines = await store.batches.take("one", 2, {})
    await store.batches.answer(lines[0], b"done", has_failed=False)
    assert (await store.batches.cancel("a", batch.batch_id)).state is BatchState.CANCELLING
    assert not await store.batches.answer(lines[1], b"late", has_failed=False)
    assert await store.batches.end_overdue() == [batch.batch_id]
    ended = await store.batches.get("a", batch.batch_id)
    assert (ended.state, ended.completed, ended.failed) == (BatchState.CANCELLED, 1, 2)
    assert await store.content("a", ended.output_file) == b"done\n"
    errors = [json.loads(one) for one in (await store.content("a", ended.error_file)).splitlines()]
    assert [(one["custom_id"], one["error"]["code"]) for one in errors] == [
        ("id-2", "batch_cancelled"),
        ("id-3", "batch_cancelled"),
    ]
    with pytest.raises(FailedPrecondition):
        await store.batches.cancel("a", batch.batch_id)


async def test_a_batch_expires_at_the_end_of_its_window(store: Store) -> None:
    batch = await store.batch(lines=2, seconds=60.0)
    assert await store.batches.end_overdue() == []
    store.now += 61
    assert await store.batches.take("one", 2, {}) == []
    assert await store.batches.end_overdue() == [batch.batch_id]
    ended = await store.batches.get("a", batch.batch_id)
    assert (ended.state, ended.output_file) == (BatchState.EXPIRED, None)
    assert b"batch_expired" in await store.content("a", ended.error_file)


async def test_a_batch_ends_when_its_answers_have_no_room(store: Store) -> None:
    batch = await store.batch(lines=2)
    (line,) = await store.batches.take("one", 1, {})
    await store.batches.answer(line, b"x" * 3000, has_failed=False)
    bounded = store_with(store, max_files_bytes=4000)
    assert await bounded.batches.end_overdue() == [batch.batch_id]
    ended = await store.batches.get("a", batch.batch_id)
    assert (ended.state, ended.problems[0].code, ended.completed) == (BatchState.FAILED, "files_full", 1)


async def test_a_custom_id_is_there_once_and_a_file_in_use_stays(store: Store) -> None:
    batch = await store.batch(lines=1)
    with pytest.raises(FailedPrecondition) as caught:
        await store.files.delete("a", batch.input_file)
    assert caught.value.reason == "FILE_IN_USE"
    file = await store.file()
    made = await store.batches.create("a", input_file=file.file_id, endpoint=URL, window="1s", seconds=1.0, metadata={})
    assert await store.batches.take_new("one") is not None
    twice = [NewLine(1, "same", 0, 1), NewLine(2, "same", 1, 1)]
    assert await store.batches.add_lines(made.batch_id, twice) == twice[1:]


async def test_batches_in_progress_have_a_bound(store: Store) -> None:
    bounded = store_with(store, max_batches=2, files_share=0.5)
    await bounded.batch(owner="a")
    with pytest.raises(ResourceExhausted, match="--files-share of --max-batches"):
        await bounded.batch(owner="a")
    await bounded.batch(owner="b")
    with pytest.raises(ResourceExhausted, match=r"\(--max-batches\)"):
        await bounded.batch(owner="c")


async def test_a_batch_needs_room_for_the_files_of_its_answers(store: Store) -> None:
    bounded = store_with(store, max_files=4, files_share=0.5)
    file = await bounded.file()
    with pytest.raises(ResourceExhausted, match="--files-share of --max-files") as caught:
        await bounded.batches.create("a", input_file=file.file_id, endpoint=URL, window="1s", seconds=1.0, metadata={})
    assert caught.value.reason == "FILES_FULL"


async def test_batches_without_files_are_forgotten_when_there_are_many(store: Store) -> None:
    bounded = store_with(store, max_files=8, files_share=0.5)
    file = await bounded.file()
    made = []
    for _ in range(9):
        bounded.now += 1
        asked = {"input_file": file.file_id, "endpoint": URL, "window": "1s", "seconds": 1.0, "metadata": {}}
        made.append((await bounded.batches.create("a", **asked)).batch_id)
        await bounded.batches.cancel("a", made[-1])
        await bounded.batches.end_overdue()
    found, _ = await bounded.batches.listed("a", after=None, limit=99)
    assert 0 < len(found) <= 4
    assert found[0].batch_id == made[-1]


async def test_a_deleted_file_of_answers_takes_its_lines_along(store: Store) -> None:
    batch = await store.batch(lines=2)
    for line in await store.batches.take("one", 2, {}):
        await store.batches.answer(line, b"x", has_failed=line.number == 2)
    ended = await store.batches.get("a", batch.batch_id)
    await store.files.delete("a", ended.output_file or "")
    ((left,),) = await store.database.run(lambda rows: rows.all("SELECT count(*) FROM lines"))
    assert left == 1
    assert await store.content("a", ended.error_file) == b"x\n"


@pytest.mark.parametrize("text", ["", "file-\0", "\ud800", "x" * 70000])
async def test_a_text_that_is_no_id_is_not_found(store: Store, text: str) -> None:
    with pytest.raises(NotFound):
        await store.files.get("a", text)
    with pytest.raises(NotFound):
        await store.batches.get("a", text)
    with pytest.raises(InvalidArgument):
        await store.files.listed("a", purpose=None, after=text, limit=1, newest_first=True)
    with pytest.raises(InvalidArgument):
        await store.batches.listed("a", after=text, limit=1)


async def test_what_is_too_old_is_removed(store: Store) -> None:
    batch = await store.batch(lines=1)
    (line,) = await store.batches.take("one", 1, {})
    await store.batches.answer(line, b"x", has_failed=False)
    store.now += store.options.file_seconds + 1
    await store.files.sweep()
    await store.batches.sweep()
    with pytest.raises(NotFound):
        await store.batches.get("a", batch.batch_id)
    assert (await store.batches.counts()).files == 0


async def test_lists_come_in_pages(store: Store) -> None:
    made = []
    for _ in range(3):
        store.now += 1
        made.append((await store.file()).file_id)
    found, has_more = await store.files.listed("a", purpose="batch", after=None, limit=2, newest_first=True)
    assert ([one.file_id for one in found], has_more) == ([made[2], made[1]], True)
    found, has_more = await store.files.listed("a", purpose=None, after=made[1], limit=2, newest_first=True)
    assert ([one.file_id for one in found], has_more) == ([made[0]], False)
    found, _ = await store.files.listed("a", purpose="batch_output", after=None, limit=2, newest_first=False)
    assert found == []


async def test_a_folder_keeps_everything_and_belongs_to_one_process(tmp_path: Path) -> None:
    place = str(tmp_path / "jobs")
    first = open_job_database(place)
    await first.open()
    batch = await Store(first).batch(lines=2)
    (line,) = await Store(first).batches.take("one", 1, {})
    await Store(first).batches.answer(line, b"kept", has_failed=False)
    second = open_job_database(place)
    with pytest.raises(StartupError) as caught:
        await second.open()
    assert caught.value.flag == "--job-store"
    await first.close()
    third = open_job_database(place)
    await third.open()
    again = Store(third)
    await again.batches.release_all(None)
    (rest,) = await again.batches.take("two", 9, {})
    await again.batches.answer(rest, b"new", has_failed=False)
    ended = await again.batches.get("a", batch.batch_id)
    assert await again.content("a", ended.output_file) == b"kept\nnew\n"
    assert ended.metadata == {"k": "v"}
    await third.close()


@needs_postgres
async def test_a_database_serves_several_gateways_and_a_broken_connection_is_made_anew(server: Postgres) -> None:
    url = server.database()
    one, two = open_job_database(url), open_job_database(url)
    await asyncio.gather(one.open(), two.open())
    here, there = Store(one), Store(two)
    batch = await here.batch(lines=40)
    taken = await asyncio.gather(*(side.batches.take(name, 10, {}) for side, name in ((here, "1"), (there, "2")) * 2))
    numbers = [line.number for lines in taken for line in lines]
    assert sorted(numbers) == list(range(1, 41))
    server.disconnect_all()
    for side in (here, there):
        with pytest.raises(DatabaseFailed):
            await side.batches.counts()
    # Both answer every line: the first answer of each counts.
    lines = [line for part in taken for line in part]
    kept = await asyncio.gather(
        *(side.batches.answer(line, b"x", has_failed=False) for line in lines for side in (here, there))
    )
    assert kept.count(True) == 40
    ended = await there.batches.get("a", batch.batch_id)
    assert (ended.state, ended.completed) == (BatchState.COMPLETED, 40)
    await one.close()
    await two.close()


@needs_postgres
async def test_a_server_that_stands_still_is_given_up_and_asked_again(server: Postgres) -> None:
    database = open_job_database(server.database())
    assert isinstance(database, PostgresDatabase)
    await database.open()
    store, usual = Store(database), database._seconds
    await store.batch(lines=1)
    with server.standing_still():
        database._seconds = 0.1
        with pytest.raises(DatabaseFailed):
            await store.batches.counts()
    database._seconds = usual
    (line,) = await store.batches.take("one", 9, {})
    assert line.number == 1
    with server.standing_still():
        # The end of a gateway waits for nobody.
        await database.close()


@needs_postgres
async def test_a_caller_does_not_wait_for_all_that_the_server_keeps_waiting() -> None:
    database = open_job_database("postgresql://me@127.0.0.1:1/x", 0.01)
    assert isinstance(database, PostgresDatabase)
    async with database._turn:
        with pytest.raises(DatabaseFailed):
            await database.run(lambda rows: rows.all("SELECT 1"))


@needs_postgres
async def test_a_server_that_is_being_connected_to_does_not_hold_up_the_end() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        database = open_job_database(f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/x", 3600.0)
        opening = asyncio.create_task(database.open())
        connection, _ = await loop.sock_accept(silent)
        with connection:
            await database.close()
            assert not opening.done()
    # Both are closed now, and so it ends.
    with pytest.raises(StartupError):
        await opening


@needs_postgres
async def test_an_address_without_a_server_is_told_without_its_password() -> None:
    with pytest.raises(StartupError) as caught:
        await open_job_database("postgresql://me:secret@127.0.0.1:1/x").open()
    assert caught.value.flag == "--job-store"
    assert "secret" not in str(caught.value)


async def test_a_line_has_the_key_of_its_batch_and_the_store_forgets_it_at_the_end(store: Store) -> None:
    file = await store.file()
    asked: dict[str, Any] = {
        "input_file": file.file_id,
        "endpoint": URL,
        "window": "1h",
        "seconds": 60.0,
        "metadata": {},
    }
    keyed = await store.batches.create("a", **asked, key_digest="12ab")
    await store.batches.create("a", **asked)
    for _ in range(2):
        taken = await store.batches.take_new("one")
        assert taken is not None
        await store.batches.add_lines(taken.batch_id, [NewLine(1, "x", 0, 1)])
        await store.batches.start(taken.batch_id, 1)
    lines = await store.batches.take("one", 9, {})
    assert {line.batch_id == keyed.batch_id: line.key_digest for line in lines} == {True: "12ab", False: ""}
    for line in lines:
        await store.batches.answer(line, b"x", has_failed=False)
    assert await store.database.run(lambda rows: rows.all("SELECT * FROM batch_keys")) == []


async def test_a_store_of_an_older_release_is_taken(tmp_path: Path) -> None:
    older = open_job_database(str(tmp_path))
    await older.open()
    await older.run(lambda rows: rows.change("DROP TABLE batch_keys"))
    made = await Store(older).batch(lines=1)
    await older.close()
    newer = open_job_database(str(tmp_path))
    await newer.open()
    (line,) = await Store(newer).batches.take("one", 9, {})
    assert (line.batch_id, line.key_digest) == (made.batch_id, "")
    await newer.close()


async def test_a_full_disk_keeps_what_there_was_and_each_line_has_one_answer(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    database = open_job_database(str(folder))
    await database.open()
    try:
        store = Store(database)
        kept, batch = await store.file(data=b"y" * 3000), await store.batch(lines=2)
        line, other = await store.batches.take("one", 2, {})
        before = await store.batches.counts()
        answer = b'{"a": "' + b"z" * 8000 + b'"}'
        with full_disk(folder / "jobs.sqlite", folder / "jobs.sqlite-wal"):
            for _ in range(10):
                with pytest.raises(DatabaseFailed):
                    await store.file(data=b"x" * 8000)
                with pytest.raises(DatabaseFailed):
                    await store.batches.answer(line, answer, has_failed=False)
                with pytest.raises(DatabaseFailed):
                    await store.files.delete("a", kept.file_id)
            assert await store.content("a", kept.file_id) == b"y" * 3000
            assert (await store.batches.get("a", batch.batch_id)).completed == 0
        # Bytes of a file that never became whole are none of a file's that is seen.
        await store.files.sweep(store.now + 1)
        after = await store.batches.counts()
        assert after == before
        for one in (line, other):
            assert await store.batches.answer(one, answer, has_failed=False)
        assert not await store.batches.answer(line, answer, has_failed=False)
        assert (await store.batches.get("a", batch.batch_id)).completed == 2
        await store.files.delete("a", kept.file_id)
    finally:
        await database.close()
