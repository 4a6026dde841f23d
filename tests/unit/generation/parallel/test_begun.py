"""Processes of ranks are begun at the start of the program, and end with it or with a start that does without."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import StartupError
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.parallel.begun import BegunRanks
from penstock.generation.parallel.processes import Ranks
from penstock.generation.startup.preload import begin

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BEFORE_TORCH = """
import sys
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.startup.preload import begin
begun = begin(GenerationServiceConfig(model="demo", tensor_parallel=2, prefault_weights=False))
rank = begun.ranks.take()
print(rank.process.poll(), "torch" in sys.modules)
rank.process.kill()
"""


@pytest.fixture
def begun() -> Iterator[BegunRanks]:
    made = BegunRanks()
    yield made
    made.close()


def test_each_further_rank_is_begun_and_those_that_nobody_takes_end(begun: BegunRanks) -> None:
    begun.begin(3)
    processes = [rank.process for rank in begun._ranks]
    assert len(processes) == 2
    taken = begun.take()
    begun.close()
    begun.close()
    assert [process.poll() is None for process in processes] == [process is taken.process for process in processes]
    taken.process.kill()
    taken.process.wait()
    taken.connection.close()


@pytest.mark.parametrize(
    ("count", "environment"),
    [(1, {}), (3, LAUNCHED), (3, {**LAUNCHED, "WORLD_SIZE": "x"})],
    ids=["one process", "a launcher's", "a launcher's that is wrong"],
)
def test_none_is_begun_where_none_is_needed(
    begun: BegunRanks,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    environment: dict[str, str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    begun.begin(count)
    assert not begun._ranks


@pytest.mark.parametrize(("count", "begins"), [(2, 1), (64, 0), (3, 0)])
def test_none_is_begun_for_a_model_whose_heads_they_cannot_share(count: int, begins: int) -> None:
    """The loader refuses it, and says why: 63 processes would import torch for that."""
    assert json.loads((demo_folder() / "config.json").read_text())["num_attention_heads"] % 2 == 0
    config = GenerationServiceConfig(model=str(demo_folder()), tensor_parallel=count, prefault_weights=False)
    with contextlib.closing(begin(config)) as made:
        assert len(made.ranks._ranks) == begins


def test_a_model_that_is_not_there_yet_may_be_spread(tmp_path: Path) -> None:
    config = GenerationServiceConfig(model=str(tmp_path / "none"), tensor_parallel=2, prefault_weights=False)
    with contextlib.closing(begin(config)) as made:
        assert len(made.ranks._ranks) == 1


def test_they_are_begun_before_torch_is_imported() -> None:
    run = subprocess.run(
        [sys.executable, "-c", BEFORE_TORCH], env=dict(os.environ), capture_output=True, text=True, check=True
    )
    assert run.stdout == "None False\n"


def test_one_begins_where_many_files_are_open(begun: BegunRanks) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
        for _ in range(600):
            files.enter_context(open(os.devnull))
        begun.begin(2)
        (rank,) = begun._ranks
        assert rank.connection.fileno() > 500
        rank.connection.close()
        # It ends by itself, as with a rank 0 that has left.
        assert rank.process.wait() == 0
    begun._ranks.clear()


def test_one_that_has_ended_before_its_order_is_named(begun: BegunRanks) -> None:
    begun.begin(2)
    (rank,) = begun._ranks
    rank.process.kill()
    rank.process.wait()
    ranks = Ranks(2, CPUDevice())
    with pytest.raises(StartupError, match="rank 1 of --tensor-parallel ended with code -9") as caught:
        ranks.start({}, begun)
    assert caught.value.flag == "--tensor-parallel"
