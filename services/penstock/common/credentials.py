"""TLS credentials and bearer tokens, from files."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from penstock.common.config import ChannelConfig, ProcessConfig, ServerConfig
from penstock.common.errors import StartupError, Unauthenticated


def _read(path: str, flag: str) -> bytes:
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise StartupError(f"{flag} {path}: {error.strerror}", flag=flag) from error
    if not data:
        # For an empty text Python's ssl uses the system's CAs, and a file may be empty for a moment while it is
        # replaced.
        raise StartupError(f"{flag} {path} is empty", flag=flag)
    return data


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Make a server's credentials for grpc; None for plaintext. Raises StartupError naming the file's flag."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    key, chain = _read(config.tls_key, "--tls-key"), _read(config.tls_cert, "--tls-cert")
    client_ca = _read(config.tls_client_ca, "--tls-client-ca") if config.tls_client_ca is not None else None
    return grpc.ssl_server_credentials(
        [(key, chain)], root_certificates=client_ca, require_client_auth=client_ca is not None
    )


def tls_context(config: ProcessConfig, alpn: Sequence[str] = ("h2",)) -> ssl.SSLContext:
    """Make the server's credentials for asyncio and plain sockets.

    `alpn`: protocols that the handshake offers; none for plain HTTP. Raises StartupError naming the file's flag.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if alpn:
        context.set_alpn_protocols(alpn)
    for path, flag in ((config.tls_cert, "--tls-cert"), (config.tls_key, "--tls-key")):
        _read(path or "", flag)
    chain, key = (Path(path or "").expanduser() for path in (config.tls_cert, config.tls_key))
    # An explicit empty password: for an encrypted key OpenSSL would ask the terminal, and the start would hang.
    try:
        context.load_cert_chain(chain, key, password="")
    except OSError as error:
        raise StartupError(
            "--tls-cert and --tls-key are not a certificate chain and its key (PEM)", flag="--tls-cert"
        ) from error
    if config.tls_client_ca is not None:
        roots = _read(config.tls_client_ca, "--tls-client-ca")
        try:
            context.load_verify_locations(cadata=roots.decode("ascii"))
        except (ValueError, ssl.SSLError) as error:
            flag = "--tls-client-ca"
            raise StartupError(f"{flag} {config.tls_client_ca} has no certificates (PEM)", flag=flag) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def channel_credentials(config: ChannelConfig) -> grpc.ChannelCredentials | None:
    """Make a channel's credentials for grpc; None for plaintext. Raises StartupError naming the file's flag."""
    if not (config.channel_tls or config.channel_tls_ca or config.channel_tls_cert):
        return None
    ca, cert, key = config.channel_tls_ca, config.channel_tls_cert, config.channel_tls_key
    return grpc.ssl_channel_credentials(
        root_certificates=_read(ca, "--channel-tls-ca") if ca else None,
        private_key=_read(key, "--channel-tls-key") if key else None,
        certificate_chain=_read(cert, "--channel-tls-cert") if cert else None,
    )


def channel_tls_context(config: ChannelConfig) -> ssl.SSLContext | None:
    """Make a channel's credentials for asyncio; None for plaintext. Raises StartupError naming the file's flag."""
    if not (config.channel_tls or config.channel_tls_ca or config.channel_tls_cert):
        return None
    ca, cert, key = config.channel_tls_ca, config.channel_tls_cert, config.channel_tls_key
    try:
        context = ssl.create_default_context(cadata=_certificates(ca) if ca else None)
    except (ValueError, ssl.SSLError) as error:
        flag = "--channel-tls-ca"
        raise StartupError(f"{flag} {ca} has no certificates (PEM)", flag=flag) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    for path, flag in ((cert, "--channel-tls-cert"), (key, "--channel-tls-key")):
        if path:
            _read(path, flag)
    if cert:
        _load_pair(context, cert, key)
    return context


