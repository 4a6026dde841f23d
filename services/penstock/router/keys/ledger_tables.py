"""Tables of the ledger and their transactions: one entry for each answer, sums by key and day, routers, revocations.

An entry is open from its reservation to the end of its answer, which is counted once: whoever ends it finds it open. If
its router died, the entry is lost: nobody knows how much of it was generated, so the day's quota keeps all of its
reservation. Each transaction holds the sum of a key's day before its entries, so that no two wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from penstock.database.transactions import Rows

SCHEMA = (
    """CREATE TABLE IF NOT EXISTS key_days (
        label TEXT NOT NULL, day INTEGER NOT NULL, reserved BIGINT NOT NULL, prompt_tokens BIGINT NOT NULL,
        completion_tokens BIGINT NOT NULL, answers BIGINT NOT NULL, lost_tokens BIGINT NOT NULL,
        lost_answers BIGINT NOT NULL, PRIMARY KEY (label, day))""",
    """CREATE TABLE IF NOT EXISTS key_entries (
        id TEXT PRIMARY KEY, label TEXT NOT NULL, day INTEGER NOT NULL, model TEXT NOT NULL, request TEXT NOT NULL,
        router TEXT NOT NULL, state INTEGER NOT NULL, reserved BIGINT NOT NULL, prompt_tokens BIGINT NOT NULL,
        completion_tokens BIGINT NOT NULL, began DOUBLE PRECISION NOT NULL, ended DOUBLE PRECISION NOT NULL,
        status TEXT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS key_entries_by_state ON key_entries (state, router)",
    "CREATE INDEX IF NOT EXISTS key_entries_by_day ON key_entries (day)",
    """CREATE TABLE IF NOT EXISTS key_routers (
        router TEXT PRIMARY KEY, alive_until DOUBLE PRECISION NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS revoked_keys (
        digest TEXT PRIMARY KEY, label TEXT NOT NULL, revoked_at DOUBLE PRECISION NOT NULL)""",
)
DAY_SECONDS = 86400


class EntryState(IntEnum):
    """State of an entry."""

    OPEN = 0
    ENDED = 1
    LOST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """An answer that is to begin."""

    entry: str
    label: str
    # Of UTC, since 1970.
    day: int
    model: str
    # The first half of the SHA-256 of its request id, in hex.
    request: str
    router: str
    # Most tokens of prompt and answers.
    tokens: int
    # Quota of the day; None: none.
    limit: int | None
    began: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """An answer that has ended, with what was really used."""

    entry: str
    label: str
    day: int
    prompt_tokens: int
    completion_tokens: int
    status: str
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DayUsage:
    """Sums of a key's day."""

    label: str
    day: int
    reserved: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answers: int = 0
    # Reservations of answers that died with their routers.
    lost_tokens: int = 0
    lost_answers: int = 0

    @property
    def used(self) -> int:
        """Tokens that count against the quota of the day, without those of open answers."""
        return self.prompt_tokens + self.completion_tokens + self.lost_tokens


_DAY = "label, day, reserved, prompt_tokens, completion_tokens, answers, lost_tokens, lost_answers"


