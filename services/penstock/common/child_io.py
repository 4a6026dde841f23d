"""How a parent and its child processes talk: JSON messages, each behind four bytes of length, over pipes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import struct
import sys
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<I")


def pack(message: Any) -> bytes:
    """A message as it travels."""
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> Any:
    """The next message; raises EOFError at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    return _unpack(stream.read(_LENGTH.unpack(head)[0]))


def _unpack(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "surrogatepass"))


def claim_stdout() -> BinaryIO:
    """The child's end for answers. Whatever libraries print goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return answers


def forbid_torch() -> None:
    """Make transformers believe that torch is not installed: it would import it, which costs seconds and 200 MB.

    None in sys.modules is how Python itself spells "cannot be imported"; this transformers has no switch for it.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    logging.disable(logging.WARNING)


class Child:
    """The parent's view of a child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process has no pipes")
        self._process = process
        self._requests = process.stdin
        self._answers = process.stdout

    @classmethod
    async def spawn(cls, module: str, environment: dict[str, str]) -> Child:
        """Start `python -m module`: a new program, not a fork, since grpc's threads do not survive forks.

        In a session of its own: Ctrl-C and signals to the parent's group are for the parent, which still needs its
        children to drain. They end with the parent, whatever ends it: their pipe from it ends.
        """
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", module)
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True
            )
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus the number of the signal that ended it."""
        return self._process.returncode

    async def ask(self, message: Any) -> Any:
        """Send a message and return the answer. Raises ChildEnded when the child ends instead."""
        try:
            self._requests.write(pack(message))
            await self._requests.drain()
            size = _LENGTH.unpack(await self._answers.readexactly(_LENGTH.size))[0]
            return _unpack(await self._answers.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            with contextlib.suppress(TimeoutError):  # its status says why; it is about to have one
                await asyncio.wait_for(self._process.wait(), 1.0)
            raise ChildEnded from error

    async def kill(self) -> None:
        """End the child now and reap it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class ChildEnded(Exception):
    """A child process ended before it answered."""
