"""Windows of a server's connection: what is given back, what may be sent, and who is woken by new room."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from penstock.http2 import frames
from penstock.http2.flow_control import FlowControl

from tests.factories.wire.http2 import LIMITS, frames_of

WINDOW = 1 << 20


@dataclass
class Waiting:
    """A call that waits for room."""

    window: int = frames.DEFAULT_WINDOW
    wants: int = 1000
    woken: int = 0

    def wake(self) -> None:
        self.woken += 1


def made(sent: bytearray | None = None) -> FlowControl:
    limits = replace(LIMITS, connection_window_bytes=WINDOW, write_buffer_bytes=2500)
    return FlowControl(limits, None, (bytearray() if sent is None else sent).extend)


def test_the_connections_window_is_given_back_for_many_frames_at_once() -> None:
    sent = bytearray()
    flow = made(sent)
    for _ in range(16):
        flow.take_data(WINDOW // 16)
    given = [(stream, int.from_bytes(more, "big")) for _, _, stream, more in frames_of(sent)]
    assert given == [(0, WINDOW // 4)] * 4


def test_new_room_wakes_as_many_as_it_is_for() -> None:
    flow, calls = made(), [Waiting() for _ in range(4)]
    flow.blocked.update(enumerate(calls))
    flow.window = 0
    flow.take_update(10_000)
    assert not any(call.woken for call in calls), "they are woken once, however many frames come together"
    flow.pass_on_new_room()
    # The bytes that may be queued at once are the bound.
    assert [call.woken for call in calls] == [1, 1, 1, 0]
    flow.is_paused = True
    flow.pass_on()
    assert calls[0].woken == 1


@pytest.mark.parametrize("more", [0, frames.MAX_WINDOW])
def test_a_window_that_cannot_be_is_the_end_of_the_connection(more: int) -> None:
    with pytest.raises(frames.Violation):
        made().take_update(more)


def test_a_smaller_first_window_takes_from_calls_and_a_larger_one_wakes_them() -> None:
    flow, call = made(), Waiting()
    flow.resize([0], [call])
    assert (call.window, call.woken) == (0, 0)
    flow.resize([100, 50], [call])
    assert (call.window, call.woken, flow.initial_window) == (50, 1, 50)
    call.window = frames.MAX_WINDOW
    with pytest.raises(frames.Violation):
        flow.resize([51], [call])
