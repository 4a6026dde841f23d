"""Connection of the commands that call a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock.cli.console import complain
from penstock.common.options import option
from penstock.common.ports import ROUTER_PORT

if TYPE_CHECKING:
    import grpc
    from penstock_client import Client, ClientConfig

    from penstock.cli.client.silence import Silence
    from penstock.common.errors import PenstockError, StartupError

GROUP = "Connection"
T = TypeVar("T")
# Seconds without a connection after which the address is probed for the reason: waiting cures few reasons.
FIRST_LOOK_SECONDS = 1.0
_HINT = "is `penstock serve` running?"
# The processes of `penstock serve` take free ports.
GENERATION_HINT = "`penstock serve` prints it in its line `generation: ready on ...`; its router's address works, too"


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
    connect_timeout_seconds: float = option(10.0, "Time to connect before giving up.", group=GROUP, minimum=0)


def open_client(config: ConnectionConfig, hint: str = _HINT) -> Client:
    """Return a connected client. Raises StartupError for unreadable files, and without an answer; `hint` names a
    likely cause."""
    from penstock_client import Client

    from penstock.common.errors import Unavailable

    client = connect(config, lambda made: Client(config.address, made))
    try:
        for wait, rest in _waits(config):
            try:
                client.wait_ready(wait)
                break
            except Unavailable:
                _look(config, rest, hint)
    except BaseException:
        client.close()
        raise
    return client


async def wait_connected(channel: grpc.aio.Channel, config: ConnectionConfig, hint: str = _HINT) -> None:
    """Wait until a channel is connected. Raises StartupError without an answer; `hint` names a likely cause."""
    for wait, rest in _waits(config):
        try:
            async with asyncio.timeout(wait):
                await channel.channel_ready()
            return
        except TimeoutError:
            await asyncio.to_thread(_look, config, rest, hint)


def _waits(config: ConnectionConfig) -> list[tuple[float, float]]:
    """Return the seconds to wait for a connection, and the seconds left after that."""
    whole = config.connect_timeout_seconds
    first = min(FIRST_LOOK_SECONDS, whole)
    return [(first, whole - first), (whole - first, 0.0)][: 2 if whole > first else 1]


def _look(config: ConnectionConfig, rest: float, hint: str) -> None:
    """Raise the reason of a missing connection, unless a longer wait may help; then tell the user."""
    reason = _no_answer(config, hint)
    if reason.lasts or not rest:
        raise reason from None
    if sys.stderr.isatty():
        complain(f"no connection to {config.address} yet, trying for {rest:.0f} s more")


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
        why = error.strerror if isinstance(error, OSError) else "it has no token"
        raise StartupError(f"--token-file {config.token_file}: {why}", flag="--token-file") from error
    try:
        return make(ClientConfig(tls=tls, token=token, timeouts=TimeoutConfig(connect=config.connect_timeout_seconds)))
    except OSError as error:
        flag = _flag_of(config, error.filename)
        raise StartupError(f"{flag} {error.filename}: {error.strerror}", flag=flag) from error
    except ValueError as error:
        raise StartupError(str(error), flag="--tls-ca") from error


def about_own_flag(error: PenstockError) -> Exception:
    """Return an error about an operator call's metadata as one about the flag --backend; any other error unchanged."""
    from penstock.common.errors import StartupError
    from penstock.common.request_context import BACKEND_KEY

    flag, theirs = "--backend", f"metadata {BACKEND_KEY}"
    return StartupError(error.message.replace(theirs, flag), flag=flag) if theirs in error.message else error


@contextmanager
def open_operator_client(config: ConnectionConfig, backend: str | None, hint: str = _HINT) -> Iterator[Client]:
    """Open a client for operators' calls; a router passes them to `backend`.

    Raises as `open_client`, and StartupError naming --backend if the address is no router's, or it has no such backend.
    """
    from penstock.common.errors import PenstockError, Unimplemented

    with open_client(config, hint) as client:
        if backend is not None:
            try:
                # A generation service ignores --backend and answers for itself.
                client.list_models()
            except Unimplemented:
                raise no_router(config) from None
            except PenstockError:
                # Other errors also come from a router, such as one about its operators' token.
                pass
        try:
            yield client
        except PenstockError as error:
            raise about_own_flag(error) from None


def no_router(config: ConnectionConfig) -> StartupError:
    """Make the error for --backend at the address of a service other than a router."""
    from penstock.common.errors import StartupError

    flag = "--backend"
    return StartupError(
        f"{config.address} is not a router and answers for itself: leave {flag} out, or give a router's --address",
        flag=flag,
    )


def _no_answer(config: ConnectionConfig, hint: str) -> Silence:
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
