"""Exchange of a parent with its child processes: JSON messages over pipes, each after four bytes of length."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from penstock.common.child_signal import signal_child

_LENGTH = struct.Struct("<I")


def pack(message: Any) -> bytes:
    """Encode a message with its length in front."""
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> Any:
    """Read the next message. Raises EOFError at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    return _unpack(stream.read(_LENGTH.unpack(head)[0]))


def _unpack(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "surrogatepass"))


def claim_stdout() -> BinaryIO:
    """Return the child's pipe for answers. Output of libraries goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return answers


def forbid_torch() -> None:
    """Hide torch from transformers, which would import it: that costs seconds and 200 MB.

    None in sys.modules is Python's own mark for "cannot be imported"; this transformers has no switch for it.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    logging.disable(logging.WARNING)


def processor_seconds(pid: int) -> float | None:
    """Seconds of the processor that a process of this user has taken; None where /proc does not tell them."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Behind the program's name, which may have anything: user and system time are the 12th and 13th.
            user, system = file.read().rpartition(b")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


class Child:
    """Child process, as seen by its parent. It answers in order. Belongs to one event loop."""

    def __init__(self, transport: asyncio.SubprocessTransport, wire: _Wire) -> None:
        self._transport = transport
        self._wire = wire
        # Of another class with each event loop.
        self._requests = cast("asyncio.WriteTransport", transport.get_pipe_transport(0))

    @classmethod
    async def spawn(cls, module: str, environment: dict[str, str]) -> Child:
        """Start `python -m module`: a new program, not a fork, since grpc's threads do not survive forks.

        It has its own session: Ctrl-C and signals to the parent's group reach only the parent, which still needs its
        children to drain. Children end with the parent, even a killed one, because their pipe from it ends.
        """
        command = (sys.executable, "-m", module)
        loop = asyncio.get_running_loop()
        return cls(
            *await loop.subprocess_exec(
                _Wire,
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None,
                env=environment,
                start_new_session=True,
            )
        )

    @property
    def pid(self) -> int:
        pid: int = self._transport.get_pid()
        return pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs, minus the number of the signal that ended it."""
        return self._transport.get_returncode()

    @property
    def processor_seconds(self) -> float | None:
        """Seconds of the processor that it has taken so far; None where the system does not tell, or it has ended."""
        return processor_seconds(self.pid)

    @property
    def ended(self) -> asyncio.Future[None]:
        """Future that is done once the child stops answering; its status follows."""
        return self._wire.ended

    def send(self, message: bytes, on_answer: Callable[[Any], None]) -> None:
        """Send a packed message; `on_answer` is called with the answer, unless the child ends before (`ended`).

        Nothing is limited here: the caller must send only a few at a time.
        """
        self._wire.waiting.append(on_answer)
        # uvloop's pipe to a child that has ended refuses what asyncio's drops: `ended` tells of it.
        with contextlib.suppress(RuntimeError):
            self._requests.write(message)

    async def ask(self, message: Any) -> Any:
        """Send a message and return the answer. Raises ChildEnded when the child ends instead."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def on_answer(value: Any) -> None:
            if not answer.done():
                answer.set_result(value)

        self.send(pack(message), on_answer)
        await asyncio.wait((answer, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        await self.wait_status()
        raise ChildEnded

    async def wait_status(self) -> None:
        """Wait a moment for `returncode`, once the child has ended."""
        await asyncio.wait((self._wire.exited,), timeout=1.0)

    async def kill(self) -> None:
        """End the child now and reap it."""
        signal_child(self, signal.SIGKILL)
        await asyncio.shield(self._wire.exited)
        self._transport.close()


class _Wire(asyncio.SubprocessProtocol):
    """Protocol of the pipes: it splits the stream into answers."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[None] = loop.create_future()
        # Receivers of the next answers, in order.
        self.waiting: deque[Callable[[Any], None]] = deque()
        self._received = bytearray()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
            if len(received) < end:
                return
            body = bytes(received[_LENGTH.size : end])
            del received[:end]
            self.waiting.popleft()(_unpack(body))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)


class ChildEnded(Exception):
    """A child process ended before it answered."""
