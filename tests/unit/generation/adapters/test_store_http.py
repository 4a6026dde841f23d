"""HTTP of stores of adapters: what a store may do to the service that asks it."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from penstock.common.errors import Unavailable
from penstock.generation.adapters.store_http import StoredFile, StoreHttp

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %b\r\n\r\n"


@contextmanager
def answering(data: bytes) -> Iterator[str]:
    """Answer one request with some bytes, and then send nothing more; yield the URL."""
    over = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(data)
            over.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/file"
        finally:
            over.set()
            thread.join()


def test_a_store_that_sends_a_byte_now_and_then_has_no_more_time_than_others(tmp_path: Path) -> None:
    told: list[StoredFile] = []
    # The second look is too late: the first byte has come before it, and no more comes.
    looks = itertools.count()
    http = StoreHttp("the store", may_redirect=False, clock=lambda: float(next(looks)))
    with answering(HEAD % b"1000" + b"x") as url, pytest.raises(Unavailable, match="--adapter-fetch-seconds"):
        http.copy(url, {}, tmp_path / "file", 0.5, told.append)
    assert told == [StoredFile(1000, "")]


def test_a_length_that_is_no_file_s_is_no_answer_of_a_store(tmp_path: Path) -> None:
    http = StoreHttp("the store", may_redirect=False)
    with answering(HEAD % (b"9" * 5000)) as url, pytest.raises(Unavailable, match="does not answer as such a store"):
        http.copy(url, {}, tmp_path / "file", 1e9, lambda _: None)
