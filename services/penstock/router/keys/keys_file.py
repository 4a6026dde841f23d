"""File of keys (`--keys-file`): TOML, with a table for each key.

    [[keys]]
    label = "search-team"                  # its name in metrics, in the ledger and for operators
    sha256 = "9f86d081884c7d65…"           # of the secret, in hex; or the secret itself: secret = "sk-…"
    tenant = "search"                      # keys of one tenant share prefixes and turns; by default the label
    scopes = ["generate", "embed"]         # generate, embed, jobs, admin, model, metrics, delegate
    models = ["smollm2"]                   # own names of models; by default all
    adapters = []                          # names of adapters; by default all
    requests_per_minute = 60
    tokens_per_minute = 20_000
    concurrent_requests = 8
    tokens_per_day = 1_000_000
    expires = 2027-01-01T00:00:00Z
    revoked = false

`sha256` and `secret` may be lists: while one secret replaces another, both stand for the key.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from penstock.common.credentials import secret_digest
from penstock.common.errors import StartupError
from penstock.router.keys.api_key import DEFAULT_SCOPES, ApiKey, KeyQuotas, KeyScope

FLAG = "--keys-file"
# Labels are labels of metrics, too; names of models as in the file of models.
LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9./:@_-]{1,128}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
# A secret with fewer characters may be guessed.
LEAST_SECRET_CHARS, MOST_SECRET_CHARS = 16, 512
_MOST_QUOTA = 10**15
_QUOTAS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day")
_FIELDS = ("label", "sha256", "secret", "tenant", "scopes", "models", "adapters", *_QUOTAS, "expires", "revoked")


def read_keys(path: str, max_keys: int) -> tuple[ApiKey, ...]:
    """Read and check a file; `max_keys` bounds its keys. Raises StartupError naming --keys-file and the field."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _wrong(path, "is not UTF-8") from error
    return parse_keys(text, path, max_keys)


def parse_keys(text: str, path: str, max_keys: int) -> tuple[ApiKey, ...]:
    """Check a text of a file. Raises StartupError as `read_keys`. No message has a secret."""
    try:
        tables = tomllib.loads(text)
    except ValueError as error:
        # Its own message may quote a line of the file.
        where = re.search(r"\(at [^)]*\)$", str(error))
        raise _wrong(path, f"is not TOML {where[0] if where else ''}".rstrip()) from None
    except RecursionError as error:
        raise _wrong(path, "is nested too deep") from error
    found = tables.pop("keys", [])
    if tables:
        raise _wrong(path, f"{min(tables)}: is unknown; a file has [[keys]] only")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise _wrong(path, "keys: must be tables, [[keys]]")
    if len(found) > max_keys:
        raise _wrong(path, f"keys: are {len(found)}, and --max-keys allows {max_keys}")
    keys = tuple(_KeyReader(path, f"keys[{number}].", one).key() for number, one in enumerate(found))
    labels = [key.label for key in keys]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise _wrong(path, f"keys: the label {min(twice)} is there twice")
    owner: dict[bytes, str] = {}
    for key in keys:
        for digest in key.digests:
            if owner.setdefault(digest, key.label) != key.label:
                raise _wrong(path, f"keys: {owner[digest]} and {key.label} have the same secret")
    return keys


class _KeyReader:
    """Reads the table of one key."""

    def __init__(self, path: str, where: str, table: Mapping[str, Any]) -> None:
        self._path, self._where, self._table = path, where, table

    def key(self) -> ApiKey:
        """Return the key."""
        for name in self._table:
            if name not in _FIELDS:
                raise self._wrong(name, f"is unknown; there are: {', '.join(_FIELDS)}")
        label = self._table.get("label")
        if not isinstance(label, str) or not LABEL.fullmatch(label):
            raise self._wrong("label", "must be 1 to 64 letters, digits and ._-")
        tenant = self._table.get("tenant", label)
        if not isinstance(tenant, str) or not LABEL.fullmatch(tenant):
            raise self._wrong("tenant", "must be 1 to 64 letters, digits and ._-")
        revoked = self._table.get("revoked", False)
        if not isinstance(revoked, bool):
            raise self._wrong("revoked", "must be true or false")
        return ApiKey(
            label=label,
            digests=self._digests(),
            tenant=tenant,
            scopes=self._scopes(),
            models=self._names("models"),
            adapters=self._names("adapters"),
            quotas=KeyQuotas(**{name: self._quota(name) for name in _QUOTAS}),
            expires=self._time("expires"),
            revoked=revoked,
        )

    def _digests(self) -> tuple[bytes, ...]:
        found = []
        for value in self._texts("sha256"):
            if not _SHA256.fullmatch(value):
                raise self._wrong("sha256", "must be 64 hex digits, or a list of such")
            found.append(bytes.fromhex(value))
        for secret in self._texts("secret"):
            if not is_secret(secret):
                raise self._wrong(
                    "secret",
                    f"must be {LEAST_SECRET_CHARS} to {MOST_SECRET_CHARS} characters of ASCII without blanks, or a "
                    "list of such",
                )
            found.append(secret_digest(secret.encode()))
        if not found:
            raise self._wrong("sha256", "or `secret` must be set")
        return tuple(dict.fromkeys(found))

    def _texts(self, name: str) -> list[str]:
        value = self._table.get(name, [])
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str) for one in texts):
            raise self._wrong(name, "must be a text, or a list of texts")
        return texts

    def _scopes(self) -> frozenset[KeyScope]:
        if "scopes" not in self._table:
            return DEFAULT_SCOPES
        try:
            return frozenset(map(KeyScope, self._texts("scopes")))
        except ValueError:
            raise self._wrong("scopes", f"must be some of {', '.join(KeyScope)}") from None

    def _names(self, name: str) -> frozenset[str] | None:
        if name not in self._table:
            return None
        names = self._texts(name)
        if not all(_NAME.fullmatch(one) for one in names):
            raise self._wrong(name, "must be names of 1 to 128 letters, digits and ./:@_-")
        return frozenset(names)

    def _quota(self, name: str) -> int | None:
        value = self._table.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_QUOTA:
            raise self._wrong(name, f"must be a whole number from 1 to {_MOST_QUOTA}")
        return value

    def _time(self, name: str) -> float | None:
        value = self._table.get(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)
        if value is None:
            return None
        if not isinstance(value, datetime):
            raise self._wrong(name, "must be a time such as 2027-01-01T00:00:00Z, or a date")
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()

    def _wrong(self, name: str, why: str) -> StartupError:
        return _wrong(self._path, f"{self._where}{name}: {why}")


def is_secret(text: str) -> bool:
    """True for a text that may be a secret: long enough, and one that a header can hold."""
    return (
        LEAST_SECRET_CHARS <= len(text) <= MOST_SECRET_CHARS
        and text.isascii()
        and text.isprintable()
        and (" " not in text)
    )


def _wrong(path: str, why: str) -> StartupError:
    return StartupError(f"{FLAG} {path}: {why}", flag=FLAG)
