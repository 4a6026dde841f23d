"""A layer by itself has the numbers of a step of the engine: on both kernels, in chunks, over either kind of pool."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.model_engine import load_tiny
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.paged import PagedDriver, PagedSequence
from factories.models.run_kernels import KERNELS, cpu_device
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.graphs.blocks import run_block, run_block_in_pool
from penstock.generation.graphs.graph import GraphStage
from penstock.generation.graphs.graph_limits import GraphLimits
from penstock.generation.graphs.graph_runner import GraphCall, GraphRunner
from penstock.generation.graphs.model_access import describe_graphs
from penstock.generation.graphs.sequences import SequenceBlocks
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.hidden_keeper import HiddenKeeper
from penstock.generation.models.registry import load_model

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 7}),
    ("gemma2", {}),
    ("qwen2_moe", {}),
]
BLOCK = 4


@pytest.fixture(params=CASES, ids=lambda case: case[0])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> CausalLM:
    family, config = request.param
    return load_tiny(tiny_checkpoint(tmp_path / family, family, **config))


def step_logits(model: CausalLM, ids: list[int], kv_dtype: torch.dtype | None) -> torch.Tensor:
    """Return the logits of every row, as one step of all layers gives them."""
    driver = PagedDriver(model, num_blocks=32, block_size=BLOCK, kv_dtype=kv_dtype)
    sequence = PagedSequence(list(ids))
    driver.step([(sequence, len(ids))])
    return torch.stack(sequence.logits)


def assert_same(
    found: torch.Tensor, expected: torch.Tensor, kv_dtype: torch.dtype | None, *, is_stored_again: bool = False
) -> None:
    """Bit for bit on the kernels, whose rows do not know of each other; nearly with torch's operators.
    `is_stored_again`: a history was turned back and rounded to int8 once more, which may change the last bit of a
    scale."""
    if KERNELS == "native":
        if is_stored_again and kv_dtype is not None:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
        else:
            assert torch.equal(found, expected)
    else:
        # A rounding of int8 may fall the other way.
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 if kv_dtype is None else 5e-2)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_a_prompt_at_once_and_in_chunks_behind_a_history(model: CausalLM, kv_dtype: torch.dtype | None) -> None:
    draw = random.Random(4)
    ids = [draw.randrange(VOCAB_SIZE) for _ in range(23)]
    expected = step_logits(model, ids, kv_dtype)
    like = PagedDriver(model, num_blocks=1, block_size=BLOCK, kv_dtype=kv_dtype).kv
    for cuts in ((23,), (5, 6, 23), (22, 23)):
        history: list[Any] = [None] * len(model.layers)
        rows: list[torch.Tensor] = []
        first = 0
        for last in cuts:
            hidden = model.embed(torch.tensor(ids[first:last]))[None]
            for layer in range(len(model.layers)):
                lengths = [(first, last - first)]
                hidden, keys, values = run_block(model, layer, like, hidden, lengths, None, history[layer])
                before = history[layer]
                history[layer] = (
                    (keys, values)
                    if before is None
                    else (torch.cat([before[0], keys], 1), torch.cat([before[1], values], 1))
                )
            rows.append(model.compute_logits(model.normed(hidden[0])))
            first = last
        assert_same(torch.cat(rows), expected, kv_dtype, is_stored_again=len(cuts) > 1)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_in_the_pool_in_chunks(model: CausalLM, kv_dtype: torch.dtype | None) -> None:
    draw = random.Random(5)
    ids = [draw.randrange(VOCAB_SIZE) for _ in range(19)]
    expected = step_logits(model, ids, kv_dtype)
    driver = PagedDriver(model, num_blocks=32, block_size=BLOCK, kv_dtype=kv_dtype)
    blocks = driver.take_blocks(5)
    rows: list[torch.Tensor] = []
    for first, last in ((0, 3), (3, 4), (4, 19)):
        hidden = model.embed(torch.tensor(ids[first:last]))
        for layer in range(len(model.layers)):
            hidden, keys, values = run_block_in_pool(model, layer, driver.kv, hidden, first, blocks, None)
            assert keys.shape == values.shape == (last - first, model.config.num_kv_heads, model.config.head_dim)
        rows.append(model.compute_logits(model.normed(hidden)))
    assert_same(torch.cat(rows), expected, kv_dtype)


def test_a_batch_with_padding_is_each_alone(model: CausalLM) -> None:
    draw = random.Random(6)
    ids = [[draw.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(3)]
    lengths = [(0, 12), (0, 1), (0, 9)]
    like = PagedDriver(model, num_blocks=1, block_size=BLOCK).kv
    hidden = model.embed(torch.tensor(ids).flatten()).view(3, 12, -1)
    kept = hidden.clone()
    found, keys, _ = run_block(model, 1, like, hidden, lengths, None, None)
    # What came in is the caller's, and padding is nothing.
    assert torch.equal(hidden, kept)
    for row, (_, rows) in enumerate(lengths):
        alone, key, _ = run_block(model, 1, like, hidden[row : row + 1, :rows], [(0, rows)], None, None)
        assert_same(found[row, :rows], alone[0], None)
        assert_same(keys[row, :rows], key[0], None)
        assert not found[row, rows:].any()


def test_positions_turn_the_heads_and_nothing_else(model: CausalLM) -> None:
    like = PagedDriver(model, num_blocks=1, block_size=BLOCK).kv
    hidden = model.embed(torch.tensor([3, 4, 5]))[None]
    plain = run_block(model, 0, like, hidden, [(0, 3)], torch.tensor([[0, 1, 2]]), None)
    default = run_block(model, 0, like, hidden, [(0, 3)], None, None)
    moved = run_block(model, 0, like, hidden, [(0, 3)], torch.tensor([[40, 41, 42]]), None)
    assert torch.equal(plain[0], default[0])
    assert torch.equal(moved[2], default[2])
    assert not torch.allclose(moved[1], default[1])
    # Attention goes by distances, which are the same.
    torch.testing.assert_close(moved[0], default[0], rtol=0, atol=1e-4)


def test_this_run_has_the_kernels_that_it_says() -> None:
    device = cpu_device()
    if not isinstance(device, CPUDevice):
        pytest.skip("--device: this run has another device than the CPU")
    assert (device.instruction_set is not None) == (KERNELS == "native")


def test_ids_and_positions_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may write into a tensor at the server after it was checked: no place outside a table may be read."""
    model = load_tiny(tiny_checkpoint(tmp_path / "model", "llama"))
    kv = PagedDriver(model, num_blocks=4, block_size=BLOCK).kv
    limits = GraphLimits(stages=(GraphStage(1, 16),), retry_seconds=1.0)
    runner = GraphRunner(model, kv, SequenceBlocks(0, 4, BLOCK, 16), cpu_device().sampling_kernels())
    graph = describe_graphs(model, limits).named("block_0")
    positions = torch.arange(3, dtype=torch.int32)[None]
    inputs = {0: model.embed(torch.tensor([[5, 6, 7]])), 1: positions}
    sizes = graph.bind({index: tuple(one.shape) for index, one in inputs.items()}, None)
    expected = runner.run(GraphCall(graph, sizes, dict(inputs)))[0]
    check = GraphRunner._check_positions

    def written_after(runner: GraphRunner, *arguments: Any) -> None:
        check(runner, *arguments)
        positions.fill_(1 << 30)

    monkeypatch.setattr(GraphRunner, "_check_positions", written_after)
    assert torch.equal(runner.run(GraphCall(graph, sizes, dict(inputs)))[0], expected)


