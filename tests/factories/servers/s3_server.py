"""Store of objects on loopback that speaks S3's GET and HEAD, and checks the signature of every request."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.generation.adapters.adapter_stores import signed_headers

KEY, SECRET, REGION = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "eu-test-1"


@dataclass
class ObjectStore:
    """A running store, and the variables that make a process use it."""

    address: str
    # Bytes by path: BUCKET/KEY.
    objects: dict[str, bytes] = field(default_factory=dict)
    # Paths of the files that were sent, in order.
    sent: list[str] = field(default_factory=list)
    # Bytes after which a file's connection breaks.
    breaks_after: int | None = None
    # Where all requests are sent in place of an answer.
    redirect: str | None = None
    # Status of all answers.
    status: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that may read it."""
        return {
            "AWS_ENDPOINT_URL_S3": f"http://{self.address}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
        }

    def put(self, place: str, files: dict[str, bytes]) -> None:
        """Keep files below BUCKET/PREFIX."""
        self.objects.update({f"{place}/{name}": data for name, data in files.items()})


class _ObjectHandler(BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: Any) -> None:
        """Write no access log."""

    def _answer(self, *, with_body: bool) -> None:
        store, path = self.store, self.path.lstrip("/")
        if store.redirect is not None:
            self._empty(307, location=store.redirect)
            return
        if store.status is not None:
            self._empty(store.status)
            return
        if not self._is_signed():
            self._empty(403)
            return
        data = store.objects.get(path)
        if data is None:
            self._empty(404)
            return
        tag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        if self.headers.get("if-match", tag) != tag:
            self._empty(412)
            return
        self.send_response(200)
        self.send_header("etag", tag)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if with_body:
            store.sent.append(path)
            self.wfile.write(data[: store.breaks_after])
            self.close_connection = store.breaks_after is not None

    def _is_signed(self) -> bool:
        """Sign the same again, from what came."""
        given = self.headers.get("authorization", "")
        names = given.partition("SignedHeaders=")[2].partition(",")[0].split(";")
        if not {"host", "x-amz-content-sha256", "x-amz-date"} <= set(names):
            return False
        now = datetime.strptime(self.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        headers = {name: self.headers.get(name, "") for name in names if name != "x-amz-date"}
        made = signed_headers(self.command, self.path, headers, key=KEY, secret=SECRET, region=REGION, now=now)
        return made["authorization"] == given

    def _empty(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", "0")
        self.end_headers()


@contextlib.contextmanager
def running_object_store() -> Iterator[ObjectStore]:
    """Run an empty store."""

    class Handler(_ObjectHandler):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Handler.store = store = ObjectStore(f"127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