def day_of(seconds: float) -> int:
    """Return the day, UTC, of a time in seconds since 1970."""
    return int(seconds // DAY_SECONDS)


def reserve(rows: Rows, lock: str, asked: Reservation) -> int | None:
    """Write an open entry. Return None, or the tokens that the day has left where they are too few: nothing is written
    then. A second call with the same entry changes nothing."""
    day = _held_day(rows, lock, asked.label, asked.day)
    if rows.all("SELECT id FROM key_entries WHERE id = ?", asked.entry):
        return None
    left = None if asked.limit is None else asked.limit - day.used - day.reserved
    if left is not None and asked.tokens > left:
        return left
    rows.change(
        "INSERT INTO key_entries (id, label, day, model, request, router, state, reserved, prompt_tokens, "
        "completion_tokens, began, ended, status) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0, ?, 0, '')",
        asked.entry, asked.label, asked.day, asked.model, asked.request, asked.router, int(EntryState.OPEN),
        asked.tokens, asked.began,
    )  # fmt: skip
    rows.change(
        "UPDATE key_days SET reserved = reserved + ? WHERE label = ? AND day = ?", asked.tokens, asked.label, asked.day
    )
    return None


def end(rows: Rows, lock: str, ended: AnswerEnd) -> None:
    """Count an answer, once. One that was taken for lost, since its router was slow, is lost no more."""
    _held_day(rows, lock, ended.label, ended.day)
    found = rows.all("SELECT state, reserved FROM key_entries WHERE id = ?", ended.entry)
    if not found or found[0][0] == EntryState.ENDED:
        return
    state, reserved = found[0]
    rows.change(
        "UPDATE key_entries SET state = ?, prompt_tokens = ?, completion_tokens = ?, status = ?, ended = ? "
        "WHERE id = ?",
        int(EntryState.ENDED), ended.prompt_tokens, ended.completion_tokens, ended.status, ended.ended, ended.entry,
    )  # fmt: skip
    given_back, lost = (0, 1) if state == EntryState.LOST else (reserved, 0)
    # Where no backend began, there is no answer.
    answers = 1 if ended.prompt_tokens or ended.completion_tokens else 0
    rows.change(
        "UPDATE key_days SET reserved = reserved - ?, prompt_tokens = prompt_tokens + ?, "
        "completion_tokens = completion_tokens + ?, answers = answers + ?, lost_tokens = lost_tokens - ?, "
        "lost_answers = lost_answers - ? WHERE label = ? AND day = ?",
        given_back, ended.prompt_tokens, ended.completion_tokens, answers, lost * reserved, lost, ended.label,
        ended.day,
    )  # fmt: skip


def show_alive(rows: Rows, router: str, until: float) -> None:
    """Note that a router lives."""
    if not rows.change("UPDATE key_routers SET alive_until = ? WHERE router = ?", until, router):
        rows.change("INSERT INTO key_routers (router, alive_until) VALUES (?, ?)", router, until)


def forget_router(rows: Rows, router: str) -> None:
    """Note that a router has stopped, with all of its entries ended."""
    rows.change("DELETE FROM key_routers WHERE router = ?", router)


def days_with_dead(rows: Rows, now: float) -> list[tuple[str, int]]:
    """Return the keys and days with open entries of routers that live no more, in the order of transactions."""
    found = rows.all(
        "SELECT DISTINCT label, day FROM key_entries WHERE state = ? AND router NOT IN "
        "(SELECT router FROM key_routers WHERE alive_until >= ?) ORDER BY label, day",
        int(EntryState.OPEN), now,
    )  # fmt: skip
    return [(label, day) for label, day in found]


def lose(rows: Rows, lock: str, label: str, day: int, now: float) -> int:
    """Take the open entries of dead routers for lost; return their number."""
    _held_day(rows, lock, label, day)
    found = rows.all(
        "SELECT id, reserved FROM key_entries WHERE state = ? AND label = ? AND day = ? AND router NOT IN "
        "(SELECT router FROM key_routers WHERE alive_until >= ?)",
        int(EntryState.OPEN), label, day, now,
    )  # fmt: skip
    rows.change_many(
        "UPDATE key_entries SET state = ?, status = 'LOST', ended = ? WHERE id = ?",
        [(int(EntryState.LOST), now, entry) for entry, _ in found],
    )
    tokens = sum(reserved for _, reserved in found)
    rows.change(
        "UPDATE key_days SET reserved = reserved - ?, lost_tokens = lost_tokens + ?, lost_answers = lost_answers + ? "
        "WHERE label = ? AND day = ?",
        tokens, tokens, len(found), label, day,
    )  # fmt: skip
    return len(found)


def forget_old(rows: Rows, now: float, entry_days: int) -> None:
    """Remove entries that ended before the last `entry_days` days, and routers that died. Sums of days stay."""
    rows.change("DELETE FROM key_entries WHERE state <> ? AND day < ?", int(EntryState.OPEN), day_of(now) - entry_days)
    rows.change("DELETE FROM key_routers WHERE alive_until < ?", now - DAY_SECONDS)


def usage(rows: Rows, first_day: int, last_day: int) -> list[DayUsage]:
    """Return the sums of all keys between two days, both included, by key and day."""
    found = rows.all(
        f"SELECT {_DAY} FROM key_days WHERE day >= ? AND day <= ? ORDER BY label, day", first_day, last_day
    )
    return [_usage_of(row) for row in found]


def revoke(rows: Rows, digests: Sequence[bytes], label: str) -> None:
    """Write down that secrets were revoked."""
    for digest in digests:
        rows.change(
            "INSERT INTO revoked_keys (digest, label, revoked_at) VALUES (?, ?, ?) ON CONFLICT (digest) DO NOTHING",
            digest.hex(), label, time.time(),
        )  # fmt: skip


def revoked(rows: Rows) -> list[bytes]:
    """Return the digests of all revoked secrets."""
    return [bytes.fromhex(digest) for (digest,) in rows.all("SELECT digest FROM revoked_keys")]


def _held_day(rows: Rows, lock: str, label: str, day: int) -> DayUsage:
    """Hold the sums of a key's day until the end of the transaction, and return them."""
    statement = f"SELECT {_DAY} FROM key_days WHERE label = ? AND day = ?{lock}"
    found = rows.all(statement, label, day)
    if not found:
        rows.change(
            f"INSERT INTO key_days ({_DAY}) VALUES (?, ?, 0, 0, 0, 0, 0, 0) ON CONFLICT (label, day) DO NOTHING",
            label, day,
        )  # fmt: skip
        found = rows.all(statement, label, day)
    return _usage_of(found[0])


def _usage_of(row: tuple[object, ...]) -> DayUsage:
    label, *figures = row
    day, reserved, prompt, completion, answers, lost_tokens, lost_answers = (int(str(one)) for one in figures)
    return DayUsage(
        label=str(label),
        day=day,
        reserved=reserved,
        prompt_tokens=prompt,
        completion_tokens=completion,
        answers=answers,
        lost_tokens=lost_tokens,
        lost_answers=lost_answers,
    )
