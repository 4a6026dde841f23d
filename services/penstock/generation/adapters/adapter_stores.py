"""Clients of the stores that adapters come from: Hugging Face's hub, and S3 with AWS's signature version 4."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urlsplit

from penstock.common.errors import FailedPrecondition, Unavailable
from penstock.generation.adapters.adapter_files import BOTH_FILES
from penstock.generation.adapters.adapter_source import HubSource, S3Source, Source
from penstock.generation.adapters.store_http import StoredFile, StoreHttp

_HUB_URL = "https://huggingface.co"
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_MOST_ANSWER_BYTES = 4 << 20


class RemoteAdapter(Protocol):
    """An adapter in a store. Blocking. All raise as StoreHttp.copy."""

    def version(self) -> str:
        """Return what changes with its files."""

    def copy(self, name: str, version: str, target: Path, until: float, begin: Callable[[StoredFile], None]) -> None:
        """Write a file of a version to `target`; see StoreHttp.copy."""


def remote_adapter(source: Source, environment: Mapping[str, str]) -> RemoteAdapter:
    """Return the client of an adapter's store, with the credentials of the environment."""
    if isinstance(source, HubSource):
        return _HubAdapter(source, environment)
    return _S3Adapter(source, environment)


class _HubAdapter:
    """A RemoteAdapter on the hub of HF_ENDPOINT, with the token of HF_TOKEN."""

    def __init__(self, source: HubSource, environment: Mapping[str, str]) -> None:
        self._source = source
        self._url = (environment.get("HF_ENDPOINT") or _HUB_URL).rstrip("/")
        token = environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http = StoreHttp("the hub", may_redirect=True)

    def version(self) -> str:
        """Return the commit."""
        url = f"{self._url}/api/models/{self._source.repo}/revision/{quote(self._source.revision, safe='')}"
        try:
            commit = json.loads(self._http.text(url, self._headers, _MOST_ANSWER_BYTES))["sha"]
        except (ValueError, LookupError, TypeError, RecursionError):
            commit = None
        if not isinstance(commit, str) or not commit.isalnum():
            raise Unavailable("path: the hub does not answer as a hub does", reason="ADAPTER_STORE_DOWN")
        return commit

    def copy(self, name: str, version: str, target: Path, until: float, begin: Callable[[StoredFile], None]) -> None:
        headers = {**self._headers, "accept-encoding": "identity"}
        self._http.copy(f"{self._url}/{self._source.repo}/resolve/{version}/{name}", headers, target, until, begin)


class _S3Adapter:
    """A RemoteAdapter in a bucket, at AWS or at AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL; without keys unsigned."""

    def __init__(self, source: S3Source, environment: Mapping[str, str]) -> None:
        self._source = source
        self._region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
        own = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        self._base = (own or f"https://s3.{self._region}.amazonaws.com").rstrip("/") + f"/{source.bucket}"
        self._key = environment.get("AWS_ACCESS_KEY_ID") or ""
        self._secret = environment.get("AWS_SECRET_ACCESS_KEY") or ""
        self._session = environment.get("AWS_SESSION_TOKEN") or ""
        if bool(self._key) != bool(self._secret):
            raise FailedPrecondition(
                "path: AWS_ACCESS_KEY_ID needs AWS_SECRET_ACCESS_KEY in the service's environment, and the reverse",
                reason="ADAPTER_STORE_DENIED",
            )
        self._http = StoreHttp("the bucket", may_redirect=False)

    def version(self) -> str:
        """Return the tags of both files."""
        return " ".join(self._head(name).tag for name in BOTH_FILES)

    def copy(self, name: str, version: str, target: Path, until: float, begin: Callable[[StoredFile], None]) -> None:
        url = self._url(name)
        tag = version.split(" ")[BOTH_FILES.index(name)]
        headers = {**self._signed("GET", url), "accept-encoding": "identity"}
        self._http.copy(url, {**headers, "if-match": tag} if tag else headers, target, until, begin)

    def _head(self, name: str) -> StoredFile:
        url = self._url(name)
        return self._http.head(url, {**self._signed("HEAD", url), "accept-encoding": "identity"})

    def _url(self, name: str) -> str:
        return f"{self._base}/{quote(f'{self._source.prefix}/{name}', safe='/-_.~')}"

    def _signed(self, method: str, url: str) -> dict[str, str]:
        if not self._key:
            return {}
        parts = urlsplit(url)
        headers = {"host": parts.netloc, "x-amz-content-sha256": _EMPTY_SHA256}
        if self._session:
            headers["x-amz-security-token"] = self._session
        return signed_headers(
            method, parts.path, headers, key=self._key, secret=self._secret, region=self._region, now=datetime.now(UTC)
        )


def signed_headers(
    method: str, path: str, headers: Mapping[str, str], *, key: str, secret: str, region: str, now: datetime
) -> dict[str, str]:
    """Return the headers of an S3 request without a body and a query, signed. `path` is quoted.

    Signature version 4: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    """
    at = now.strftime("%Y%m%dT%H%M%SZ")
    named = {**headers, "x-amz-date": at}
    names = ";".join(sorted(named))
    fields = "".join(f"{name}:{named[name].strip()}\n" for name in sorted(named))
    request = "\n".join((method, path, "", fields, names, named["x-amz-content-sha256"]))
    scope = f"{at[:8]}/{region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", at, scope, hashlib.sha256(request.encode()).hexdigest()))
    signing = f"AWS4{secret}".encode()
    for part in (at[:8], region, "s3", "aws4_request"):
        signing = hmac.digest(signing, part.encode(), "sha256")
    signature = hmac.digest(signing, text.encode(), "sha256").hex()
    named["authorization"] = f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, Signature={signature}"
    return named
