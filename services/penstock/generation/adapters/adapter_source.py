"""Places of adapters outside this machine as callers write them, and those that an operator allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.common.errors import InvalidArgument, StartupError

HUB, S3 = "hub://", "s3://"
_FLAG = "--adapter-store"
_MOST_CHARS = 1024
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9_][A-Za-z0-9._/-]*))?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# Characters that keys have without quotes in any client.
_KEY = re.compile(r"[A-Za-z0-9._/@=+ -]*")


@dataclass(frozen=True, slots=True)
class HubSource:
    """An adapter on the Hugging Face hub."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return f"{HUB}{self.repo}" + (f"@{self.revision}" if self.revision != "main" else "")


@dataclass(frozen=True, slots=True)
class S3Source:
    """An adapter in a bucket: its two files below `prefix`, which has no slash at its ends."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{S3}{self.bucket}/{self.prefix}"

    def has(self, place: S3Source) -> bool:
        """True when another place is this one, or below it."""
        is_below = not self.prefix or f"{place.prefix}/".startswith(f"{self.prefix}/")
        return place.bucket == self.bucket and is_below


Source = HubSource | S3Source


class AllowedStores:
    """Stores of --adapter-store: `hub`, `hub://OWNER`, `s3://BUCKET` and `s3://BUCKET/PREFIX`."""

    def __init__(self, stores: Sequence[str]) -> None:
        """Raises StartupError naming --adapter-store."""
        self._owners: set[str] = set()
        self._has_hub = False
        self._buckets: list[S3Source] = []
        for text in stores:
            if text in ("hub", HUB):
                self._has_hub = True
            elif text.startswith(HUB) and re.fullmatch(_PART, owner := text.removeprefix(HUB).strip("/")):
                self._owners.add(owner)
            elif text.startswith(S3) and (place := _bucket(text)) is not None:
                self._buckets.append(place)
            else:
                raise StartupError(
                    f"{_FLAG} {text!r}: expected hub, hub://OWNER, s3://BUCKET or s3://BUCKET/PREFIX", flag=_FLAG
                )

    def __bool__(self) -> bool:
        return self._has_hub or bool(self._owners or self._buckets)

    def source(self, text: str) -> Source:
        """Return the place that a caller names. Raises InvalidArgument ADAPTER_PATH for one that is not allowed."""
        if len(text) <= _MOST_CHARS and text.startswith(HUB):
            found = _hub(text.removeprefix(HUB))
            if found is not None and (self._has_hub or found.repo.partition("/")[0] in self._owners):
                return found
        if len(text) <= _MOST_CHARS and text.startswith(S3):
            place = _bucket(text)
            if place is not None and place.prefix and any(one.has(place) for one in self._buckets):
                return place
        raise InvalidArgument(
            "path",
            f"must be a folder, hub://OWNER/NAME or s3://BUCKET/PREFIX, the latter two in a store of {_FLAG}",
            reason="ADAPTER_PATH",
        )

    def hub_source(self, name: str) -> HubSource | None:
        """Return the place of an adapter with the name of a hub id; None where it is none, or not allowed."""
        try:
            found = self.source(HUB + name)
        except InvalidArgument:
            return None
        return found if isinstance(found, HubSource) else None


def is_source(text: str) -> bool:
    """True for a text that is written as a place in a store."""
    return text.startswith((HUB, S3))


def _hub(text: str) -> HubSource | None:
    match = _HUB_ID.fullmatch(text)
    if match is None or ".." in text:
        return None
    return HubSource(match["repo"], match["revision"] or "main")


def _bucket(text: str) -> S3Source | None:
    bucket, _, key = text.removeprefix(S3).partition("/")
    prefix = key.strip("/")
    if _BUCKET.fullmatch(bucket) is None or ".." in bucket or _KEY.fullmatch(prefix) is None:
        return None
    if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        return None
    return S3Source(bucket, prefix)
