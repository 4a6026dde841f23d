"""HTTP to the stores that an operator has named: bounded in time and bytes, and led nowhere else by an answer."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from penstock.common.errors import FailedPrecondition, InvalidArgument, Unavailable
from penstock.generation.adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE

# Seconds without a byte after which a connection is given up, and the bytes that are read at once.
_SILENT_SECONDS, _PIECE_BYTES = 30.0, 1 << 20
_RETRY_SECONDS = 5.0
# Of a file's length.
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a store as its answer tells it, before its bytes. `tag`: changes with its bytes; may be empty."""

    num_bytes: int
    tag: str


class StoreHttp:
    """Requests to one store. Blocking."""

    def __init__(self, name: str, *, may_redirect: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: that of the store in errors. `may_redirect`: to https, or back to the store; else nowhere."""
        self._name, self._clock = name, clock
        self._opener = urllib.request.build_opener(_Redirects(may_redirect=may_redirect))

    def text(self, url: str, headers: Mapping[str, str], most_bytes: int) -> bytes:
        """Return a short answer. Raises InvalidArgument, FailedPrecondition and Unavailable as `copy`."""
        with self._answer("GET", url, headers) as answer:
            data = self._read(answer.read, most_bytes + 1)
        if len(data) > most_bytes:
            raise self._broken()
        return data

    def head(self, url: str, headers: Mapping[str, str]) -> StoredFile:
        """Return what the store tells of a file. Raises as `copy`."""
        with self._answer("HEAD", url, headers) as answer:
            return self._told(answer)

    def copy(
        self, url: str, headers: Mapping[str, str], target: Path, until: float, begin: Callable[[StoredFile], None]
    ) -> None:
        """Write a file of the store to `target`, until a time of the clock at most.

        `begin` is called before its first byte, and may raise.

        Raises InvalidArgument ADAPTER_PATH (the store has no such file), FailedPrecondition ADAPTER_STORE_DENIED, and
        Unavailable ADAPTER_STORE_DOWN.
        """
        with self._answer("GET", url, headers) as answer:
            told = self._told(answer)
            begin(told)
            left = told.num_bytes
            with target.open("wb") as file:
                while left:
                    if self._clock() > until:
                        raise self._down("did not send the files in time (--adapter-fetch-seconds)")
                    # What is there, not all of it: else a store that sends a byte now and then would have no limit.
                    piece = self._read(answer.read1, min(left, _PIECE_BYTES))
                    left -= len(piece)
                    file.write(piece)

    def _read(self, read: Callable[[int], bytes], count: int) -> bytes:
        try:
            piece = read(count)
        except (OSError, http.client.HTTPException) as error:
            raise self._down("broke off a file") from error
        if not piece:
            raise self._down("broke off a file")
        return piece

    def _answer(self, method: str, url: str, headers: Mapping[str, str]) -> Any:
        request = urllib.request.Request(url, method=method)
        for name, value in headers.items():
            # Not sent to where a redirection leads.
            request.add_unredirected_header(name, value)
        try:
            return self._opener.open(request, timeout=_SILENT_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            raise self._refusal(error.code) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._down("does not answer") from error

    def _refusal(self, status: int) -> Exception:
        if status in (404, 410):
            return InvalidArgument(
                "path", f"{self._name} has no {CONFIG_FILE} and {WEIGHTS_FILE} there", reason="ADAPTER_PATH"
            )
        if status == 412:
            return self._down("changed a file while it was read")
        if status in (400, 401, 403) or 300 <= status < 400:
            return FailedPrecondition(
                f"path: {self._name} refuses the service's credentials, or has no such place",
                reason="ADAPTER_STORE_DENIED",
            )
        return self._down(f"answered with status {status}")

    def _told(self, answer: Any) -> StoredFile:
        length = answer.headers.get("content-length") or ""
        # A store sends files as they are.
        is_number = length.isascii() and length.isdigit() and len(length) <= _MOST_DIGITS
        if not is_number or answer.headers.get("content-encoding"):
            raise self._broken()
        return StoredFile(int(length), answer.headers.get("etag") or "")

    def _broken(self) -> Unavailable:
        return self._down("does not answer as such a store does")

    def _down(self, what: str) -> Unavailable:
        return Unavailable(
            f"path: {self._name} {what}", reason="ADAPTER_STORE_DOWN", retry_after_seconds=_RETRY_SECONDS
        )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirection to https or within the store's own origin, where any is allowed."""

    max_redirections = 5

    def __init__(self, *, may_redirect: bool) -> None:
        self._may_redirect = may_redirect

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the request that follows; None: the redirection is the answer."""
        to, origin = urlsplit(newurl), urlsplit(req.full_url)
        is_own = (to.scheme, to.netloc) == (origin.scheme, origin.netloc)
        if not self._may_redirect or not (is_own or to.scheme == "https"):
            return None
        followed = super().redirect_request(req, fp, code, msg, headers, newurl)
        if followed is not None and is_own:
            for name, value in req.unredirected_hdrs.items():
                if name.lower() != "host":
                    followed.add_unredirected_header(name, value)
        return followed
