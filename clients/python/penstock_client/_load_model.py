"""LoadModel and UnloadModel: requests from a folder or a path, and answers as plain values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.errors import InvalidArgument, PenstockError
from penstock.v1 import model_pb2

from penstock_client._exceptions import Internal

# gRPC's own limit on a message is 4 MiB.
CHUNK_BYTES = 2 << 20
# Prefix of fields in a load's first message, which is not an argument of the caller.
_START = "start."
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TEXTS = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """State of one stage of a load: receive, load_weights, tune, warm_up. A total of 0: there is nothing to count."""

    stage: str
    done_bytes: int
    total_bytes: int
    ended: bool


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """An unloaded model, and the memory (resident) of its process before and after."""

    name: str
    resident_bytes_before: int
    resident_bytes_after: int


def load_requests(
    folder: Path | str | None, path: str | None, name: str, options: Mapping[str, Any] | None
) -> Iterator[model_pb2.LoadModelRequest]:
    """Return the messages of a load: the start, and the bytes of the folder's files on demand.

    Raises ValueError unless exactly one of `folder` and `path` is given, and for an unknown option; OSError.
    """
    if (folder is None) == (path is None):
        raise ValueError("load_model takes a folder to send, or a path for the server to read")
    start = model_pb2.LoadModelStart(name=name, options=model_pb2.LoadModelOptions(**(options or {})))
    if path is not None:
        start.path = path
        return iter((model_pb2.LoadModelRequest(start=start),))
    files = model_files(Path(folder or "").expanduser())
    for file in files:
        start.upload.files.add(name=file.name, size_bytes=file.stat().st_size)
    if not name:
        start.name = files[0].resolve().parent.name
    return _with_bytes(start, files)


@contextmanager
def naming_path() -> Iterator[None]:
    """Name the caller's argument in errors about the message's `start`: path for start.path."""
    try:
        yield
    except PenstockError as error:
        if not (error.field or "").startswith(_START):
            raise
        message = error.message.removeprefix(_START)
        kind = type(error)
        if isinstance(error, InvalidArgument):
            field = (error.field or "").removeprefix(_START)
            raise InvalidArgument(field, message.removeprefix(f"{field}: "), reason=error.reason) from error
        raise kind(message, reason=error.reason, metadata=error.metadata) from error


def model_files(folder: Path) -> list[Path]:
    """Return the files that make the model in `folder`, config.json first. Raises OSError for a missing one."""
    texts = [folder / name for name in TEXTS if (folder / name).is_file()]
    if not texts or texts[0].name != CONFIG:
        raise FileNotFoundError(2, "there is no config.json", str(folder))
    if (folder / SINGLE).is_file():
        return [*texts, folder / SINGLE]
    shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    return [*texts, folder / INDEX, *(folder / name for name in dict.fromkeys(shards))]


class LoadState:
    """State of a load: the messages sent, and the server's answers."""

    def __init__(self, on_progress: Callable[[LoadProgress], None] | None = None) -> None:
        self._on_progress = on_progress
        self._info: model_pb2.GetModelInfoResponse | None = None
        self._sent_bytes = 0
        # True until the server has answered the last message.
        self.waits = False
        self.is_over = False

    def sent(self, request: model_pb2.LoadModelRequest) -> None:
        """Note a message; progress answers those of an upload."""
        self._sent_bytes += len(request.chunk.data)
        self.waits = request.HasField("chunk") or request.start.HasField("upload")

    def take(self, answer: Any, end: Any) -> None:
        """Take an answer; `end` follows the last one."""
        if answer is end:
            self.is_over, self.waits = True, False
        elif answer.HasField("info"):
            self._info = answer.info
        else:
            progress = progress_of(answer.progress)
            if progress.stage == "receive" and progress.done_bytes >= self._sent_bytes:
                self.waits = False
            if self._on_progress is not None:
                self._on_progress(progress)

    def info(self) -> model_pb2.GetModelInfoResponse:
        """Return the model's facts. Raises Internal when the call ended without them."""
        if self._info is None:
            raise Internal("the load ended without the model's facts", reason="PROTOCOL")
        return self._info


def progress_of(progress: model_pb2.LoadModelProgress) -> LoadProgress:
    """Return a state as a plain value."""
    return LoadProgress(progress.stage, progress.done_bytes, progress.total_bytes, progress.ended)


def unloaded_of(response: model_pb2.UnloadModelResponse) -> UnloadedModel:
    """Return the answer as a plain value."""
    return UnloadedModel(response.model, response.resident_bytes_before, response.resident_bytes_after)


def _with_bytes(start: model_pb2.LoadModelStart, files: list[Path]) -> Iterator[model_pb2.LoadModelRequest]:
    yield model_pb2.LoadModelRequest(start=start)
    for file in files:
        with file.open("rb") as opened:
            while data := opened.read(CHUNK_BYTES):
                yield model_pb2.LoadModelRequest(chunk=model_pb2.ModelFileChunk(name=file.name, data=data))
