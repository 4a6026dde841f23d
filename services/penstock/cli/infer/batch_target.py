"""Model behind a gateway, asked by batches: `penstock infer --endpoint http://HOST:PORT`.

The batch goes on while this command does not run. The same command finds it again by the file that it leaves beside the
predictions, and takes its answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from penstock_client._options import is_conversation

from penstock.cli.client.connection import ConnectionConfig
from penstock.cli.console import complain
from penstock.cli.infer.config import InferConfig
from penstock.cli.infer.gateway_calls import GatewayAway, GatewayCalls, error_of
from penstock.cli.infer.journal import write_whole
from penstock.cli.infer.targets import Answer, Answers, Asked, tokenizer_of
from penstock.common.errors import NotFound, StartupError, Unavailable

if TYPE_CHECKING:
    from penstock.generator.text import LocalTokenizer

_LIVE = ("validating", "in_progress", "finalizing", "cancelling")
_CHATS, _TEXTS = "/v1/chat/completions", "/v1/completions"
# Seconds between two looks at a batch, and the most after a gateway that does not answer.
_LOOK_SECONDS, _MOST_LOOK_SECONDS = 1.0, 15.0
# Looks in a row without an answer after which the command ends; the batch goes on.
_MOST_SILENT_LOOKS = 40
_KEY_CHARS = 32


class BatchTarget:
    """Target of batches. A context manager; its exit leaves the batch."""

    def __init__(self, config: InferConfig, connection: ConnectionConfig) -> None:
        """Find the model. Raises StartupError naming the flag, NotFound for an unknown --model."""
        self._calls = GatewayCalls(connection)
        self._endpoint, self._window = connection.address, config.completion_window
        self.tokenizer: LocalTokenizer | None = tokenizer_of(config)
        models = self._calls.json("GET", "/v1/models")["data"]
        named = [one for one in models if config.model in (None, one["id"])]
        if not named:
            raise NotFound(
                f"no model {config.model!r}: there are {', '.join(one['id'] for one in models)}",
                reason="MODEL_NOT_FOUND",
                field="model",
            )
        self.name: str = named[0]["id"]
        self.context: int | None = named[0].get("max_model_len") or None
        self.facts: dict[str, Any] = {"model": self.name, "by": "batches"}
        predictions = Path(config.predictions_file).expanduser()
        self._note = predictions.with_name(f"{predictions.name}.batch")
        self._wait = threading.Event().wait

    def __enter__(self) -> BatchTarget:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: each call had its own connection."""

    def answers(self, requests: Iterator[Asked]) -> Answers:
        """The answers of a batch come at its end."""
        with tempfile.TemporaryFile() as spool:
            lines = _Lines(cast("BinaryIO", spool))
            for index, (prompt, options) in enumerate(requests):
                lines.add(index, _request(prompt.asked, {"model": self.name, **options}))
            # A batch of an earlier run first: what it has is not asked again.
            while lines.wanted:
                batch_id = self._left_over()
                is_new = batch_id is None
                if batch_id is None:
                    batch_id = self._submit(lines)
                batch = self._ended(batch_id)
                if batch is not None:
                    for key, answer in self._answers_of(batch):
                        for index in lines.take(key):
                            yield index, answer
                self._note.unlink(missing_ok=True)
                if is_new and lines.wanted:
                    raise StartupError(
                        f"{batch_id} ended {(batch or {}).get('status', 'unknown')} before every line was answered: "
                        "run again, with a longer --completion-window",
                        flag="--completion-window",
                    )

    def _left_over(self) -> str | None:
        """Return the batch that an earlier run left at this gateway; None: there is none."""
        try:
            note = json.loads(self._note.read_text())
            batch_id = str(note["batch"]) if note["endpoint"] == self._endpoint else None
        except (OSError, ValueError, LookupError, TypeError):
            return None
        if batch_id is not None:
            complain(f"going on with {batch_id}")
        return batch_id

    def _submit(self, lines: _Lines) -> str:
        file_id = self._calls.upload(lines.file(), lines.num_bytes)
        asked = {"input_file_id": file_id, "endpoint": lines.url, "completion_window": self._window}
        batch_id = str(self._calls.json("POST", "/v1/batches", asked)["id"])
        write_whole(self._note, [json.dumps({"batch": batch_id, "endpoint": self._endpoint})])
        complain(f"{batch_id} has {len(lines.wanted)} lines; it goes on when this command ends")
        return batch_id

    def _ended(self, batch_id: str) -> dict[str, Any] | None:
        """Wait for the end of a batch, and return it; None if the gateway does not know it. Raises StartupError."""
        shown, silent = -1, 0
        while True:
            try:
                batch = self._calls.json("GET", f"/v1/batches/{batch_id}")
                silent = 0
            except NotFound:
                return None
            except (GatewayAway, Unavailable):
                silent += 1
                if silent >= _MOST_SILENT_LOOKS:
                    raise
                # It is being restarted: what it has answered is kept.
                self._wait(min(_LOOK_SECONDS * silent, _MOST_LOOK_SECONDS))
                continue
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            if done != shown and batch["status"] != "validating":
                shown = done
                complain(f"{batch_id}: {done} of {counts['total']} lines, {counts['failed']} failed")
            if batch["status"] == "failed":
                problem = ((batch.get("errors") or {}).get("data") or [{}])[0]
                raise StartupError(
                    f"--endpoint {self._endpoint}: {batch_id} failed: {problem.get('message')}", flag="--endpoint"
                )
            if batch["status"] not in _LIVE:
                return batch
            self._wait(_LOOK_SECONDS)

    def _answers_of(self, batch: dict[str, Any]) -> Iterator[tuple[str, Answer | Exception]]:
        for file_id in (batch["output_file_id"], batch["error_file_id"]):
            if file_id is None:
                continue
            with contextlib.closing(self._calls.lines(file_id)) as lines:
                for line in lines:
                    response = line["response"]
                    if response is None:
                        # It never ran: another batch asks it.
                        continue
                    ok = response["status_code"] == 200
                    body = response["body"]
                    yield line["custom_id"], _answer(body) if ok else error_of(response["status_code"], body)


