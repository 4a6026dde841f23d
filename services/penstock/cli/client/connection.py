"""Connection of the commands that call a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock.common.options import option
from penstock.common.ports import ROUTER_PORT

if TYPE_CHECKING:
    from penstock_client import Client, ClientConfig

    from penstock.common.errors import StartupError

GROUP = "Connection"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ConnectionConfig:
    """Configuration of a connection to a router."""

    address: str = option(f"127.0.0.1:{ROUTER_PORT}", "host:port of the router.", group=GROUP, metavar="HOST:PORT")
    tls: bool = option(False, "Use TLS (system CAs).", group=GROUP)
    tls_ca: str | None = option(None, "Use TLS; trust this CA (PEM).", group=GROUP, metavar="FILE")
    client_cert: str | None = option(None, "Client certificate for mutual TLS (PEM).", group=GROUP, metavar="FILE")
    client_key: str | None = option(None, "Private key of --client-cert (PEM).", group=GROUP, metavar="FILE")
    server_name: str | None = option(None, "Name expected in the server's certificate.", group=GROUP)
    token_file: str | None = option(None, "Send the bearer token in this file.", group=GROUP, metavar="FILE")
    connect_timeout_seconds: float = option(10.0, "Give up connecting after this.", group=GROUP, minimum=0)


def open_client(config: ConnectionConfig) -> Client:
    """Yield a connected client. Raises StartupError for unreadable files, and without an answer."""
    from penstock_client import Client

    from penstock.common.errors import Unavailable

    client = connect(config, lambda made: Client(config.address, made))
    try:
        client.wait_ready()
    except Unavailable:
        client.close()
        raise no_answer(config) from None
    return client


def connect(config: ConnectionConfig, make: Callable[[ClientConfig], T]) -> T:
    """Call `make` with the client's configuration. Raises StartupError naming the flag of an unreadable file."""
    from penstock_client import ClientConfig, TimeoutConfig, TLSConfig

    from penstock.common.errors import StartupError

    def path(name: str | None) -> Path | None:
        return Path(name).expanduser() if name else None

    if bool(config.client_cert) != bool(config.client_key):
        raise StartupError("--client-cert and --client-key go together", flag="--client-cert")
    tls = None
    if config.tls or config.tls_ca or config.client_cert:
        tls = TLSConfig(path(config.tls_ca), path(config.client_cert), path(config.client_key), config.server_name)
    try:
        token = Path(config.token_file).expanduser().read_text().split()[0] if config.token_file else None
    except (OSError, UnicodeDecodeError, IndexError) as error:
        why = error.strerror if isinstance(error, OSError) else "there is no token in it"
        raise StartupError(f"--token-file {config.token_file}: {why}", flag="--token-file") from error
    try:
        return make(ClientConfig(tls=tls, token=token, timeouts=TimeoutConfig(connect=config.connect_timeout_seconds)))
    except OSError as error:
        flag = _flag_of(config, error.filename)
        raise StartupError(f"{flag} {error.filename}: {error.strerror}", flag=flag) from error
    except ValueError as error:
        raise StartupError(str(error), flag="--tls-ca") from error


def no_answer(config: ConnectionConfig, hint: str = "is `penstock serve` running?") -> StartupError:
    """Make the error for an address without an answer: the reason is looked for at the address."""
    from penstock.cli.client.silence import silence_of

    return silence_of(
        config.address,
        tls=bool(config.tls or config.tls_ca or config.client_cert),
        tls_ca=config.tls_ca,
        client_cert=config.client_cert,
        client_key=config.client_key,
        name=config.server_name,
        hint=hint,
    )


def _flag_of(config: ConnectionConfig, file: object) -> str:
    """Return the flag that named a TLS file."""
    files = {"--client-cert": config.client_cert, "--client-key": config.client_key}
    named = (flag for flag, name in files.items() if name and str(Path(name).expanduser()) == str(file))
    return next(named, "--tls-ca")