def _certificates(path: str) -> str:
    """Keep the certificates of a PEM file: comments between them may be in any encoding."""
    return _read(path, "--channel-tls-ca").decode("ascii", "ignore")


def _load_pair(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    try:
        # An explicit empty password: for an encrypted key OpenSSL would ask the terminal.
        context.load_cert_chain(Path(cert).expanduser(), Path(key).expanduser() if key else None, password="")
    except (OSError, ssl.SSLError) as error:
        flag = "--channel-tls-cert"
        raise StartupError(f"{flag} and --channel-tls-key are not a chain and its key (PEM)", flag=flag) from error


def check_channel_files(config: ChannelConfig) -> None:
    """Check that connections can be made with the present files. Raises StartupError naming the flag of a bad one."""
    channel_tls_context(config)
    if config.channel_token_file is not None:
        TokenFile(config.channel_token_file, "--channel-token-file")


def secret_digest(secret: bytes) -> bytes:
    """Return the SHA-256 by which a secret is known. A secret is random, so no slower hash is needed."""
    return hashlib.sha256(secret).digest()


def bearer_token(authorization: str | bytes | None) -> bytes | None:
    """Return the token of the `authorization` metadata, in any spelling; None without `Bearer`."""
    if authorization is None:
        return None
    given = authorization.encode() if isinstance(authorization, str) else authorization
    scheme, _, token = given.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


class TokenFile:
    """Tokens of a file, one a line, re-read when the file changes so that they can be rotated without a restart."""

    def __init__(self, path: str, flag: str) -> None:
        """Read the file. Raises StartupError when it cannot be read or holds no token."""
        self._path, self.wanted = Path(path).expanduser(), f"a bearer token of {flag}"
        self._stamp: tuple[int, int] | None = None
        self._tokens: list[bytes] = []
        try:
            self._refresh()
        except OSError as error:
            raise StartupError(f"{flag} {path}: {error.strerror}", flag=flag) from error
        if not self._tokens:
            raise StartupError(f"{flag} {path} has no token", flag=flag)

    def _refresh(self) -> None:
        status = self._path.stat()
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            lines = self._path.read_bytes().splitlines()
            self._tokens = [line.strip() for line in lines if line.strip()]
            self._stamp = stamp

    def _current(self) -> list[bytes]:
        try:
            self._refresh()
        except OSError:
            # A file that is missing for a moment (an atomic replacement, a remount) must not lock out all callers.
            return self._tokens
        return self._tokens

    def accepts(self, authorization: str | bytes | None) -> bool:
        """True when the `authorization` metadata is `Bearer` and one of the tokens. The time is constant."""
        token = bearer_token(authorization)
        return token is not None and any(hmac.compare_digest(token, known) for known in self._current())

    def has_digest(self, digest: bytes) -> bool:
        """True when the SHA-256 of one of the tokens is `digest`."""
        return any(hmac.compare_digest(secret_digest(token), digest) for token in self._current())

    def authorization(self) -> str:
        """Metadata value to send: the first token. Raises Unauthenticated when the file has none any more."""
        tokens = self._current()
        if not tokens or not tokens[0].isascii():
            raise Unauthenticated("the bearer token file has no token", reason="NO_TOKEN")
        return f"Bearer {tokens[0].decode()}"


class BearerTokens(Protocol):
    """Bearer tokens that a call, or some calls, accept."""

    @property
    def wanted(self) -> str:
        """Words for a caller that has none: "a bearer token of --auth-token-file"."""

    def accepts(self, authorization: str | bytes | None) -> bool:
        """True for the `authorization` metadata of a caller that may make the call.

        May raise PenstockError with a reason for the caller, such as PermissionDenied.
        """


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """BearerTokens of several files; the tokens of each are accepted."""

    files: tuple[BearerTokens, ...]

    @property
    def wanted(self) -> str:
        return ", or ".join(file.wanted for file in self.files)

    def accepts(self, authorization: str | bytes | None) -> bool:
        """True when one of the files has the token."""
        return any(file.accepts(authorization) for file in self.files)
