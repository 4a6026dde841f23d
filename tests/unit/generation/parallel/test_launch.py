"""A process finds its place among ranks by torchrun's variables, or says which of them is wrong."""

from __future__ import annotations

import pytest
from penstock.common.errors import StartupError
from penstock.generation.parallel.launch import Rendezvous, refuse_launcher

GOOD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_the_variables_are_a_place() -> None:
    assert Rendezvous.of(GOOD, 4) == Rendezvous(1, 4, "127.0.0.1", 29500, is_store_there=False)
    agents = {**GOOD, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert Rendezvous.of(agents, 4) == Rendezvous(1, 4, "127.0.0.1", 29500, is_store_there=True)
    again = {**agents, "TORCHELASTIC_RESTART_COUNT": "2"}
    assert Rendezvous.of(again, 4) == Rendezvous(1, 4, "127.0.0.1", 29500, is_store_there=True, attempt=2)


@pytest.mark.parametrize(
    ("environment", "count"), [({}, 4), (GOOD, 1), ({"WORLD_SIZE": "4"}, 4), ({"RANK": "0", "WORLD_SIZE": "1"}, 4)]
)
def test_without_a_launcher_or_ranks_there_is_no_place(environment: dict[str, str], count: int) -> None:
    assert Rendezvous.of(environment, count) is None


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_missing_is_named(name: str, value: str | None) -> None:
    own = {key: one for key, one in {**GOOD, name: value}.items() if one is not None}
    with pytest.raises(StartupError, match=f"RANK is set, and {name} is not") as caught:
        Rendezvous.of(own, 4)
    assert caught.value.flag == name


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "-1", "RANK must be a number from 0 on, found '-1'"),
        ("RANK", "٣", "RANK must be a number"),
        ("RANK", "4", "RANK is 4, and must be below WORLD_SIZE, 4"),
        ("RANK", "9" * 5000, "RANK must be a number"),
        ("WORLD_SIZE", "2", "WORLD_SIZE is 2, and --tensor-parallel 4"),
        ("LOCAL_RANK", "0", "LOCAL_RANK is 0, and RANK 1"),
        ("MASTER_PORT", "0", "MASTER_PORT is 0"),
        ("MASTER_PORT", "65536", "MASTER_PORT is 65536"),
        ("TORCHELASTIC_RESTART_COUNT", "-1", "TORCHELASTIC_RESTART_COUNT must be a number"),
    ],
)
def test_a_variable_that_is_wrong_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(StartupError, match=words) as caught:
        Rendezvous.of({**GOOD, name: value}, 4)
    assert caught.value.flag == name
    assert len(caught.value.message) < 300


def test_a_tree_of_services_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    refuse_launcher(1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_launcher(4)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(StartupError, match="a launcher of ranks starts `penstock serve generation`"):
        refuse_launcher(4)