@pytest.mark.parametrize(("family", "config"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_hidden_states_of_bfloat16_are_rounded_between_layers_alone(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """A layer takes and gives what `output_hidden_states` tells of a step; on the kernels that step's own sum of the
    layers is not rounded in between."""
    model = load_model(tiny_checkpoint(tmp_path / family, family, **config), dtype="bfloat16", device=cpu_device())
    draw = random.Random(4)
    ids = torch.tensor([draw.randrange(VOCAB_SIZE) for _ in range(23)])
    kv = PagedDriver(model, num_blocks=6, block_size=BLOCK).kv
    metadata, positions = AttentionMetadata.build([23], [23], torch.arange(6, dtype=torch.int32)[None], BLOCK)
    keeper = HiddenKeeper(torch.arange(23))
    final = model.forward(ids, positions, metadata, kv, keeper=keeper)
    assert {final.dtype, *(state.dtype for state in keeper.states.values())} == {torch.bfloat16}

    last = len(model.layers) - 1
    for layer in range(len(model.layers)):
        before = keeper.states[layer][None]
        found, keys, _ = run_block(model, layer, kv, before, [(0, 23)], None, None)
        assert found.dtype is keys.dtype is torch.bfloat16
        expected = final if layer == last else keeper.states[layer + 1]
        got = model.normed(found[0]) if layer == last else found[0]
        if layer == 0 and layer != last and KERNELS == "native":
            assert torch.equal(got, expected)
        else:
            # One rounding of the stream, and what it moves.
            assert (got - expected).float().norm() <= 0.02 * expected.float().norm()
