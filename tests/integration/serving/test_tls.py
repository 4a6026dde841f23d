"""TLS and mutual TLS between real servers and channels."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import urllib.request
from pathlib import Path

import factories.servers.tiny_service
import grpc
import pytest
from factories.servers.tiny_service import NAME, SERVING, health_of, tiny
from penstock.cli.health import run_health
from penstock.common.config import ChannelConfig, ServerConfig
from penstock.common.errors import StartupError
from penstock.serving.channels import open_channel
from penstock.v1 import tokenizer_pb2 as pb

FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
CA, CERT, KEY = str(FILES / "ca.pem"), str(FILES / "server.pem"), str(FILES / "server.key")
TLS = ServerConfig(tls_cert=CERT, tls_key=KEY)
MUTUAL = ServerConfig(tls_cert=CERT, tls_key=KEY, tls_client_ca=CA)
TRUSTING = ChannelConfig(channel_tls_ca=CA)
KNOWN = ChannelConfig(
    channel_tls_ca=CA, channel_tls_cert=str(FILES / "client.pem"), channel_tls_key=str(FILES / "client.key")
)


async def test_a_client_that_trusts_the_ca_gets_through() -> None:
    async with tiny(TLS, TRUSTING) as (_, running, stub):
        assert (await stub.GetTokenizer(pb.GetTokenizerRequest())).vocab_size == 7
        assert await health_of(running.address, config=TRUSTING) == SERVING


@pytest.mark.parametrize("channel", [ChannelConfig(), ChannelConfig(channel_tls=True)], ids=["plaintext", "other CAs"])
async def test_any_other_client_does_not(channel: ChannelConfig) -> None:
    async with tiny(TLS, channel) as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_wants_a_certificate_of_the_client() -> None:
    async with tiny(MUTUAL, KNOWN) as (_, running, stub):
        assert (await stub.GetTokenizer(pb.GetTokenizerRequest())).vocab_size == 7
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(running.address, config=TRUSTING)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_token_travels_over_tls(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    token = str(tmp_path / "token")
    server = ServerConfig(tls_cert=CERT, tls_key=KEY, auth_token_file=token)
    async with tiny(server, ChannelConfig(channel_tls_ca=CA, channel_token_file=token)) as (_, _, stub):
        assert (await stub.GetTokenizer(pb.GetTokenizerRequest())).vocab_size == 7


async def test_a_stream_with_its_own_connection_has_token_and_tls_too(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    token = str(tmp_path / "token")
    server = ServerConfig(tls_cert=CERT, tls_key=KEY, auth_token_file=token)
    known = ChannelConfig(channel_tls_ca=CA, channel_token_file=token)
    async with tiny(server) as (_, running, _), open_channel(running.address, known) as channel:
        call = await channel.open_stream(f"/{NAME}/DecodeStream", pb.DecodeStreamResponse.FromString, joins=True)
        await call.write(pb.DecodeStreamRequest(items=[pb.DecodeStreamItem(stream_id=3)]))
        answer = await call.receive()
        assert answer is not None
        assert answer.detokenize_seconds == 1
        call.cancel()


async def test_metrics_are_served_over_tls_too() -> None:
    async with tiny(TLS) as (_, running, _):
        context = ssl.create_default_context(cafile=CA)
        url = f"https://{running.addresses.metrics}/metrics"
        answer = await asyncio.to_thread(urllib.request.urlopen, url, context=context)
        assert b"grpc_server_started_total" in answer.read()
        # Plain HTTP/1: a client that offers HTTP/2 as well must not be told that it is spoken here.
        context.set_alpn_protocols(["h2", "http/1.1"])
        host, _, port = (running.addresses.metrics or "").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
        writer.close()


@pytest.mark.parametrize("flag", ["--tls-cert", "--tls-key", "--tls-client-ca"])
async def test_an_unreadable_file_names_its_flag(flag: str) -> None:
    files = {"tls_cert": CERT, "tls_key": KEY, "tls_client_ca": CA, flag[2:].replace("-", "_"): "/no/such/file"}
    with pytest.raises(StartupError, match="No such file") as caught:
        async with tiny(ServerConfig(**files)):  # type: ignore[arg-type]
            pass
    assert caught.value.flag == flag


async def test_a_file_that_is_no_certificate_is_a_startup_error(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("garbage\n")
    bad = str(tmp_path / "bad.pem")
    with pytest.raises(StartupError) as caught:
        async with tiny(ServerConfig(tls_cert=bad, tls_key=bad)):
            pass
    assert caught.value.flag == "--tls-cert"


@pytest.mark.parametrize("field", ["channel_tls_ca", "channel_token_file"])
async def test_an_unreadable_file_of_a_channel_names_its_flag(field: str) -> None:
    with pytest.raises(StartupError) as caught:
        open_channel("127.0.0.1:1", ChannelConfig(**{field: "/no/such/file"}))  # type: ignore[arg-type]
    assert caught.value.flag == "--" + field.replace("_", "-")


@pytest.mark.parametrize("mutual", [False, True], ids=["TLS", "mTLS"])
async def test_penstock_health_asks_over_tls(mutual: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("abc\n")
    config = dataclasses.replace(MUTUAL if mutual else TLS, auth_token_file=str(token))
    cert, key = (str(FILES / name) if mutual else None for name in ("client.pem", "client.key"))
    async with tiny(config) as (_, running, _):
        assert await asyncio.to_thread(run_health, [running.address], 10.0, False, CA, cert, key) == 0
        assert capsys.readouterr().out.endswith(f"{running.address} SERVING\n")
        assert await asyncio.to_thread(run_health, [running.address], 10.0, False, None, None, None) == 1
        assert "--tls-ca" in capsys.readouterr().out


def test_penstock_health_names_its_own_flags() -> None:
    with pytest.raises(StartupError, match="--client-cert and --client-key") as caught:
        run_health(["127.0.0.1:1"], 1.0, False, CA, CERT, CERT)
    assert caught.value.flag == "--client-cert"
