"""Request ids, and what is put into gRPC's options."""

from __future__ import annotations

from penstock.common.config import ChannelConfig, ServerConfig
from penstock.common.request_context import accept_request_id
from penstock.serving.grpc_options import channel_options, joining_options, server_options


def test_a_harmless_request_id_is_kept() -> None:
    assert accept_request_id("req-1:a.b_C") == "req-1:a.b_C"


def test_anything_else_is_replaced_by_a_new_one() -> None:
    replaced = [accept_request_id(given) for given in (None, "", "has space", "x" * 129, "-dash", "é", b"bytes")]
    assert all(len(made) == 32 for made in replaced)
    assert len(set(replaced)) == len(replaced)


def test_no_option_is_given_twice() -> None:
    for options in (
        server_options(ServerConfig()),
        channel_options(ChannelConfig()),
        joining_options(ChannelConfig()),
    ):
        names = [name for name, _ in options]
        assert len(names) == len(set(names))


def test_durations_become_milliseconds() -> None:
    options = dict(server_options(ServerConfig(keepalive_seconds=1.5, keepalive_timeout_seconds=0.25)))
    assert options["grpc.keepalive_time_ms"] == 1500
    assert options["grpc.http2.ping_timeout_ms"] == 250
