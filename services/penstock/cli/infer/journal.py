"""Journal of a run of `penstock infer` beside its predictions file, and the files that a complete run leaves.

A record is on the disk before its line counts as done, so a killed run can be continued where it stopped. The
predictions are written in the order of the lines once all are done, under another name first: the file is complete or
not there.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.cli.infer.prompts import Line
from penstock.common.errors import StartupError

_VERSION = 1
Record = dict[str, Any]


class Journal:
    """Records of lines, by their numbers. Only the place of each in the file is in memory."""

    def __init__(self, predictions: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        """Open or begin the journal of `predictions`. `settings`: those that decide the answers, in JSON's types.

        Raises StartupError naming the flag for a journal of other settings, or a folder that cannot be written.
        """
        self.path = predictions.with_name(f"{predictions.name}.journal")
        self._places: dict[int, int] = {}
        try:
            predictions.parent.mkdir(parents=True, exist_ok=True)
            # "a" makes the file if there is none, and keeps an existing one.
            self.path.open("ab").close()
            self._file = self.path.open("r+b")
            self._lock()
            end = self._read(settings) if resume else 0
            self._file.seek(end)
            # A record was cut short when its process ended.
            self._file.truncate()
            if not end:
                self._append({"penstock_infer": _VERSION, "settings": dict(settings)})
                sync_folder(self.path.parent)
        except OSError as error:
            flag = "--predictions-file"
            raise StartupError(f"{flag}: {self.path} cannot be written: {error.strerror}", flag=flag) from error

    def _lock(self) -> None:
        """Lock this journal for this run alone. The lock ends with the process."""
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            flag = "--predictions-file"
            raise StartupError(f"{flag}: another run writes {self.path}", flag=flag) from None

    @staticmethod
    def settings_in(predictions: Path) -> dict[str, Any]:
        """Return the settings of the journal that an interrupted run left; empty without one."""
        path = predictions.with_name(f"{predictions.name}.journal")
        try:
            with path.open("rb") as file:
                first = json.loads(file.readline())
            return dict(first["settings"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return {}

    def __len__(self) -> int:
        return len(self._places)

    def _read(self, settings: Mapping[str, Any]) -> int:
        """Find the records, and return the end of the last complete one. Raises StartupError for other settings."""
        end, is_first = 0, True
        for raw in self._file:
            try:
                record = json.loads(raw) if raw.endswith(b"\n") else None
            except (ValueError, RecursionError):
                record = None
            # Anything but a record ends the journal: the lines after it are computed again.
            if not isinstance(record, dict) or not (_is_head(record) if is_first else _is_record(record)):
                break
            if is_first:
                self._check(record["settings"], settings)
            else:
                self._places[record["line"]] = end
            is_first, end = False, end + len(raw)
        return end

    def _check(self, found: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        differing = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
        if differing:
            raise StartupError(
                f"{self.path} is from a run with other settings ({', '.join(differing)}): give those again, or "
                "--no-resume to start over",
                flag="--no-resume",
            )

    def has(self, line: Line) -> bool:
        """True when the line is done: a record without an error has its number and its text."""
        record = self.get(line)
        return record is not None and "error" not in record

    def get(self, line: Line) -> Record | None:
        """Return the record of a line; None if there is none, or if the line has changed."""
        place = self._places.get(line.number)
        if place is None:
            return None
        self._file.seek(place)
        record: Record = json.loads(self._file.readline())
        return record if record.get("digest") == line.digest else None

    def add(self, line: Line, record: Mapping[str, Any]) -> None:
        """Append a record; it is on the disk when this returns. Raises OSError."""
        self._places[line.number] = self._append({"line": line.number, "digest": line.digest, **record})

    def _append(self, record: Record) -> int:
        self._file.seek(0, os.SEEK_END)
        place = self._file.tell()
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        return place

    def close(self) -> None:
        """Close the file; it stays."""
        self._file.close()

    def remove(self) -> None:
        """Remove the file: the run is over."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def write_whole(path: Path, pieces: Iterable[str]) -> None:
    """Write a UTF-8 file under another name, flush it to the disk, and rename it. Raises OSError."""
    scratch = path.with_name(f".{path.name}.part")
    with scratch.open("w", encoding="utf-8", newline="\n") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync_folder(path.parent)


def json_list(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the text of a JSON list, entry by entry, as json.dump(..., ensure_ascii=False, indent=2) writes it."""
    before = "[\n"
    for entry in entries:
        text = json.dumps(entry, ensure_ascii=False, indent=2).replace("\n", "\n  ")
        yield f"{before}  {text}"
        before = ",\n"
    yield "[]" if before == "[\n" else "\n]"


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_head(record: Record) -> bool:
    return record.get("penstock_infer") == _VERSION and isinstance(record.get("settings"), dict)


def _is_record(record: Record) -> bool:
    return type(record.get("line")) is int and isinstance(record.get("digest"), str)
