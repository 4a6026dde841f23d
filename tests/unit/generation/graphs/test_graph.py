"""Graphs as data: names, shapes by stage, and the sizes that a call's shapes bind."""

from __future__ import annotations

import pytest
from penstock.common.errors import InvalidArgument, NotFound
from penstock.generation.graphs.graph import BATCH, LENGTH, ROWS, Graph, Graphs, GraphStage, GraphWeights, ModelSizes

STAGES = (GraphStage(1, 8), GraphStage(1, 32), GraphStage(4, 8), GraphStage(4, 32))
SIZES = ModelSizes(num_layers=2, hidden_size=6, num_kv_heads=2, head_dim=3, vocab_size=11, dtype="bfloat16")
GRAPHS = Graphs(SIZES, STAGES, embedding=GraphWeights(), layers=[GraphWeights("int8", 0.5)] * 2, head=GraphWeights())


def graph(name: str) -> Graph:
    return GRAPHS.named(name)


def test_they_are_listed_in_the_order_of_a_pass() -> None:
    names = ["embedding", "embedding_cache", "block_0", "block_1", "block_cache_0", "block_cache_1"]
    assert [one.name for one in GRAPHS.every] == [*names, "lm_head", "greedy_head", "sample_head"]
    assert [graph(f"block_{layer}").layer for layer in range(2)] == [0, 1]


@pytest.mark.parametrize("name", ["block_2", "", "Embedding"])
def test_an_unknown_name_is_not_found(name: str) -> None:
    with pytest.raises(NotFound) as caught:
        graph(name)
    assert caught.value.reason == "GRAPH_NOT_FOUND"


def test_shapes_by_stage_and_between() -> None:
    history = graph("block_cache_0").inputs[3]
    shapes = graph("block_cache_0").stage_shapes(history)
    assert shapes == ((1, 8, 2, 3), (1, 32, 2, 3), (4, 8, 2, 3), (4, 32, 2, 3))
    mask = graph("block_cache_0").inputs[2]
    assert graph("block_cache_0").stage_shapes(mask)[1] == (1, 1, 1, 33)
    assert graph("block_cache_0").min_shape(mask) == (1, 1, 1, 2)
    assert graph("block_cache_0").max_shape(mask) == (4, 1, 32, 64)
    assert graph("embedding_cache").stage_shapes(graph("embedding_cache").inputs[0])[3] == (4, 1)
    # A small vocabulary has no fifty candidates.
    assert graph("sample_head").max_shape(graph("sample_head").outputs[1]) == (4, 11)


def test_sizes_come_from_the_shapes() -> None:
    assert graph("block_0").bind({0: (3, 20, 6), 2: (3, 1, 20, 20)}, None) == {BATCH: 3, LENGTH: 20}
    cached = {0: (2, 5, 6), 2: (2, 1, 5, 12), 3: (2, 7, 2, 3), 4: (2, 7, 2, 3)}
    assert graph("block_cache_1").bind(cached, None) == {BATCH: 2, ROWS: 5, LENGTH: 7}
    # Without a history a mask has columns for the rows alone.
    assert graph("block_cache_1").bind({0: (2, 5, 6), 2: (2, 1, 5, 5)}, None) == {BATCH: 2, ROWS: 5}


@pytest.mark.parametrize(
    ("name", "shapes", "field"),
    [
        ("block_0", {}, "inputs"),
        ("block_0", {0: (1, 8)}, "inputs[0].shape"),
        ("block_0", {0: (1, 8, 5)}, "inputs[0].shape"),
        ("block_0", {0: (5, 8, 6)}, "inputs[0].shape"),
        ("block_0", {0: (0, 8, 6)}, "inputs[0].shape"),
        ("block_0", {0: (1, 33, 6)}, "inputs[0].shape"),
        ("block_0", {0: (1, 8, 6), 1: (1, 7)}, "inputs[1].shape"),
        ("block_0", {0: (1, 8, 6), 2: (1, 2, 8, 8)}, "inputs[2].shape"),
        ("block_cache_0", {0: (1, 1, 6), 3: (1, 8, 2, 3), 4: (1, 7, 2, 3)}, "inputs[4].shape"),
        ("block_cache_0", {0: (1, 1, 6), 2: (1, 1, 1, 8), 3: (1, 8, 2, 3), 4: (1, 8, 2, 3)}, "inputs[2].shape"),
        ("lm_head", {0: (1, 1, 6)}, "inputs[0].shape"),
    ],
)
def test_shapes_that_do_not_fit_are_named(name: str, shapes: dict[int, tuple[int, ...]], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        graph(name).bind(shapes, None)
    assert caught.value.field == field


def test_a_stage_takes_its_own_shapes_only() -> None:
    assert graph("block_0").bind({0: (4, 8, 6)}, 2)
    assert graph("block_cache_0").bind({0: (1, 1, 6), 3: (1, 32, 2, 3), 4: (1, 32, 2, 3)}, 1)
    for stage in (0, 3, 4):
        with pytest.raises(InvalidArgument) as caught:
            graph("block_0").bind({0: (4, 8, 6)}, stage)
        assert caught.value.field == "stage"


def test_places_that_are_not_there_are_named() -> None:
    for place in (graph("block_0").input, graph("block_0").output):
        assert place(2, "inputs.index")
        with pytest.raises(InvalidArgument, match=r"inputs\.index: must be below 3"):
            place(3, "inputs.index")
