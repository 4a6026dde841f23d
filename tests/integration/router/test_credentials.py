"""Files of credentials that cannot be read: at the start, and when a connection is dialled again."""

from __future__ import annotations

from pathlib import Path

import factories.servers.tiny_service
import pytest
from factories.servers.router import backend, collect, generate, running_router, tokenizer_address, until
from factories.wire.tcp_proxy import TcpProxy
from penstock.common.config import ChannelConfig
from penstock.common.credentials import channel_tls_context
from penstock.common.errors import StartupError
from penstock.serving.channels import open_channel
from structlog.testing import capture_logs

CA = Path(factories.servers.tiny_service.__file__).parent / "tls" / "ca.pem"


@pytest.mark.parametrize("begun", [None, ""], ids=["gone", "empty"])
async def test_a_file_that_is_being_replaced_when_connections_are_dialled_again(
    tmp_path: Path, begun: str | None
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("token\n")
    async with (
        TcpProxy(tokenizer_address()) as proxy,
        backend() as one,
        running_router(one, tokenizer=proxy.address, channel_token_file=str(tokens)) as router,
    ):
        tokens.unlink()
        if begun is not None:
            tokens.write_text(begun)
        with capture_logs() as logs:
            await one.stop()
            await proxy.cut()
            await one.start()
            await proxy.restore()

            def has_tried(event: str) -> bool:
                return any(log["event"] == event and "--channel-token-file" in log["cause"] for log in logs)

            await until(lambda: has_tried("backend lost") and has_tried("tokenizer connection ended"))
        assert router.metric("backend_up", backend=one.address) == 0
        assert router.metric("tokenizer_up") == 0
        assert not router.server.service.failed.done()
        (tmp_path / "next").write_text("token\n")
        (tmp_path / "next").replace(tokens)
        await router.until("backend_up", 1, backend=one.address)
        await router.until("tokenizer_up", 1)
        assert (await collect(router.stub.Generate(generate()))).finished


@pytest.mark.parametrize("field", ["channel_tls_ca", "channel_tls_cert", "channel_token_file"])
async def test_at_the_start_it_is_said_at_once(field: str) -> None:
    with pytest.raises(StartupError, match="No such file") as caught:
        async with running_router(backend=("127.0.0.1:1",), tokenizer="127.0.0.1:2", **{field: "/no/such/file"}):
            pass
    assert caught.value.flag == "--" + field.replace("_", "-")


async def test_an_empty_file_of_cas_does_not_mean_the_systems(tmp_path: Path) -> None:
    empty = tmp_path / "ca.pem"
    empty.touch()
    config = ChannelConfig(channel_tls_ca=str(empty))
    for use in (channel_tls_context, lambda config: open_channel("127.0.0.1:1", config)):
        with pytest.raises(StartupError, match="empty") as caught:
            use(config)
        assert caught.value.flag == "--channel-tls-ca"
