"""Tar archives of a model's folder, for EngineLLM's constructors: made, and sent as a load's messages."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from penstock.v1 import model_pb2

from penstock_client._load_model import CHUNK_BYTES, INDEX, TEXTS, model_files

if TYPE_CHECKING:
    from tarfile import TarFile, TarInfo

# Name of a model that comes in an archive, which has none.
ARCHIVED = "model"


def archive_of(folder: Path) -> bytes:
    """Return the files that make the model in `folder` as a tar archive. Raises OSError for a missing one."""
    import tarfile  # takes milliseconds that other clients do not owe

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for file in model_files(folder):
            archive.add(file.resolve(), arcname=file.name)
    return data.getvalue()


def archive_requests(data: bytes, name: str) -> Iterator[model_pb2.LoadModelRequest]:
    """Return the messages of a load of the files in a tar archive; what belongs to no model is left out.

    Raises TypeError for bytes that are none.
    """
    import tarfile

    try:
        archive = tarfile.open(fileobj=io.BytesIO(data))  # noqa: SIM115 (there is no file to close)
        # Folders in the archive do not matter: names are plain.
        found = {PurePosixPath(one.name).name: one for one in archive.getmembers() if one.isfile()}
    except tarfile.TarError:
        raise TypeError("the bytes must be those of a tar archive of a model's folder: see EngineLLM.archive") from None
    names = [one for one in (*TEXTS, INDEX) if one in found]
    names += [one for one in found if one.endswith(".safetensors")]
    start = model_pb2.LoadModelStart(name=name or ARCHIVED)
    for one in names:
        start.upload.files.add(name=one, size_bytes=found[one].size)
    # So that an archive without any is refused as an upload.
    start.upload.SetInParent()
    return _with_members(start, archive, {one: found[one] for one in names})


def _with_members(
    start: model_pb2.LoadModelStart, archive: TarFile, members: Mapping[str, TarInfo]
) -> Iterator[model_pb2.LoadModelRequest]:
    yield model_pb2.LoadModelRequest(start=start)
    for name, member in members.items():
        opened = archive.extractfile(member)
        while opened is not None and (data := opened.read(CHUNK_BYTES)):
            yield model_pb2.LoadModelRequest(chunk=model_pb2.ModelFileChunk(name=name, data=data))
