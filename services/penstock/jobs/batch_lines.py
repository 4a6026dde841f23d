"""A batch's file as lines: found piece by piece, and checked before any of them runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.jobs.job_records import LineProblem, NewLine

# Problems of one file that its batch lists, and characters of a value that one shows.
MOST_PROBLEMS, _SHOWN_CHARS = 32, 64
_MOST_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class RawLine:
    """Bytes of one line, without its end. `data` is empty when it is longer than a line may be."""

    number: int
    place: int
    num_bytes: int
    data: bytes


class LineSplitter:
    """Finds the lines in the pieces of a file. It holds one line at most, and none that is too long."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._number = self._place = self._size = 0
        self._parts: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[RawLine]:
        """Yield the lines that end in this piece. Empty ones are passed over, and keep their numbers."""
        begin = 0
        while (end := piece.find(b"\n", begin)) >= 0:
            self._hold(piece[begin:end])
            yield from self.end()
            self._place += 1
            begin = end + 1
        self._hold(piece[begin:])

    def end(self) -> Iterator[RawLine]:
        """Yield the line that the file ends in, if it has one without an end."""
        place, size = self._place - self._size, self._size
        data = b"".join(self._parts)
        self._number += 1
        self._parts, self._size = [], 0
        if size > self._most or data.strip():
            yield RawLine(self._number, place, size, data)

    def _hold(self, part: bytes) -> None:
        self._size += len(part)
        self._place += len(part)
        if self._size > self._most:
            self._parts.clear()
        elif part:
            self._parts.append(part)


class LineCheck:
    """Checks the lines of one batch."""

    def __init__(self, endpoint: str, most_bytes: int) -> None:
        """`most_bytes`: of one line."""
        self._endpoint, self._most = endpoint, most_bytes

    def check_all(self, lines: list[RawLine]) -> list[NewLine | LineProblem]:
        """Return `check` of each."""
        return [self.check(line) for line in lines]

    def check(self, line: RawLine) -> NewLine | LineProblem:
        """Return the line as the store keeps it, or its problem. The endpoint checks the body itself."""
        if line.num_bytes > self._most:
            return self._problem(line, "line_too_long", f"the line has more than {self._most} bytes")
        try:
            read = json.loads(line.data)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            return self._problem(line, "invalid_json_line", "the line is not a JSON object in UTF-8")
        for name, problem in self._faults(read):
            if problem is not None:
                return self._problem(line, *problem, name)
        return NewLine(line.number, read["custom_id"], line.place, line.num_bytes)

    def _faults(self, read: dict[str, Any]) -> Iterator[tuple[str, tuple[str, str] | None]]:
        """Yield each field with its code and message; None: it is right."""
        custom_id, body = read.get("custom_id"), read.get("body")
        is_id = isinstance(custom_id, str) and 0 < len(custom_id) <= _MOST_ID_CHARS and _is_storable(custom_id)
        yield (
            "custom_id",
            None if is_id else ("invalid_custom_id", f"must be a text of 1 to {_MOST_ID_CHARS} characters"),
        )
        yield "method", None if read.get("method") == "POST" else ("invalid_method", "must be POST")
        yield "url", None if read.get("url") == self._endpoint else ("mismatched_url", f"must be {self._endpoint}")
        yield "body", None if isinstance(body, dict) else ("invalid_body", "must be a JSON object")
        if isinstance(body, dict):
            yield "body.stream", None if not body.get("stream") else ("stream_not_supported", "must not be true")
            is_background = body.get("background") and self._endpoint == "/v1/responses"
            yield "body.background", ("background_not_supported", "must not be true") if is_background else None

    def _problem(self, line: RawLine, code: str, message: str, param: str | None = None) -> LineProblem:
        return LineProblem(code, message if param is None else f"{param}: {message}", line.number, param)


def duplicate(line: NewLine) -> LineProblem:
    """Return the problem of a line with the custom_id of an earlier one."""
    shown = line.custom_id[:_SHOWN_CHARS]
    return LineProblem(
        "duplicate_custom_id", f"custom_id: {shown!r} is that of an earlier line", line.number, "custom_id"
    )


def _is_storable(text: str) -> bool:
    """True for a text that both databases hold: no lone surrogate, and no zero."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


async def lines_of(pieces: AsyncIterator[bytes], most_bytes: int) -> AsyncIterator[list[RawLine]]:
    """Yield the lines of a file, those of each piece together."""
    splitter = LineSplitter(most_bytes)
    async for piece in pieces:
        yield list(splitter.feed(piece))
    yield list(splitter.end())
