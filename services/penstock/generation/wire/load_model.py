"""Messages of LoadModel, and of the calls that end work with a grace, as plain data."""

from __future__ import annotations

import math
from typing import Any

from penstock.common.errors import InvalidArgument
from penstock.common.options import options_of
from penstock.common.progress import StageProgress
from penstock.common.unknown_fields import refuse_unknown_fields
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.load_order import FileSize, LoadOrder
from penstock.v1 import admin_pb2, model_pb2


def to_order(message: model_pb2.LoadModelRequest) -> LoadOrder:
    """Return the order in a stream's first message. Raises InvalidArgument naming the field."""
    if message.WhichOneof("request") != "start":
        raise InvalidArgument("start", "must come first")
    start = message.start
    source = start.WhichOneof("source")
    if source is None:
        raise InvalidArgument("start.source", "must be path or upload")
    files = tuple(FileSize(file.name, file.size_bytes) for file in start.upload.files)
    return LoadOrder(start.name, start.path if source == "path" else None, files, _overrides(start.options))


def to_chunk(message: model_pb2.LoadModelRequest) -> tuple[str, bytes]:
    """Return name and bytes of a later message. Raises InvalidArgument."""
    if message.WhichOneof("request") != "chunk":
        raise InvalidArgument("chunk", "must follow start, and nothing else")
    return message.chunk.name, message.chunk.data


def from_progress(progress: StageProgress) -> model_pb2.LoadModelResponse:
    """Return a message of progress."""
    return model_pb2.LoadModelResponse(
        progress=model_pb2.LoadModelProgress(
            stage=progress.stage, done_bytes=progress.done, total_bytes=progress.total, ended=progress.ended
        )
    )


def to_grace(
    request: admin_pb2.DrainRequest | admin_pb2.ReloadRequest | model_pb2.UnloadModelRequest,
) -> float | None:
    """Return the seconds that live requests have; None where the field is unset. Raises InvalidArgument."""
    grace = request.grace_seconds if request.HasField("grace_seconds") else None
    if grace is not None and not (math.isfinite(grace) and grace >= 0):
        raise InvalidArgument("grace_seconds", "must be finite and >= 0")
    return grace


def _overrides(options: model_pb2.LoadModelOptions) -> dict[str, Any]:
    """Return the set options, by field of the configuration. Raises InvalidArgument for a value that the flag would
    refuse, or an option that this release does not know."""
    refuse_unknown_fields(options, "start.options")
    known = {bound.name: bound for bound in options_of(GenerationServiceConfig)}
    found: dict[str, Any] = {}
    for descriptor, value in options.ListFields():
        bound = known[descriptor.name]
        try:
            found[bound.name] = bound.parse(value) if isinstance(value, str) else value
            bound.check(found[bound.name])
        except ValueError as error:
            raise InvalidArgument(f"start.options.{bound.name}", str(error)) from None
    return found
