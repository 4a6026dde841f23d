"""Files of callers: their bytes in chunks of the database, within bounds. None is ever whole in memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from penstock.database.transactions import Database, Rows
from penstock.jobs.job_options import JobOptions
from penstock.jobs.job_records import LIVE, FileRecord, LineState, is_id, new_file_id

# Bytes of one chunk, and of the answers that one query reads.
CHUNK_BYTES = 256 << 10
ANSWERS_AT_ONCE = 32
_FIELDS = "id, owner, name, purpose, bytes, created, expires, batch, state"
# Seconds that a caller waits for room before it tries again.
_RETRY_SECONDS = 60.0
_LIVE = ", ".join(f"'{state}'" for state in LIVE)


class FileStore:
    """Files of all callers. A caller sees its own alone.

    All methods raise DatabaseFailed.
    """

    def __init__(self, database: Database, options: JobOptions, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970, the same at all gateways that share the database."""
        self._database, self._options, self._clock = database, options, clock
        share = options.files_share
        self._most = (options.max_files, "--max-files"), (options.max_files_bytes, "--max-files-bytes")
        self._most_of_owner = max(1, int(share * options.max_files)), int(share * options.max_files_bytes)

    async def begin(self, owner: str) -> FileRecord:
        """Begin a file that nobody sees before `finish`. Raises ResourceExhausted FILES_FULL."""
        now = self._clock()
        record = FileRecord(new_file_id(), owner, "", "", 0, now, now + self._options.file_seconds)

        def work(rows: Rows) -> None:
            self.check_room(rows, owner, 1, 0)
            rows.change(
                "INSERT INTO files VALUES (?, ?, '', '', 0, ?, ?, 0, NULL, NULL)",
                *(record.file_id, owner, record.created, record.expires),
            )

        await self._database.run(work)
        return record

    async def append(self, record: FileRecord, place: int, data: bytes) -> None:
        """Add a chunk of at most CHUNK_BYTES at `place`, the number of bytes before it.

        Raises ResourceExhausted: FILE_TOO_LARGE, or FILES_FULL.
        """
        most = self._options.max_file_bytes
        if place + len(data) > most:
            raise ResourceExhausted(
                f"the file has more than {most} bytes (--max-file-bytes)", reason="FILE_TOO_LARGE", field="file"
            )

        def work(rows: Rows) -> None:
            self.check_room(rows, record.owner, 0, len(data))
            rows.change("INSERT INTO chunks VALUES (?, ?, ?)", record.file_id, place, data)
            rows.change("UPDATE files SET bytes = ? WHERE id = ?", place + len(data), record.file_id)

        await self._database.run(work)

    async def finish(self, record: FileRecord, *, name: str, purpose: str, seconds: float | None) -> FileRecord:
        """Show a whole file to its owner. `seconds`: its life, at most and by default --file-seconds."""
        life = self._options.file_seconds if seconds is None else min(seconds, self._options.file_seconds)

        def work(rows: Rows) -> FileRecord:
            rows.change(
                "UPDATE files SET is_whole = 1, name = ?, purpose = ?, expires = ? WHERE id = ?",
                *(name, purpose, record.created + life, record.file_id),
            )
            return file_of(rows.all(f"SELECT {_FIELDS} FROM files WHERE id = ?", record.file_id)[0])

        return await self._database.run(work)

    async def abandon(self, record: FileRecord) -> None:
        """Remove a file that will not be whole."""
        await self._database.run(lambda rows: remove_file(rows, record))

    async def get(self, owner: str, file_id: str) -> FileRecord:
        """Return a caller's file. Raises NotFound."""
        return await self._database.run(lambda rows: self.find(rows, owner, file_id))

    def find(self, rows: Rows, owner: str, file_id: str, field: str = "file_id") -> FileRecord:
        """Return a caller's file, within a transaction. Raises NotFound naming the field."""
        found = rows.all(
            f"SELECT {_FIELDS} FROM files WHERE id = ? AND owner = ? AND is_whole = 1 AND expires >= ?",
            *(file_id if is_id(file_id) else "", owner, self._clock()),
        )
        if not found:
            raise NotFound(
                f"no file {file_id[:64]!r} of this caller: never sent, deleted, or too old",
                reason="FILE_NOT_FOUND",
                field=field,
            )
        return file_of(found[0])

    async def listed(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[FileRecord], bool]:
        """Return files of a caller behind `after`, and true when there are more. Raises InvalidArgument for `after`."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")

        def work(rows: Rows) -> tuple[list[FileRecord], bool]:
            clause, values = "", [owner, self._clock()]
            if purpose is not None:
                clause += " AND purpose = ?"
                values.append(purpose)
            if after is not None:
                known = after if is_id(after) else ""
                start = rows.all("SELECT created, id FROM files WHERE id = ? AND owner = ?", known, owner)
                if not start:
                    raise InvalidArgument("after", "must be the id of one of the caller's files")
                clause += f" AND (created, id) {sign} (?, ?)"
                values += start[0]
            found = rows.all(
                f"SELECT {_FIELDS} FROM files WHERE owner = ? AND is_whole = 1 AND expires >= ?{clause} "
                f"ORDER BY created {order}, id {order} LIMIT ?",
                *(*values, limit + 1),
            )
            return [file_of(row) for row in found[:limit]], len(found) > limit

        return await self._database.run(work)

    async def delete(self, owner: str, file_id: str) -> None:
        """Remove a caller's file. Raises NotFound, and FailedPrecondition FILE_IN_USE while a batch reads it."""

        def work(rows: Rows) -> None:
            record = self.find(rows, owner, file_id)
            users = rows.all(f"SELECT id FROM batches WHERE input_file = ? AND state IN ({_LIVE})", file_id)
            if users:
                raise FailedPrecondition(
                    f"{users[0][0]} reads the file: wait for its end, or cancel it", reason="FILE_IN_USE"
                )
            remove_file(rows, record)

        await self._database.run(work)

    async def read(self, file_id: str, place: int, num_bytes: int) -> bytes:
        """Return bytes of a file from `place` on: fewer at its end, or when it is gone."""

        def work(rows: Rows) -> bytes:
            found = rows.all(
                "SELECT place, data FROM chunks WHERE file = ? AND place > ? AND place < ? ORDER BY place",
                *(file_id, place - CHUNK_BYTES, place + num_bytes),
            )
            return b"".join([bytes(data)[max(place - at, 0) : place + num_bytes - at] for at, data in found])

        return await self._database.run(work)

    async def content(self, record: FileRecord) -> AsyncIterator[bytes]:
        """Yield the bytes of a file, piece by piece. It ends early when the file is removed meanwhile."""
        if record.batch_id is None:
            place = 0
            while place < record.num_bytes and (data := await self.read(record.file_id, place, CHUNK_BYTES)):
                place += len(data)
                yield data
            return
        number = 0
        while answers := await self._answers(record, number):
            number = answers[-1][0]
            yield b"".join([bytes(answer) + b"\n" for _, answer in answers])

    async def _answers(self, record: FileRecord, after: int) -> list[tuple[Any, ...]]:
        return await self._database.run(
            lambda rows: rows.all(
                "SELECT number, answer FROM lines WHERE batch = ? AND state = ? AND number > ? AND answer IS NOT NULL "
                f"ORDER BY number LIMIT {ANSWERS_AT_ONCE}",
                *(record.batch_id, record.state, after),
            )
        )

    def used(self, rows: Rows, owner: str | None = None) -> tuple[int, int]:
        """Return the number of files and their bytes, of all callers or of one; answers of live batches count."""
        where, values = ("", ()) if owner is None else (" WHERE owner = ?", (owner,))
        live = f" state IN ({_LIVE})"
        ((count, size),) = rows.all(f"SELECT count(*), coalesce(sum(bytes), 0) FROM files{where}", *values)
        ((more,),) = rows.all(
            f"SELECT coalesce(sum(answer_bytes), 0) FROM batches{f'{where} AND' if where else ' WHERE'}{live}", *values
        )
        return int(count), int(size) + int(more)

    def most_of(self, owner: str | None) -> int:
        """Return the most files of one caller; None: of all."""
        return self._most[0][0] if owner is None else self._most_of_owner[0]

    def check_room(self, rows: Rows, owner: str, files: int, num_bytes: int) -> None:
        """Raise ResourceExhausted FILES_FULL unless a caller may have this much more."""
        for one in (None, owner):
            used = self.used(rows, one)
            for number, more in enumerate((files, num_bytes)):
                most, flag = self._most[number]
                if one is not None:
                    most = self._most_of_owner[number]
                if used[number] + more > most:
                    by = flag if one is None else f"--files-share of {flag}"
                    raise ResourceExhausted(
                        f"there is no room for the file: delete others ({by})",
                        reason="FILES_FULL",
                        retry_after_seconds=_RETRY_SECONDS,
                    )

    def is_over(self, rows: Rows, owner: str) -> bool:
        """True when the files of a caller, or of all, have more bytes than they may."""
        return self.used(rows, owner)[1] > self._most_of_owner[1] or self.used(rows)[1] > self._options.max_files_bytes

    async def sweep(self, begun_before: float | None = None) -> None:
        """Remove files that are too old, unless a batch reads them, and those that never became whole.

        `begun_before`: nobody sends the rest of a file that was begun before this time; by default long ago.
        """
        now = self._clock()
        begun = now - 2 * self._options.upload_seconds if begun_before is None else begun_before

        def work(rows: Rows) -> None:
            found = rows.all(
                f"SELECT {_FIELDS} FROM files WHERE (is_whole = 0 AND created < ?) OR (expires < ? AND NOT EXISTS "
                f"(SELECT 1 FROM batches WHERE input_file = files.id AND batches.state IN ({_LIVE}))) LIMIT 64",
                *(begun, now),
            )
            for row in found:
                remove_file(rows, file_of(row))

        await self._database.run(work)


def file_of(row: tuple[Any, ...]) -> FileRecord:
    """Return a row of `files` as plain data."""
    file_id, owner, name, purpose, num_bytes, created, expires, batch, state = row
    kind = None if state is None else LineState(state)
    return FileRecord(file_id, owner, name, purpose, num_bytes, created, expires, batch, kind)


def add_answers_file(rows: Rows, record: FileRecord) -> None:
    """Show a file of a batch's answers."""
    rows.change(
        "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?, ?)",
        *(record.file_id, record.owner, record.name, record.purpose, record.num_bytes, record.created, record.expires),
        *(record.batch_id, record.state),
    )


def remove_file(rows: Rows, record: FileRecord) -> None:
    """Remove a file and its bytes."""
    rows.change("DELETE FROM files WHERE id = ?", record.file_id)
    if record.batch_id is None:
        rows.change("DELETE FROM chunks WHERE file = ?", record.file_id)
    else:
        rows.change("DELETE FROM lines WHERE batch = ? AND state = ?", record.batch_id, record.state)
