"""Commands that get no answer tell why, and the flag to change: TLS against plaintext, certificates, nobody there."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import factories.servers.tiny_service
import grpc
import pytest
from factories.servers.tiny_service import tiny
from penstock.cli.client import connection
from penstock.cli.client.connection import ConnectionConfig, connect, open_client, wait_connected
from penstock.cli.client.silence import silence_of
from penstock.common.config import ServerConfig
from penstock.common.errors import StartupError
from penstock_client import ClientConfig

FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
CA, CERT, KEY = (str(FILES / name) for name in ("ca.pem", "server.pem", "server.key"))
PLAIN = ServerConfig()
TLS = ServerConfig(tls_cert=CERT, tls_key=KEY)
MUTUAL = ServerConfig(tls_cert=CERT, tls_key=KEY, tls_client_ca=CA)
# Seconds: far more than any machine needs for what is waited for here.
PATIENCE = 240.0


def open_aio(address: str, config: ClientConfig) -> grpc.aio.Channel:
    """Open the channel that `penstock bench` and `penstock debug` have."""
    if config.tls:
        return grpc.aio.secure_channel(address, config.tls.credentials())
    return grpc.aio.insecure_channel(address)


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
@pytest.mark.parametrize(
    ("server", "tls", "ca", "name", "flag", "told"),
    [
        (TLS, False, None, None, "--tls-ca", "speaks TLS"),
        (MUTUAL, False, None, None, "--tls-ca", "speaks TLS"),
        (PLAIN, True, CA, None, "--tls-ca", "does not speak TLS"),
        (TLS, True, None, None, "--tls-ca", "is not accepted"),
        (TLS, True, CA, "elsewhere", "--server-name", "is not for elsewhere"),
        (MUTUAL, True, CA, None, "--client-cert", "wants a client certificate"),
        (PLAIN, False, None, None, "--connect-timeout-seconds", "did not answer in time"),
    ],
)
async def test_the_reason_and_its_flag(
    server: ServerConfig, tls: bool, ca: str | None, name: str | None, flag: str, told: str, transport: str
) -> None:
    config = ServerConfig(
        tls_cert=server.tls_cert,
        tls_key=server.tls_key,
        tls_client_ca=server.tls_client_ca,
        transport=transport,  # type: ignore[arg-type]
    )
    async with tiny(config) as (_, running, _):
        error = await asyncio.to_thread(
            silence_of, running.address, tls=tls, tls_ca=ca, client_cert=None, client_key=None, name=name
        )
    assert told in error.message
    assert error.flag == flag
    # Only a server that is slow may become one that answers.
    assert error.lasts == (flag != "--connect-timeout-seconds")


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = socket.getaddrinfo

    def look_up(host: str, *arguments: object) -> object:
        # Some networks have an answer for every name.
        if host.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return looked_up(host, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        for wrong in (address, "127.0.0.1:x", "no-such-host.invalid:1", "127.0.0.1:99999"):
            error = silence_of(wrong, tls=False, tls_ca=None, client_cert=None, client_key=None, name=None)
            assert error.flag == "--address"
            assert not error.lasts


@pytest.mark.parametrize(
    ("ca", "cert", "key", "flag"),
    [(KEY, None, None, "--tls-ca"), (CA, CA, KEY, "--client-cert"), (CA, "/no/such/file", KEY, "--client-cert")],
)
def test_a_file_that_cannot_be_used_is_told_by_the_commands_own_flag(
    ca: str, cert: str | None, key: str | None, flag: str
) -> None:
    error = silence_of("127.0.0.1:1", tls=True, tls_ca=ca, client_cert=cert, client_key=key, name=None)
    assert error.flag == flag
    assert flag in error.message
    assert "--channel" not in error.message


@pytest.mark.parametrize("wrong", ["plaintext", "no certificate", "TLS"])
async def test_a_reason_that_lasts_is_told_long_before_the_timeout(wrong: str) -> None:
    """Else everyone with a wrong flag looks at nothing for --connect-timeout-seconds."""
    server, ca = {"plaintext": (TLS, None), "no certificate": (MUTUAL, CA), "TLS": (PLAIN, CA)}[wrong]
    async with tiny(server) as (_, running, _):
        config = ConnectionConfig(address=running.address, tls_ca=ca, connect_timeout_seconds=PATIENCE)
        start = time.monotonic()
        with pytest.raises(StartupError, match=r"TLS|certificate"):
            await asyncio.to_thread(open_client, config)
        channel = connect(config, partial(open_aio, running.address))
        async with channel:
            with pytest.raises(StartupError, match=r"TLS|certificate"):
                await wait_connected(channel, config)
    assert time.monotonic() - start < PATIENCE


@pytest.mark.parametrize("kind", ["client", "channel"])
async def test_a_server_that_starts_late_is_waited_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a person at a terminal is told that it is."""
    looked, look = threading.Event(), connection._look
    told: list[str] = []

    def looks(*arguments: Any) -> None:
        look(*arguments)
        looked.set()

    monkeypatch.setattr(connection, "FIRST_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(connection, "_look", looks)
    monkeypatch.setattr(connection, "complain", told.append)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    config = ConnectionConfig(address=f"127.0.0.1:{port}", connect_timeout_seconds=PATIENCE)

    async def connected() -> None:
        if kind == "client":
            (await asyncio.to_thread(open_client, config)).close()
            return
        async with connect(config, partial(open_aio, config.address)) as channel:
            await wait_connected(channel, config)

    waiting = asyncio.create_task(connected())
    assert await asyncio.to_thread(looked.wait, PATIENCE)
    server = grpc.aio.server()
    server.add_insecure_port(config.address)
    await server.start()
    await waiting
    await server.stop(None)
    assert told == [f"no connection to {config.address} yet, trying for {PATIENCE:.0f} s more"]
