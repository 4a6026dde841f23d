"""State of a backend, by its link: ready, draining, lost; and what is there before any connection."""

from __future__ import annotations

import pytest
from penstock.common.errors import Unavailable
from penstock.router.backends.discovery import BackendAddress
from penstock.router.backends.link import BackendState, Link
from penstock.router.config import RouterConfig
from penstock.serving.transport import Channel
from penstock.v1 import model_pb2, tokenizer_pb2


async def _serve(_: Channel, __: model_pb2.GetModelInfoResponse) -> None:
    """Serve nothing."""


class Linked:
    """A link that is not run, and its changes."""

    def __init__(self) -> None:
        self.seen: list[BackendState] = []
        self.link = Link(
            BackendAddress("127.0.0.1:1", "a:1"),
            RouterConfig(),
            tokenizer=tokenizer_pb2.GetTokenizerResponse,
            serve=_serve,
            on_change=lambda: self.seen.append(self.link.state),
        )


async def test_a_backend_drains_only_once_it_was_ready() -> None:
    linked = Linked()
    link = linked.link
    link.show(takes_work=False)
    assert (link.state, link.is_up) == (BackendState.CONNECTING, False)
    for takes_work in (True, True, False, False):
        link.show(takes_work=takes_work)
    assert (link.is_ready, link.is_up) == (False, True)
    link.show_lost()
    assert linked.seen == [BackendState.READY, BackendState.DRAINING, BackendState.CONNECTING]


async def test_nothing_is_known_before_the_first_connection() -> None:
    link = Linked().link
    assert (link.info, link.is_starting, link.is_healthy, link.serves("")) == (None, False, False, False)
    with pytest.raises(Unavailable, match="not connected"):
        link.require_channel()
