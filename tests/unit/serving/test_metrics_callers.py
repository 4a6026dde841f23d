"""Callers of a metrics port: those that give way, and those turned away for the work that their network asked for."""

from __future__ import annotations

from penstock.serving.metrics_callers import MetricsCallers

SHARE = 0.05


class Port:
    """Callers of a port, and those that were told to go."""

    def __init__(self, most: int, share: float | None = SHARE) -> None:
        self.now = 0.0
        self.gone: list[str] = []
        self.callers = MetricsCallers(most, share, clock=lambda: self.now)

    def enter(self, name: str, network: str = "a") -> bool:
        return self.callers.enter(name, network, lambda: self.gone.append(name))

    def answer(self, name: str, network: str, seconds: float, *, is_trusted: bool = False) -> bool:
        if not self.enter(name, network):
            return False
        self.callers.ask(name, is_trusted=is_trusted)
        self.callers.leave(name, network, seconds)
        return True


def test_the_oldest_silent_one_gives_way() -> None:
    port = Port(2)
    assert all(port.enter(name) for name in ("one", "two", "three", "four"))
    assert port.gone == ["one", "two"]


def test_a_flood_displaces_itself() -> None:
    port = Port(3)
    assert port.enter("prober", "b")
    assert all(port.enter(f"flood {number}") for number in range(9))
    assert "prober" not in port.gone
    assert len(port.gone) == 7


def test_a_whole_request_keeps_its_place() -> None:
    port = Port(2)
    for name in ("one", "two"):
        assert port.enter(name)
        port.callers.ask(name, is_trusted=True)
    assert not port.enter("three")
    port.callers.leave("one", "a", 0.0)
    assert port.enter("three")
    assert port.gone == []


def test_one_that_had_to_go_takes_no_place_along_when_its_thread_ends() -> None:
    port = Port(1)
    assert port.enter("one")
    assert port.enter("two")
    port.callers.leave("one", "a", 0.0)
    assert port.enter("three")
    assert port.gone == ["one", "two"]


def test_work_beyond_the_share_is_not_done_for_those_who_asked_for_it() -> None:
    port = Port(9)
    answered = 0
    for number in range(1000):
        # A millisecond of work, and a thousand requests a second: twenty times the share.
        port.now += 0.001
        answered += port.answer(f"flood {number}", "a", 0.001)
    assert 250 <= answered <= 320
    assert port.answer("prober", "b", 0.001)
    port.now += 60.0
    assert port.answer("later", "a", 0.001)


def test_work_for_credentials_counts_against_nobody() -> None:
    port = Port(9)
    assert all(port.answer(f"{number}", "a", 1.0, is_trusted=True) for number in range(99))
    assert port.answer("prober", "a", 0.001)


def test_without_tokens_there_are_no_strangers() -> None:
    port = Port(9, share=None)
    assert all(port.answer(f"{number}", "a", 1.0) for number in range(99))


def test_as_many_networks_as_there_are_addresses_take_no_memory() -> None:
    port = Port(9)
    for number in range(5000):
        port.answer(f"{number}", f"network {number}", 0.0001)
    assert len(port.callers._work) <= 1024
