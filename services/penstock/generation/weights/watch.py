"""Looks after the files that weights are mapped from: what is written into them is what the model computes with."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence

from penstock.generation.host.mapped import MappedFile

# What a descriptor of a network's file system says when another host removed the file.
_GONE = (errno.ESTALE, errno.ENOENT)


class WeightsWritten(Exception):
    """Nothing that the process computes can be trusted any more. The message says which file, and what to do."""


async def weights_written(files: Sequence[MappedFile], seconds: float) -> WeightsWritten:
    """Look at `files` now and every so many seconds; returns when somebody wrote into one, or it cannot be looked at.

    Renaming another file over one, and removing it, are no such things: what is mapped stays.
    """
    while True:
        problem = await asyncio.to_thread(_problem, files)
        if problem is not None:
            return WeightsWritten(problem)
        await asyncio.sleep(seconds)


def _problem(files: Sequence[MappedFile]) -> str | None:
    """Blocking: a network's file system may take its time."""
    for file in files:
        try:
            if file.was_written():
                return (
                    f"{file.path} was written to while its weights were in use. Start again, and replace such files by "
                    "renaming a new one over them (or use --no-map-embeddings, where it is a checkpoint)"
                )
        except OSError as error:
            # Of anything else, such as a network that is away for a moment, the next look may know more.
            if error.errno in _GONE:
                return f"{file.path}, whose weights are in use, cannot be looked at any more ({error.strerror})"
    return None
