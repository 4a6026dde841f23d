"""`penstock serve --models DIR`: every model of a folder behind one address, loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from factories.servers import stack
from factories.servers.generation import text_checkpoint
from penstock.v1 import common_pb2
from penstock_client import AsyncClient, NotFound

FLAGS = ("--kv-memory", "16MiB", "--threads", "1", "--model-slots", "1", "--model-turn-seconds", "0")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stack.Process]:
    """A tree with two models and one slot."""
    root: Path = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        text_checkpoint(root / name)
    process = stack.start(None, "--models", str(root), *FLAGS)
    try:
        process.wait_ready()
        yield process
    finally:
        process.kill()


async def test_each_model_answers_though_one_slot_is_there(tree: stack.Process) -> None:
    async with AsyncClient(tree.address) as client:
        assert {(one.name, one.state) for one in await client.list_models()} == {
            ("first", common_pb2.MODEL_STATE_EMPTY),
            ("second", common_pb2.MODEL_STATE_EMPTY),
        }
        for name in ("first", "second", "first"):
            answer = await client.generate("Hello", model=name, max_new_tokens=4)
            assert answer.started.model == name
        with pytest.raises(NotFound, match="there are: first, second"):
            await client.generate("Hello", model="third")


async def test_a_tree_of_many_models_takes_no_model(tmp_path: Path) -> None:
    code, _, errors = await stack.penstock("serve", "./model", "--models", str(tmp_path))
    assert (code, "MODEL is for one model: leave it out with --models" in errors) == (2, True)
