"""Calls of `penstock infer` to a gateway's `/v1/files` and `/v1/batches`, by the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import ssl
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from penstock.cli.client.connection import ConnectionConfig
from penstock.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    StartupError,
    Unauthenticated,
    Unavailable,
)
from penstock.common.shown_url import shown_url

# Bytes that are sent or read at once, and the longest answer that is read whole.
_PIECE_BYTES, _MOST_ANSWER_BYTES = 256 << 10, 16 << 20
# Seconds without a byte after which an answer is given up.
_SILENT_SECONDS = 120.0
_CREATED = 200


class GatewayAway(StartupError):
    """A gateway that could not be reached, or broke off its answer."""


class GatewayCalls:
    """One gateway, by its address. Each call has a connection of its own: minutes lie between them."""

    def __init__(self, connection: ConnectionConfig) -> None:
        """Read the files that the flags name. Raises StartupError naming a flag."""
        parts = urlsplit(connection.address)
        if parts.hostname is None or parts.path.rstrip("/") not in ("", "/v1"):
            raise StartupError(
                f"--endpoint {shown_url(connection.address)}: expected http://HOST:PORT, or host:port of a router",
                flag="--endpoint",
            )
        self._shown = shown_url(connection.address)
        self._host, self._port = parts.hostname, parts.port
        self._seconds = connection.connect_timeout_seconds
        self._tls = _tls(connection) if parts.scheme == "https" else None
        self._headers = {"authorization": f"Bearer {token}"} if (token := _token(connection)) else {}
        if self._headers and self._tls is None and self._host not in ("localhost", "127.0.0.1", "::1"):
            raise StartupError("--token-file needs https:// for a gateway that is not loopback", flag="--token-file")

    def json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON of one call's answer. Raises PenstockError, GatewayAway."""
        sent = None if body is None else json.dumps(body).encode()
        headers = {} if sent is None else {"content-type": "application/json"}
        with self._answer(method, path, sent, headers) as answer:
            read: dict[str, Any] = json.loads(answer.read(_MOST_ANSWER_BYTES))
            return read

    def upload(self, file: BinaryIO, num_bytes: int) -> str:
        """Send a file of a batch from its start, and return its id. Raises PenstockError, GatewayAway."""
        boundary = secrets.token_hex(16)
        head = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
            'content-disposition: form-data; name="file"; filename="infer.jsonl"\r\n'
            "content-type: application/jsonl\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        file.seek(0)

        def pieces() -> Iterator[bytes]:
            yield head
            while piece := file.read(_PIECE_BYTES):
                yield piece
            yield tail

        headers = {
            "content-type": f"multipart/form-data; boundary={boundary}",
            "content-length": str(len(head) + num_bytes + len(tail)),
        }
        with self._answer("POST", "/v1/files", pieces(), headers) as answer:
            return str(json.loads(answer.read(_MOST_ANSWER_BYTES))["id"])

    def lines(self, file_id: str) -> Generator[dict[str, Any], None, None]:
        """Yield the lines of a file of answers as they arrive. Raises PenstockError, GatewayAway."""
        with self._answer("GET", f"/v1/files/{file_id}/content") as answer:
            while line := answer.readline():
                yield json.loads(line)

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        tls = self._tls
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
            if tls is None
            else http.client.HTTPSConnection(self._host, self._port, timeout=self._seconds, context=tls)
        )
        try:
            connection.connect()
            connection.sock.settimeout(_SILENT_SECONDS)
            connection.request(method, path, body, {**self._headers, **(headers or {})})
            answer = connection.getresponse()
            if answer.status != _CREATED:
                raise error_of(answer.status, answer.read(_MOST_ANSWER_BYTES))
            yield answer
        except ssl.SSLError as error:
            raise StartupError(f"--endpoint {self._shown}: {error}", flag="--endpoint") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise GatewayAway(f"--endpoint {self._shown} does not answer: {error}", flag="--endpoint") from error
        finally:
            connection.close()


def error_of(status: int, body: bytes | dict[str, Any]) -> PenstockError:
    """Return a gateway's answer with an error as one of ours."""
    try:
        told = (json.loads(body) if isinstance(body, bytes) else body)["error"]
        message, reason, field = str(told["message"]), str(told.get("reason") or ""), told.get("field")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, reason, field = f"the gateway answered with status {status}", "", None
    if status == 400 and isinstance(field, str) and field:
        return InvalidArgument(field, message.partition(": ")[2] or message, reason=reason or "INVALID_ARGUMENT")
    kinds: dict[int, type[PenstockError]] = {
        400: FailedPrecondition,
        401: Unauthenticated,
        404: NotFound,
        413: ResourceExhausted,
        429: ResourceExhausted,
    }
    return kinds.get(status, Unavailable)(message, reason=reason or "UNKNOWN")


def _token(connection: ConnectionConfig) -> str | None:
    if connection.token_file is None:
        return None
    try:
        return Path(connection.token_file).expanduser().read_text().split()[0]
    except (OSError, UnicodeDecodeError, IndexError) as error:
        why = error.strerror if isinstance(error, OSError) else "it has no token"
        raise StartupError(f"--token-file {connection.token_file}: {why}", flag="--token-file") from error


def _tls(connection: ConnectionConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(
            cafile=str(Path(connection.tls_ca).expanduser()) if connection.tls_ca else None
        )
    except (OSError, ssl.SSLError) as error:
        raise StartupError(f"--tls-ca {connection.tls_ca}: {error}", flag="--tls-ca") from error
    if connection.client_cert and connection.client_key:
        try:
            context.load_cert_chain(Path(connection.client_cert).expanduser(), Path(connection.client_key).expanduser())
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"--client-cert {connection.client_cert}: {error}", flag="--client-cert") from error
    return context