class _Lines:
    """Lines of a batch's file, each different one once; `wanted` has the indexes of those without an answer."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.url = ""
        self.num_bytes = 0
        self.wanted: dict[str, list[int]] = {}

    def add(self, index: int, request: tuple[str, dict[str, Any]]) -> None:
        """Add a request: its endpoint and body. Equal ones have equal answers, so they are asked once."""
        url, body = request
        assert self.url in ("", url)
        self.url = url
        text = json.dumps(body, sort_keys=True)
        key = hashlib.sha256(f"{url} {text}".encode()).hexdigest()[:_KEY_CHARS]
        if key in self.wanted:
            self.wanted[key].append(index)
            return
        self.wanted[key] = [index]
        head = json.dumps({"custom_id": key, "method": "POST", "url": url})
        self.num_bytes += self._file.write(f'{head[:-1]}, "body": {text}}}\n'.encode())

    def take(self, key: str) -> list[int]:
        """Return the indexes that wait for an answer, and forget them."""
        return self.wanted.pop(key, [])

    def file(self) -> BinaryIO:
        """Return the lines that are still wanted, as a file."""
        self._file.seek(0)
        kept = [line for line in self._file if json.loads(line)["custom_id"] in self.wanted]
        self._file.seek(0)
        self._file.truncate()
        self.num_bytes = sum(self._file.write(line) for line in kept)
        return self._file


def _request(asked: Any, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if is_conversation(asked):
        return _CHATS, {"messages": asked, **options}
    return _TEXTS, {"prompt": asked, **options}


def _answer(body: dict[str, Any]) -> Answer:
    texts, reasoning = [], []
    for choice in body["choices"]:
        message = choice.get("message")
        texts.append(choice["text"] if message is None else message["content"] or "")
        reasoning.append("" if message is None else message.get("reasoning_content") or "")
    usage = body.get("usage") or {}
    reason = str(body["choices"][0].get("finish_reason") or "")
    return Answer(texts, reason, int(usage.get("completion_tokens") or 0), reasoning if any(reasoning) else [])
