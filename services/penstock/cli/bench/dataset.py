"""Prompts of a file: JSON, JSON lines, or plain lines."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.cli.bench.config import BenchConfig, lengths
from penstock.cli.bench.target import BenchPrompt
from penstock.common.errors import StartupError

# Authors of ShareGPT's conversations -> roles.
_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_NAMES = "`prompt`, `messages` or `conversations`"


class DatasetPrompts:
    """Prompts of --dataset, all before any repeats; the same seed gives the same order."""

    def __init__(self, config: BenchConfig, path: str) -> None:
        """Read the file. Raises StartupError naming it and a record that is not a prompt."""
        self._config, self._random = config, random.Random(config.seed)
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise StartupError(f"--dataset {path}: {why}", flag="--dataset") from error
        self._prompts = [self._prompt(record, f"--dataset {path}: {place}") for place, record in _records(path, text)]
        if not self._prompts:
            raise StartupError(f"--dataset {path}: it has no prompt", flag="--dataset")
        self._left: list[tuple[BenchPrompt, int | None]] = []

    def __next__(self) -> BenchPrompt:
        if not self._left:
            self._left = self._random.sample(self._prompts, len(self._prompts))
        prompt, output_tokens = self._left.pop()
        drawn = self._random.randint(*lengths(self._config.output_tokens))
        return BenchPrompt([], prompt.text, output_tokens or drawn, prompt.messages)

    def _prompt(self, record: Any, place: str) -> tuple[BenchPrompt, int | None]:
        """Return a prompt, and the number of output tokens in its record."""
        if isinstance(record, str):
            return BenchPrompt([], record, 0), None
        if not isinstance(record, dict):
            raise StartupError(f"{place} is not an object", flag="--dataset")
        tokens = record.get("output_tokens")
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
            raise StartupError(f"{place}: output_tokens must be a number of 1 or more", flag="--dataset")
        if isinstance(record.get("prompt"), str):
            return BenchPrompt([], record["prompt"], 0), tokens
        messages = _messages(record)
        if not messages:
            raise StartupError(f"{place} has none of {_NAMES} with a text for the model to answer", flag="--dataset")
        return BenchPrompt([], None, 0, messages), tokens


def _records(path: str, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each record with its place in words. Raises StartupError for a file that is not JSON."""
    if path.endswith(".json"):
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise StartupError(f"--dataset {path}: it is not JSON ({error})", flag="--dataset") from error
        if not isinstance(whole, list):
            raise StartupError(f"--dataset {path}: a list of records is expected", flag="--dataset")
        yield from ((f"record {number}", one) for number, one in enumerate(whole))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not path.endswith(".jsonl"):
            yield f"line {number}", line
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            raise StartupError(f"--dataset {path}: line {number} is not JSON ({error})", flag="--dataset") from error


def _messages(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (role, text) of a conversation up to the last message that is not the assistant's; [] if there is none."""
    turns = record.get("messages") or record.get("conversations")
    found: list[tuple[str, str]] = []
    for turn in turns if isinstance(turns, list) else ():
        if not isinstance(turn, dict):
            return []
        role, text = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or role not in _ROLES or not isinstance(text, str):
            return []
        found.append((_ROLES[role], text))
    while found and found[-1][0] == "assistant":
        found.pop()
    return found
