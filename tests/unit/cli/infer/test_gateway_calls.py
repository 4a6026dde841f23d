"""Calls of `penstock infer` to a gateway."""

from __future__ import annotations

import pytest
from factories.servers.stack import free_port
from penstock.cli.client.connection import ConnectionConfig
from penstock.cli.infer.gateway_calls import GatewayAway, GatewayCalls
from penstock.common.errors import StartupError


def test_an_address_is_told_without_its_password() -> None:
    with pytest.raises(StartupError) as caught:
        GatewayCalls(ConnectionConfig(address="http://me:secret@127.0.0.1:1/elsewhere"))
    assert "http://127.0.0.1:1/elsewhere" in str(caught.value)
    assert "secret" not in str(caught.value)
    calls = GatewayCalls(ConnectionConfig(address=f"http://me:secret@127.0.0.1:{free_port()}"))
    with pytest.raises(GatewayAway) as away:
        calls.json("GET", "/v1/models")
    assert "secret" not in str(away.value)
