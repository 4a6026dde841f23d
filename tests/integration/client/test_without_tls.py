"""A client whose connection has not the TLS that its server wants: the error names the setting."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import factories.servers.tiny_service
import pytest
from factories.servers.tiny_service import tiny
from factories.wire.conversation import user
from penstock.common.config import ServerConfig
from penstock_client import AsyncClient, Client, Unavailable

FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
CERT, KEY = (str(FILES / name) for name in ("server.pem", "server.key"))


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_plaintext_to_a_server_with_tls_is_told_the_setting(transport: Literal["asyncio", "grpc"]) -> None:
    async with tiny(ServerConfig(tls_cert=CERT, tls_key=KEY, transport=transport)) as (_, running, _):
        async with AsyncClient(running.address) as client:
            with pytest.raises(Unavailable, match=r"ClientConfig\.tls"):
                await client.generate(user("Hello"))
            with pytest.raises(Unavailable, match=r"ClientConfig\.tls"):
                await client.tokenize("Hello")

        def ask() -> None:
            with Client(running.address) as client, pytest.raises(Unavailable, match=r"ClientConfig\.tls"):
                client.generate(user("Hello"))

        await asyncio.to_thread(ask)


async def test_an_address_without_a_server_has_no_word_of_tls() -> None:
    async with AsyncClient("127.0.0.1:9") as client:
        with pytest.raises(Unavailable) as refused:
            await client.generate(user("Hello"))
    assert "TLS" not in refused.value.message
    assert "tls" not in refused.value.message
