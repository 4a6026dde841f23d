"""The event loop that a process runs on."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from penstock.common import event_loop
from penstock.common.errors import StartupError


def test_auto_is_uvloop_but_for_tls() -> None:
    """A port with TLS is left to asyncio: the bounds on handshakes are built on its TLS."""
    assert event_loop.loop_factory("auto", is_tls=False) is uvloop.new_event_loop
    assert event_loop.loop_factory("auto", is_tls=True) is None
    assert event_loop.loop_factory("asyncio", is_tls=False) is None


def test_auto_does_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop is no need: there is none for some Pythons."""
    monkeypatch.setattr(event_loop, "find_spec", lambda name: None)
    assert event_loop.loop_factory("auto", is_tls=False) is None
    with pytest.raises(StartupError, match="pip install uvloop") as refused:
        event_loop.loop_factory("uvloop", is_tls=False)
    assert refused.value.flag == "--event-loop"


def test_uvloop_by_name_serves_no_tls() -> None:
    """It is refused at start: its handshakes would have no bounds."""
    with pytest.raises(StartupError, match="--event-loop uvloop cannot serve TLS") as refused:
        event_loop.loop_factory("uvloop", is_tls=True)
    assert refused.value.flag == "--event-loop"


@pytest.mark.parametrize(("wanted", "name"), [("auto", "uvloop"), ("uvloop", "uvloop"), ("asyncio", "asyncio")])
def test_a_service_runs_on_the_loop_that_was_asked_for(wanted: event_loop.EventLoop, name: str) -> None:
    """And its result comes back."""

    async def main() -> str:
        await asyncio.sleep(0)
        return event_loop.running_loop_name()

    assert event_loop.run(main(), event_loop.loop_factory(wanted, is_tls=False)) == name
