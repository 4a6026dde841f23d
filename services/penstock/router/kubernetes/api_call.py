"""One GET of the Kubernetes API: HTTP/1.1 over asyncio, a body read whole or by lines as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from penstock import __version__
from penstock.router.kubernetes.cluster_api import ClusterApi

_MOST_HEAD_BYTES = 64 << 10
_MOST_REASON_CHARS = 200


class ApiError(Exception):
    """A call that failed: `status` is 0 where no answer came."""

    def __init__(self, message: str, status: int = 0) -> None:
        """Make it. `message`: for the log."""
        super().__init__(message)
        self.status = status


class ApiAnswer:
    """A body that comes. Iterate over `lines` once, or `read` it."""

    def __init__(self, reader: asyncio.StreamReader, headers: dict[str, str], max_bytes: int) -> None:
        """Make it. `max_bytes`: most of one line, or of the whole."""
        self._reader = reader
        self._headers = headers
        self._max_bytes = max_bytes

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield each line without its end. Raises ApiError."""
        rest = bytearray()
        async for piece in self._pieces():
            rest += piece
            *whole, rest = rest.split(b"\n")
            for line in whole:
                yield bytes(line)
            self._require_small(len(rest))
        if rest:
            yield bytes(rest)

    async def read(self) -> bytes:
        """Read the whole body. Raises ApiError."""
        whole = bytearray()
        async for piece in self._pieces():
            whole += piece
            self._require_small(len(whole))
        return bytes(whole)

    def _require_small(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise ApiError(f"its answer exceeds --max-endpoints-bytes ({self._max_bytes})")

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self._headers.get("transfer-encoding", "").lower() == "chunked":
            while size := _chunk_size(await self._reader.readuntil(b"\r\n")):
                async for piece in self._exactly(size):
                    yield piece
                await self._reader.readexactly(2)
        elif (length := self._headers.get("content-length")) is not None:
            if not length.isdigit():
                raise ApiError("its answer has no length")
            async for piece in self._exactly(int(length)):
                yield piece
        else:
            while piece := await self._reader.read(_MOST_HEAD_BYTES):
                yield piece

    async def _exactly(self, left: int) -> AsyncIterator[bytes]:
        while left > 0:
            piece = await self._reader.read(min(left, _MOST_HEAD_BYTES))
            if not piece:
                raise ApiError("it broke off its answer")
            left -= len(piece)
            yield piece


@contextlib.asynccontextmanager
async def get(api: ClusterApi, path: str, *, seconds: float, max_bytes: int) -> AsyncIterator[ApiAnswer]:
    """Ask for `path`, and give the body of an answer of status 200.

    `seconds`: for all of it. Raises ApiError, with the status of another answer.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(seconds):
            # Longer than a head: readuntil then fails rather than buffers.
            reader, writer = await asyncio.open_connection(api.host, api.port, ssl=api.tls, limit=_MOST_HEAD_BYTES)
            writer.write(_request(api, path))
            await writer.drain()
            status, headers = _head(await reader.readuntil(b"\r\n\r\n"))
            answer = ApiAnswer(reader, headers, max_bytes)
            if status != 200:
                raise ApiError(f"HTTP {status}: {_reason(await answer.read())}", status)
            yield answer
    except TimeoutError as error:
        raise ApiError("it did not answer in time") from error
    except asyncio.IncompleteReadError as error:
        raise ApiError("it broke off its answer") from error
    except OSError as error:
        # First: a certificate that is not trusted is a ValueError as well.
        raise ApiError(error.strerror or str(error) or type(error).__name__) from error
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise ApiError("its answer cannot be read") from error
    finally:
        if writer is not None:
            writer.close()


def _request(api: ClusterApi, path: str) -> bytes:
    token = api.token()
    lines = [
        f"GET {path} HTTP/1.1",
        f"host: {api.authority}",
        "accept: application/json",
        f"user-agent: penstock-router/{__version__}",
        "connection: close",
        *([f"authorization: Bearer {token}"] if token else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    """Read status and headers. Raises ValueError."""
    first, *rest = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    version, status, *_ = first.split(" ")
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise ValueError(version)
    pairs = (line.partition(":") for line in rest)
    return int(status), {name.lower(): text.strip() for name, _, text in pairs}


def _chunk_size(line: bytes) -> int:
    """Read the size of a chunk, 0 at the end. Raises ValueError."""
    size = int(line.partition(b";")[0].strip(), 16)
    if size < 0:
        raise ValueError(line)
    return size


def _reason(body: bytes) -> str:
    """Message of a Status object, shortened."""
    try:
        found: Any = json.loads(body)
        message = found.get("message") if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        message = None
    return str(message or "no reason given")[:_MOST_REASON_CHARS]
