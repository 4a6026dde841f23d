"""Hub of one model on loopback, over plain HTTP, that sends as much of a file as a test allows, breaks connections and
changes bytes. It speaks the API of Hugging Face's hub and that of ModelScope's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

SHA = "0123456789abcdef0123456789abcdef01234567"
# huggingface_hub reads a response in pieces of this size: less is no progress.
HUB_CHUNK = 10 * 1024 * 1024
_LARGE = 1 << 20


@dataclass
class Hub:
    """A running hub with the model `repo`, and the variables that make a process use it."""

    repo: str
    files: dict[str, bytes]
    address: str
    cache: Path
    # File whose bytes a test allows; all others are sent at once.
    held: str | None = None
    # File -> bytes after which each of its connections breaks; None in place of them: no longer.
    breaks: dict[str, int | None] = field(default_factory=dict)
    # File -> number of times that its first byte is another one than it should be.
    changes: dict[str, int] = field(default_factory=dict)
    # Names of files whose bytes were asked for, in order.
    sent: list[str] = field(default_factory=list)
    # Where the bytes began that were asked for.
    starts: list[int] = field(default_factory=list)
    # Bytes of the held file that may be sent, in all; None: all.
    _allowed: int | None = None
    _used: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that asks this hub and has an empty cache."""
        return {
            "HF_ENDPOINT": f"http://{self.address}",
            "HF_HOME": str(self.cache),
            "HF_HUB_CACHE": str(self.cache / "hub"),
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_TOKEN": "",
            # A held file is no lost connection.
            "HF_HUB_DOWNLOAD_TIMEOUT": "600",
            "HF_HUB_ETAG_TIMEOUT": "600",
        }

    def allow(self, count: int | None) -> None:
        """Let so many bytes of the held file be sent; None: no bound any more."""
        with self._changed:
            self._allowed = count
            self._changed.notify_all()

    def take(self, count: int) -> int:
        """Wait until bytes may be sent; return how many of `count`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._allowed is None or self._used < self._allowed, 600):
                raise TimeoutError("no test allowed more bytes")
            taken = count if self._allowed is None else min(count, self._allowed - self._used)
            self._used += taken
            return taken


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: Any) -> None:
        """Write no access log."""

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        api = f"/api/models/{hub.repo}"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{SHA}"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in hub.files.items()]
            self._json({"_id": "1", "id": hub.repo, "modelId": hub.repo, "sha": SHA, "siblings": siblings})
        elif path == f"{api}/tree/{SHA}":
            self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                    for name, data in hub.files.items()
                ]
            )
        elif path.startswith(f"/{hub.repo}/resolve/") and (name := path.rpartition("/")[2]) in hub.files:
            self._file(name, hub.files[name], with_body=with_body)
        elif path == f"/api/v1/models/{hub.repo}/repo/files":
            files = [
                {"Path": name, "Type": "blob", "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            self._json({"Code": 200, "Success": True, "Data": {"Files": [*files, {"Path": "onnx", "Type": "tree"}]}})
        elif path == f"/api/v1/models/{hub.repo}/repo":
            name = parse_qs(self.path.partition("?")[2])["FilePath"][0]
            self._file(name, hub.files[name], with_body=with_body)
        else:
            self.send_response(404)
            is_ours = path.startswith((api, f"/{hub.repo}/"))
            self.send_header("X-Error-Code", "RevisionNotFound" if is_ours else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, name: str, data: bytes, *, with_body: bool) -> None:
        hub, wanted = self.hub, self.headers.get("Range")
        begin = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", f'"{_digest(data)}"')
        self.send_header("Content-Length", str(len(data) - begin))
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not with_body:
            return
        hub.sent.append(name)
        hub.starts.append(begin)
        if begin == 0 and hub.changes.get(name, 0) > 0:
            hub.changes[name] -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        most = hub.breaks.get(name)
        end = len(data) if most is None else min(len(data), begin + most)
        place = begin
        # A client that was stopped is gone.
        with contextlib.suppress(OSError):
            while place < end:
                count = min(end - place, 1 << 20)
                count = hub.take(count) if name == hub.held else count
                self.wfile.write(data[place : place + count])
                place += count
        if end < len(data):
            self.close_connection = True


def _digest(data: bytes) -> str:
    """Checksum that a hub tells of a file: SHA-256 of large ones, git's own of others."""
    if len(data) > _LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def running_hub(
    files: dict[str, bytes], cache: Path, *, held: str | None = None, repo: str = "owner/tiny"
) -> Iterator[Hub]:
    """Run a hub with one model of these files; `cache` is for the processes that ask it, and `held` of Hub."""

    class Handler(_Handler):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Handler.hub = hub = Hub(repo, files, f"127.0.0.1:{server.server_port}", cache, held)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.allow(None)
        server.shutdown()
        server.server_close()
        thread.join()
