"""Batches and their lines. Each change is a transaction, so every line has one answer, whatever is killed when."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from penstock.database.transactions import Database, Rows
from penstock.jobs.file_store import ANSWERS_AT_ONCE, FileStore, add_answers_file
from penstock.jobs.job_options import JobOptions
from penstock.jobs.job_records import (
    LIVE,
    BatchRecord,
    BatchState,
    FileRecord,
    JobCounts,
    KeptAnswer,
    LineProblem,
    LineState,
    NewLine,
    TakenLine,
    is_id,
    new_batch_id,
    new_file_id,
)
from penstock.jobs.line_answer import CANCELLED, EXPIRED, FULL, unanswered_line

_FIELDS = (
    "id, owner, input_file, endpoint, time_window, state, created, expires, began, cancelling, ended, "
    "total, completed, failed, output_file, error_file, metadata, problems"
)
# The columns' order in BatchRecord.
_NAMES = [field.name for field in fields(BatchRecord)]
_LIVE = ", ".join(f"'{state}'" for state in LIVE)
_RETRY_SECONDS = 60.0
# Lines that get their error in one statement, and batches that one sweep removes.
_LINES_AT_ONCE, _REMOVED_AT_ONCE = 1000, 8


class BatchStore:
    """Batches of all callers. A caller sees its own alone.

    All methods raise DatabaseFailed.
    """

    def __init__(
        self, database: Database, files: FileStore, options: JobOptions, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` as for FileStore."""
        self._database, self._files, self._options, self._clock = database, files, options, clock

    async def create(
        self,
        owner: str,
        *,
        input_file: str,
        endpoint: str,
        window: str,
        seconds: float,
        metadata: Mapping[str, str],
        key_digest: str = "",
    ) -> BatchRecord:
        """Make a batch of a file. `key_digest`: as TakenLine's.

        Raises NotFound, InvalidArgument, and ResourceExhausted: BATCHES_FULL, or FILES_FULL without room for its files.
        """
        now, options = self._clock(), self._options
        batch_id = new_batch_id()

        def work(rows: Rows) -> BatchRecord:
            record = self._files.find(rows, owner, input_file, "input_file_id")
            if record.purpose != "batch":
                raise InvalidArgument("input_file_id", "must be a file of the purpose batch")
            most = options.max_batches
            for clause, values, bound, flag in (
                ("", (), most, "--max-batches"),
                (" AND owner = ?", (owner,), max(1, int(options.files_share * most)), "--files-share of --max-batches"),
            ):
                ((live,),) = rows.all(f"SELECT count(*) FROM batches WHERE state IN ({_LIVE}){clause}", *values)
                if live >= bound:
                    raise ResourceExhausted(
                        f"{live} batches are in progress ({flag})",
                        reason="BATCHES_FULL",
                        retry_after_seconds=_RETRY_SECONDS,
                    )
            # Of its answers and of its errors.
            self._files.check_room(rows, owner, 2, 0)
            self._forget_old(rows, owner)
            rows.change(
                f"INSERT INTO batches ({_FIELDS}, answer_bytes, holder, held_until) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, ?, '[]', 0, NULL, 0)",
                *(batch_id, owner, input_file, endpoint, window, BatchState.VALIDATING, now, now + seconds),
                json.dumps(dict(metadata)),
            )
            if key_digest:
                rows.change("INSERT INTO batch_keys VALUES (?, ?)", batch_id, key_digest)
            return _find(rows, batch_id)

        return await self._database.run(work)

    def _forget_old(self, rows: Rows, owner: str) -> None:
        """Remove the oldest batches that ended and have no files any more, where there are as many as files may be."""
        for where, values, one in (("owner = ?", (owner,), owner), ("ended IS NOT NULL", (), None)):
            ((count,),) = rows.all(f"SELECT count(*) FROM batches WHERE {where}", *values)
            if count >= self._files.most_of(one):
                rows.change(
                    f"DELETE FROM batches WHERE id IN (SELECT id FROM batches WHERE {where} AND ended IS NOT NULL AND "
                    "NOT EXISTS (SELECT 1 FROM files WHERE batch = batches.id) ORDER BY created LIMIT ?)",
                    *(*values, _REMOVED_AT_ONCE),
                )

    async def get(self, owner: str, batch_id: str) -> BatchRecord:
        """Return a caller's batch. Raises NotFound."""
        return await self._database.run(lambda rows: _find(rows, batch_id, owner))

    async def listed(self, owner: str, *, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """Return a caller's batches behind `after`, the newest first, and true when there are more.

        Raises InvalidArgument for `after`.
        """

        def work(rows: Rows) -> tuple[list[BatchRecord], bool]:
            clause, values = "", [owner]
            if after is not None:
                known = after if is_id(after) else ""
                start = rows.all("SELECT created, id FROM batches WHERE id = ? AND owner = ?", known, owner)
                if not start:
                    raise InvalidArgument("after", "must be the id of one of the caller's batches")
                clause = " AND (created, id) < (?, ?)"
                values += start[0]
            found = rows.all(
                f"SELECT {_FIELDS} FROM batches WHERE owner = ?{clause} ORDER BY created DESC, id DESC LIMIT ?",
                *(*values, limit + 1),
            )
            return [_batch(row) for row in found[:limit]], len(found) > limit

        return await self._database.run(work)

    async def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        """Begin the end of a live batch. Raises NotFound, and FailedPrecondition BATCH_ENDED."""

        def work(rows: Rows) -> BatchRecord:
            record = _find(rows, batch_id, owner)
            if record.state not in LIVE:
                raise FailedPrecondition(f"the batch has ended: {record.state}", reason="BATCH_ENDED")
            rows.change(
                "UPDATE batches SET state = ?, cancelling = ? WHERE id = ? AND state <> ?",
                *(BatchState.CANCELLING, self._clock(), batch_id, BatchState.CANCELLING),
            )
            return _find(rows, batch_id)

        return await self._database.run(work)

    async def answers(self, batch_id: str, after: int) -> list[KeptAnswer]:
        """Return the next answers behind the line `after`, in the order of lines; none at the end."""
        found = await self._database.run(
            lambda rows: rows.all(
                "SELECT number, custom_id, state, answer FROM lines WHERE batch = ? AND number > ? AND "
                f"answer IS NOT NULL ORDER BY number LIMIT {ANSWERS_AT_ONCE}",
                *(batch_id, after),
            )
        )
        return [
            KeptAnswer(number, custom_id, state == LineState.FAILED, bytes(answer))
            for number, custom_id, state, answer in found
        ]

    # For the runner.

    async def take_new(self, holder: str) -> BatchRecord | None:
        """Take a batch that nobody validates; its lines so far are forgotten. None: there is none."""
        now = self._clock()

        def work(rows: Rows) -> BatchRecord | None:
            found = rows.all(
                "UPDATE batches SET holder = ?, held_until = ? WHERE id = (SELECT id FROM batches WHERE state = ? AND "
                f"held_until < ? ORDER BY created LIMIT 1{self._database.skip_claimed}) RETURNING id",
                *(holder, now + self._options.job_lease_seconds, BatchState.VALIDATING, now),
            )
            if not found:
                return None
            rows.change("DELETE FROM lines WHERE batch = ?", found[0][0])
            return _find(rows, found[0][0])

        return await self._database.run(work)

    async def add_lines(self, batch_id: str, lines: list[NewLine]) -> list[NewLine] | None:
        """Add lines; return those with a custom_id that an earlier one has. None: the batch is validated no more."""
        until = self._clock() + self._options.job_lease_seconds

        def work(rows: Rows) -> list[NewLine] | None:
            if not rows.change(
                "UPDATE batches SET held_until = ? WHERE id = ? AND state = ?", until, batch_id, BatchState.VALIDATING
            ):
                return None
            return [
                line
                for line in lines
                if not rows.change(
                    "INSERT INTO lines VALUES (?, ?, ?, ?, ?, 0, NULL, 0, NULL) ON CONFLICT DO NOTHING",
                    *(batch_id, line.number, line.custom_id, line.place, line.num_bytes),
                )
            ]

        return await self._database.run(work)

    async def start(self, batch_id: str, total: int) -> None:
        """Let a validated batch's lines be answered."""
        now = self._clock()
        await self._database.run(
            lambda rows: rows.change(
                "UPDATE batches SET state = ?, began = ?, total = ?, holder = NULL WHERE id = ? AND state = ?",
                *(BatchState.IN_PROGRESS, now, total, batch_id, BatchState.VALIDATING),
            )
        )

    async def refuse(self, batch_id: str, problems: list[LineProblem]) -> None:
        """End a batch that is not valid."""

        def work(rows: Rows) -> None:
            rows.change("DELETE FROM lines WHERE batch = ?", batch_id)
            rows.change("DELETE FROM batch_keys WHERE batch = ?", batch_id)
            rows.change(
                "UPDATE batches SET state = ?, ended = ?, problems = ?, holder = NULL WHERE id = ? AND state = ?",
                *(BatchState.FAILED, self._clock(), json.dumps([asdict(one) for one in problems])),
                *(batch_id, BatchState.VALIDATING),
            )

        await self._database.run(work)

    async def take(
        self, holder: str, count: int, in_flight: Mapping[str, int], room: Mapping[str, int] | None = None
    ) -> list[TakenLine]:
        """Take up to `count` lines, in turns between callers: first for those with the fewest `in_flight`.

        `room`: the most lines of each batch that has a bound now.
        """
        now = self._clock()

        def work(rows: Rows) -> list[TakenLine]:
            live: dict[str, list[tuple[Any, ...]]] = {}
            for row in rows.all(
                "SELECT owner, id, endpoint, input_file, digest FROM batches LEFT JOIN batch_keys ON batch = id "
                "WHERE state = ? AND expires >= ? ORDER BY created",
                *(BatchState.IN_PROGRESS, now),
            ):
                live.setdefault(row[0], []).append(row[1:])
            having: Counter[str] = Counter(in_flight)
            found: list[TakenLine] = []
            while live and len(found) < count:
                owner = min(live, key=lambda one: having[one])
                # Equal parts of what is left, so that few queries do for many lines.
                most = max(1, (count - len(found)) // len(live))
                batch_id, endpoint, file_id, digest = live[owner][0]
                bound = room.get(batch_id) if room else None
                lines = self._claim(rows, batch_id, holder, most if bound is None else min(bound, most))
                found += [
                    TakenLine(batch_id, owner, endpoint, number, custom_id, file_id, place, size, digest or "")
                    for number, custom_id, place, size in lines
                ]
                having[owner] += len(lines)
                if bound is not None or len(lines) < most:
                    live[owner].pop(0)
                    if not live[owner]:
                        del live[owner]
            return found

        return await self._database.run(work)

    def _claim(self, rows: Rows, batch_id: str, holder: str, most: int) -> list[tuple[Any, ...]]:
        """Take lines of a batch: those that wait, then those with a lease that has ended.

        What was given back comes after what was never tried.
        """
        now, found = self._clock(), list[tuple[Any, ...]]()
        # One state at a time: by the index both cost the same, however many lines have answers.
        for state in (LineState.WAITING, LineState.TAKEN):
            if len(found) < most:
                found += rows.all(
                    "UPDATE lines SET state = 1, holder = ?, held_until = ? WHERE batch = ? AND number IN (SELECT "
                    "number FROM lines WHERE batch = ? AND state = ? AND held_until <= ? "
                    f"ORDER BY held_until, number LIMIT ?{self._database.skip_claimed}) "
                    "RETURNING number, custom_id, place, bytes",
                    *(holder, now + self._options.job_lease_seconds, batch_id, batch_id, state, now),
                    most - len(found),
                )
        return found

    async def renew(self, lines: Iterable[TakenLine], holder: str) -> None:
        """Keep lines that a process has taken and still answers."""
        until = self._clock() + self._options.job_lease_seconds
        values = [(until, line.batch_id, line.number, holder) for line in lines]
        await self._database.run(
            lambda rows: rows.change_many(
                "UPDATE lines SET held_until = ? WHERE batch = ? AND number = ? AND state = 1 AND holder = ?", values
            )
        )

    async def release_all(self, holder: str | None) -> None:
        """Give back the lines and batches that a process has taken; None: that any has."""

        def work(rows: Rows) -> None:
            where, values = ("", ()) if holder is None else (" AND holder = ?", (holder,))
            rows.change(f"UPDATE lines SET state = 0, holder = NULL, held_until = 0 WHERE state = 1{where}", *values)
            rows.change(
                f"UPDATE batches SET holder = NULL, held_until = 0 WHERE state = ?{where}",
                *(BatchState.VALIDATING, *values),
            )

        await self._database.run(work)

    async def release(self, line: TakenLine, holder: str, rest_seconds: float) -> None:
        """Give back a line that is to be answered later: nobody takes it within `rest_seconds`."""
        until = self._clock() + rest_seconds
        await self._database.run(
            lambda rows: rows.change(
                "UPDATE lines SET state = 0, holder = NULL, held_until = ? "
                "WHERE batch = ? AND number = ? AND state = 1 AND holder = ?",
                *(until, line.batch_id, line.number, holder),
            )
        )

    async def answer(self, line: TakenLine, answer: bytes, *, has_failed: bool) -> bool:
        """Keep a line's answer, and end the batch with its last one. False: it has one, or its batch ended."""
        state = LineState.FAILED if has_failed else LineState.ANSWERED

        def work(rows: Rows) -> bool:
            # Its row is locked first, here and at its end: the lines change under this lock alone.
            if self._lock(rows, line.batch_id) is not BatchState.IN_PROGRESS or not rows.change(
                "UPDATE lines SET state = ?, answer = ?, holder = NULL WHERE batch = ? AND number = ? AND state < 2",
                *(state, answer, line.batch_id, line.number),
            ):
                return False
            rows.change(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?, answer_bytes = answer_bytes + ? "
                "WHERE id = ?",
                *(int(not has_failed), int(has_failed), len(answer) + 1, line.batch_id),
            )
            record = _find(rows, line.batch_id)
            if record.completed + record.failed == record.total:
                self._end(rows, record, BatchState.COMPLETED)
            return True

        return await self._database.run(work)

    async def end_overdue(self) -> list[str]:
        """End batches that were cancelled, are out of time, or have a caller without room; return their ids."""
        now = self._clock()

        def work(rows: Rows) -> list[str]:
            ended = []
            over: dict[str, bool] = {}
            for row in rows.all(f"SELECT {_FIELDS} FROM batches WHERE state IN ({_LIVE}) ORDER BY created"):
                record = _batch(row)
                if self._lock(rows, record.batch_id) is not record.state:
                    # Another gateway was faster.
                    continue
                if record.state is BatchState.CANCELLING:
                    state, why = BatchState.CANCELLED, CANCELLED
                elif record.expires < now:
                    state, why = BatchState.EXPIRED, EXPIRED
                elif over.setdefault(record.owner, self._files.is_over(rows, record.owner)):
                    state, why = BatchState.FAILED, FULL
                else:
                    continue
                if record.began is None:
                    # Its lines are not all known.
                    rows.change("DELETE FROM lines WHERE batch = ?", record.batch_id)
                _answer_rest(rows, record.batch_id, why)
                self._end(rows, record, state, () if state is not BatchState.FAILED else (LineProblem(*why),))
                ended.append(record.batch_id)
            return ended

        return await self._database.run(work)

    def _lock(self, rows: Rows, batch_id: str) -> BatchState | None:
        """Hold a batch's row for the rest of the transaction; return its state, None if it is gone."""
        found = rows.all(f"SELECT state FROM batches WHERE id = ?{self._database.lock}", batch_id)
        return BatchState(found[0][0]) if found else None

    def _end(self, rows: Rows, record: BatchRecord, state: BatchState, problems: tuple[LineProblem, ...] = ()) -> None:
        """End a batch, and show the files of its answers."""
        now, files = self._clock(), dict[LineState, str | None]()
        for kind, word in ((LineState.ANSWERED, "output"), (LineState.FAILED, "error")):
            ((count, size),) = rows.all(
                "SELECT count(*), coalesce(sum(length(answer) + 1), 0) FROM lines WHERE batch = ? AND state = ?",
                *(record.batch_id, kind),
            )
            files[kind] = new_file_id() if count else None
            if (file_id := files[kind]) is not None:
                name, life = f"{record.batch_id}_{word}.jsonl", now + self._options.file_seconds
                add_answers_file(
                    rows,
                    FileRecord(
                        file_id, record.owner, name, "batch_output", int(size), now, life, record.batch_id, kind
                    ),
                )
        rows.change("DELETE FROM batch_keys WHERE batch = ?", record.batch_id)
        rows.change(
            "UPDATE batches SET state = ?, ended = ?, output_file = ?, error_file = ?, problems = ?, holder = NULL, "
            "failed = total - completed WHERE id = ?",
            *(state, now, files[LineState.ANSWERED], files[LineState.FAILED]),
            *(json.dumps([asdict(one) for one in problems]), record.batch_id),
        )

    async def sweep(self) -> None:
        """Remove batches that ended too long ago, with their lines. The files of their answers have gone before."""
        before = self._clock() - self._options.file_seconds

        def work(rows: Rows) -> None:
            for (batch_id,) in rows.all(
                "SELECT id FROM batches WHERE ended < ? AND NOT EXISTS (SELECT 1 FROM files WHERE batch = batches.id) "
                f"LIMIT {_REMOVED_AT_ONCE}",
                before,
            ):
                rows.change("DELETE FROM lines WHERE batch = ?", batch_id)
                rows.change("DELETE FROM batches WHERE id = ?", batch_id)

        await self._database.run(work)

    async def counts(self) -> JobCounts:
        """Return what the store has."""

        def work(rows: Rows) -> JobCounts:
            files, size = self._files.used(rows)
            ((live, lines),) = rows.all(
                f"SELECT count(*), coalesce(sum(total - completed - failed), 0) FROM batches WHERE state IN ({_LIVE})"
            )
            return JobCounts(files, size, int(live), int(lines))

        return await self._database.run(work)


def _find(rows: Rows, batch_id: str, owner: str | None = None) -> BatchRecord:
    found = rows.all(f"SELECT {_FIELDS} FROM batches WHERE id = ?", batch_id if is_id(batch_id) else "")
    if not found or (owner is not None and found[0][1] != owner):
        raise NotFound(
            f"no batch {batch_id[:64]!r} of this caller: never made, or ended too long ago", reason="BATCH_NOT_FOUND"
        )
    return _batch(found[0])


def _batch(row: tuple[Any, ...]) -> BatchRecord:
    found: dict[str, Any] = dict(zip(_NAMES, row, strict=True))
    found["state"] = BatchState(found["state"])
    found["metadata"] = json.loads(found["metadata"])
    found["problems"] = tuple(LineProblem(**one) for one in json.loads(found["problems"]))
    return BatchRecord(**found)


def _answer_rest(rows: Rows, batch_id: str, why: tuple[str, str]) -> None:
    """Give an error to each line without an answer."""
    while left := rows.all(
        f"SELECT number, custom_id FROM lines WHERE batch = ? AND state < 2 LIMIT {_LINES_AT_ONCE}", batch_id
    ):
        rows.change_many(
            "UPDATE lines SET state = ?, answer = ?, holder = NULL WHERE batch = ? AND number = ?",
            [(LineState.FAILED, unanswered_line(custom_id, why), batch_id, number) for number, custom_id in left],
        )
