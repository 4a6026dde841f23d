"""Faults that tests order: they come when they are due, and nobody gets them by accident."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories.engine.fake_engine import FakeRunner, engine_config, request, run
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.failpoints import FAILPOINTS, FailingRunner, Failpoint, FailpointError


def engine(*orders: str) -> tuple[Engine, list[float]]:
    """An engine that fails as ordered, and what its runner slept."""
    config, slept = engine_config(), list[float]()
    runner = FailingRunner(FakeRunner(config), map(Failpoint.parse, orders), slept.append)
    return Engine(config, runner, None), slept


@pytest.mark.parametrize("name", FAILPOINTS)
def test_an_order_says_when(name: str) -> None:
    assert Failpoint.parse(name) == Failpoint(name)
    assert Failpoint.parse(f"{name}@3") == Failpoint(name, 3, 3)
    assert Failpoint.parse(f"{name}@3+") == Failpoint(name, 3)
    assert Failpoint.parse(f"{name}@/tmp/x") == Failpoint(name, file="/tmp/x")
    assert Failpoint.parse(f"{name}@token:7") == Failpoint(name, token_id=7)


@pytest.mark.parametrize(
    "text",
    ["", "engine.step", "engine.step.hang@", "engine.step.hang@x", "engine.step.hang@word:7", "engine.step.hang@-1"],
)
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected"):
        Failpoint.parse(text)
    with pytest.raises(StartupError) as refused:
        from_env_and_flags(GenerationServiceConfig, {"failpoints": (text,), "allow_failpoints": True})
    assert refused.value.flag == "--failpoints"


def test_failpoints_are_refused_without_their_own_flag() -> None:
    given = {"failpoints": "engine.step.hang,engine.step.raise@4"}
    with pytest.raises(StartupError, match="--allow-failpoints"):
        from_env_and_flags(GenerationServiceConfig, given)
    config = from_env_and_flags(GenerationServiceConfig, {**given, "allow_failpoints": True})
    assert config.failpoint_orders() == (Failpoint("engine.step.hang"), Failpoint("engine.step.raise", 4, 4))


def test_a_step_raises_when_it_is_its_turn() -> None:
    broken, _ = engine("engine.step.raise@3")
    broken.add(request([1, 2]))
    broken.step()
    broken.step()
    with pytest.raises(FailpointError):
        broken.step()


def test_a_step_raises_for_the_prompt_that_is_named_alone() -> None:
    broken, _ = engine("engine.step.raise@token:9")
    run(broken, request([1, 2]), request([3]))
    with pytest.raises(FailpointError):
        run(broken, request([1, 9]))


def test_numbers_that_are_none_end_the_request(tmp_path: Path) -> None:
    broken, _ = engine("engine.step.nan@2")
    answers = run(broken, item := request([1, 2]))
    finished = answers[item.request_id].finished
    assert finished is not None
    assert finished.error is not None
    assert finished.error.reason == "MODEL_OUTPUT_NAN"


def test_a_hang_ends_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "hang"
    file.touch()
    config, looks = engine_config(), 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            file.unlink()

    runner = FailingRunner(FakeRunner(config), [Failpoint("engine.step.hang", file=str(file))], sleep)
    run(Engine(config, runner, None), request([1]))
    assert looks == 3


def test_a_slow_step_is_slow_once() -> None:
    broken, slept = engine("engine.step.slow@2")
    run(broken, request([1], max_new_tokens=4))
    assert slept == [1.0]


def test_the_page_on_tests_names_every_failpoint() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "learn" / "testing.md").read_text()
    assert not [name for name in FAILPOINTS if f"| `{name}` |" not in page]
