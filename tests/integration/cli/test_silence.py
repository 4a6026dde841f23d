"""Commands that get no answer tell why, and the flag to change: TLS against plaintext, certificates, nobody there."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import factories.servers.tiny_service
import pytest
from factories.servers.tiny_service import tiny
from penstock.cli.client.silence import silence_of
from penstock.common.config import ServerConfig

FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
CA, CERT, KEY = (str(FILES / name) for name in ("ca.pem", "server.pem", "server.key"))
PLAIN = ServerConfig()
TLS = ServerConfig(tls_cert=CERT, tls_key=KEY)
MUTUAL = ServerConfig(tls_cert=CERT, tls_key=KEY, tls_client_ca=CA)


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
@pytest.mark.parametrize(
    ("server", "tls", "ca", "name", "flag", "told"),
    [
        (TLS, False, None, None, "--tls-ca", "speaks TLS"),
        (MUTUAL, False, None, None, "--tls-ca", "speaks TLS"),
        (PLAIN, True, CA, None, "--tls-ca", "speaks no TLS"),
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


def test_nobody_there() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        for wrong in (address, "127.0.0.1:x", "no-such-host.invalid:1", "127.0.0.1:99999"):
            error = silence_of(wrong, tls=False, tls_ca=None, client_cert=None, client_key=None, name=None)
            assert error.flag == "--address"


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
