"""Keys of the file as they are now, found by a caller's bearer token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.common.credentials import bearer_token, secret_digest
from penstock.common.errors import PermissionDenied, StartupError, Unauthenticated
from penstock.common.logging import get_logger
from penstock.router.keys.api_key import ApiKey
from penstock.router.keys.keys_file import read_keys

_log = get_logger("penstock.router")


class KeyRing:
    """Keys of one file. `find` may be called on any thread, `refresh` on one at a time."""

    def __init__(self, path: str, max_keys: int, *, clock: Callable[[], float] = time.time) -> None:
        """Read the file. Raises StartupError naming --keys-file."""
        self._path, self._max_keys, self._clock = path, max_keys, clock
        self._reading = threading.Lock()
        self._problem = ""
        # Digests that an operator revoked while the routers run.
        self._revoked: frozenset[bytes] = frozenset()
        self._stamp = self._stamp_now()
        self._keys = read_keys(path, max_keys)
        self._by_digest = _by_digest(self._keys)

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All keys of the file, in its order."""
        return self._keys

    def is_revoked(self, key: ApiKey) -> bool:
        """True for a key that was revoked, in the file or by an operator's call."""
        return key.revoked or all(digest in self._revoked for digest in key.digests)

    def find(self, authorization: str | bytes | None) -> ApiKey | None:
        """Return the key of a call's `authorization` metadata; None for a token that is no key.

        Raises Unauthenticated for one that was revoked or has expired.
        """
        token = bearer_token(authorization)
        if not token:
            return None
        # A look-up among digests takes a time that tells nothing about secrets: nobody can choose a token by a part of
        # its digest.
        digest = secret_digest(token)
        key = self._by_digest.get(digest)
        if key is not None:
            self._check(key, digest, "this key", Unauthenticated)
        return key

    def with_digest(self, digest: bytes) -> ApiKey | None:
        """Return the key that has a secret with this SHA-256, for a call that another token makes; None: there is none.

        Raises PermissionDenied for one that was revoked or has expired.
        """
        key = self._by_digest.get(digest)
        if key is not None:
            self._check(key, digest, "the key that this call counts for", PermissionDenied)
        return key

    def _check(
        self, key: ApiKey, digest: bytes, shown: str, refused: type[Unauthenticated] | type[PermissionDenied]
    ) -> None:
        """Raise `refused` for a secret of a key that is not valid any more. `shown`: the key's name in the message."""
        if key.revoked or digest in self._revoked:
            raise refused(f"{shown} was revoked", reason="KEY_REVOKED")
        if key.expires is not None and key.expires <= self._clock():
            raise refused(f"{shown} has expired", reason="KEY_EXPIRED")

    def revoke(self, digests: Iterable[bytes]) -> None:
        """Refuse the secrets with these digests, and those revoked before, whatever the file says."""
        self._revoked = self._revoked.union(digests)

    def refresh(self) -> bool:
        """Read the file again if it changed; return True when the keys are others. It takes a moment: not for a loop.

        A file that is wrong, or missing for a moment, changes nothing; the log tells it once.
        """
        with self._reading:
            try:
                stamp = self._stamp_now()
                if stamp == self._stamp:
                    return False
                keys = read_keys(self._path, self._max_keys)
            except StartupError as error:
                if error.message != self._problem:
                    self._problem = error.message
                    _log.error("keys as before: the file is wrong", cause=error.message)
                return False
            self._problem, self._stamp = "", stamp
            self._keys, self._by_digest = keys, _by_digest(keys)
        _log.info("keys read", keys=len(keys))
        return True

    def _stamp_now(self) -> tuple[int, int, int]:
        try:
            status = Path(self._path).expanduser().stat()
        except OSError as error:
            raise StartupError(f"--keys-file {self._path}: {error.strerror}", flag="--keys-file") from error
        return status.st_mtime_ns, status.st_ino, status.st_size


def _by_digest(keys: Iterable[ApiKey]) -> dict[bytes, ApiKey]:
    return {digest: key for key in keys for digest in key.digests}
