"""Decode steps that are captured graphs of the device give the ids of steps that are not, whatever joins and leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories.engine.fake_engine import Answer, collect, engine_config, request, run
from factories.engine.pools import unwritten_pool
from factories.models.checkpoints import tiny_checkpoint
from factories.models.emulated_cuda import EmulatedCUDA, EmulatedGraphs
from factories.models.emulated_npu import EmulatedNPU
from penstock.generation.core.request import Request
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.models.captured_decode import CapturedLM, bucket_sizes, can_capture
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import ModelRunner
from penstock.generation.sampling.sampling_kernels import QueuedSampling

CONFIG = engine_config(num_blocks=200, max_batch_tokens=64, max_running_sequences=32)
MOST_ROWS = 6


Device = EmulatedCUDA | EmulatedNPU


@pytest.fixture(scope="module", params=[EmulatedCUDA, EmulatedNPU])
def device(request: pytest.FixtureRequest) -> Device:
    torch.set_num_threads(1)
    device: Device = request.param()
    device.start(num_threads=1, kernels="torch")
    return device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, device: Device) -> CausalLM:
    loaded = load_model(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", device=device)
    assert isinstance(loaded, CausalLM)
    return loaded


def new_runner(model: CausalLM, graphs: EmulatedGraphs | None) -> ModelRunner:
    facts = model.config
    geometry = (facts.num_layers, CONFIG.num_blocks, CONFIG.block_size, facts.num_kv_heads, facts.head_dim)
    pool = unwritten_pool(*geometry, model.dtype)
    return ModelRunner(model, pool, kernels=QueuedSampling(), graphs=graphs, most_captured_rows=MOST_ROWS)


KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "sampled": [{"do_sample": True, "top_k": 9}, {"do_sample": True, "top_p": 0.7}, {"do_sample": True}],
    "mixed": [
        {},
        {"do_sample": True, "temperature": 1.4, "top_p": 0.9},
        {"repetition_penalty": 1.4},
        {"do_sample": True, "top_logprobs": 2},
        {"mode": BeamOptions(3)},
        {"do_sample": True, "top_k": 4, "min_p": 0.1},
    ],
}


def requests(kind: str) -> list[Request]:
    """Nine requests, more than there are rows of the largest graph, of different lengths."""
    options = KINDS[kind]
    return [
        request(
            [number + 1, 7, 3 * number][: 1 + number % 3],
            request_id=str(number),
            seed=number,
            max_new_tokens=4 + 5 * (number * 7 % 5),
            **options[number % len(options)],
        )
        for number in range(9)
    ]


@pytest.fixture
def graphs(device: Device) -> EmulatedGraphs:
    made = device.graph_capture()
    assert isinstance(made, EmulatedGraphs)
    return made


def ids_of(model: CausalLM, kind: str, graphs: EmulatedGraphs | None) -> dict[str, dict[int, list[int]]]:
    """The answers of requests of which one joins every third step."""
    engine = Engine(CONFIG, new_runner(model, graphs), None)
    answers: dict[str, Answer] = {}
    for item in requests(kind):
        engine.add(item)
        for _ in range(3):
            collect(answers, engine.step())
    run(engine, answers=answers)
    assert engine.load().kv_blocks_used == 0
    return {name: answer.ids for name, answer in answers.items()}


# "mixed" has all that the others have.
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "mixed" else [pytest.mark.slow]) for kind in KINDS]
)
def test_ids_are_those_of_steps_that_are_not_captured(model: CausalLM, graphs: EmulatedGraphs, kind: str) -> None:
    assert ids_of(model, kind, graphs) == ids_of(model, kind, None)
    # One graph for 1, 2, 4 and 6 rows, however often each is used.
    assert graphs.num_captured <= 4
    assert graphs.num_replayed > 20


def test_a_step_of_greedy_sequences_is_one_replay_that_goes_on_from_the_last(
    model: CausalLM, graphs: EmulatedGraphs
) -> None:
    runner = new_runner(model, graphs)
    engine = Engine(CONFIG, runner, None)
    for number in range(3):
        engine.add(request([number, 5], request_id=str(number), max_new_tokens=40))
    for _ in range(4):
        engine.step()
    steady, before = runner._steady, graphs.num_replayed
    assert steady is not None
    # Over the ends of blocks.
    for _ in range(30):
        engine.step()
    assert runner._steady is steady
    assert graphs.num_replayed == before + 30
    assert graphs.num_captured == 1


def test_a_row_that_is_not_a_number_fails_alone(model: CausalLM, graphs: EmulatedGraphs) -> None:
    engine = Engine(CONFIG, new_runner(model, graphs), None)
    answers: dict[str, Answer] = {}
    for number in range(3):
        engine.add(request([number, 5], request_id=str(number), max_new_tokens=12))
    for _ in range(3):
        collect(answers, engine.step())
    table = model._embedding
    assert isinstance(table, torch.Tensor)
    last = answers["1"].ids[0][-1]
    kept = table[last].clone()
    alike = [name for name, answer in answers.items() if answer.ids[0][-1] == last]
    try:
        table[last] = torch.nan
        collect(answers, engine.step())
    finally:
        table[last] = kept
    run(engine, answers=answers)
    whole = [name for name, answer in answers.items() if len(answer.ids[0]) == 12]
    assert sorted(whole + alike) == ["0", "1", "2"]


def test_the_warm_up_captures_every_size(model: CausalLM, graphs: EmulatedGraphs) -> None:
    new_runner(model, graphs).warm_up()
    # 1, 2, 4 and MOST_ROWS; rows of an NPU write at slots of their own, of which a block has 4.
    assert graphs.num_captured == (3 if graphs.needs_slots else 4)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (256, [1 << n for n in range(9)])]
)
def test_sizes_of_graphs(most: int, sizes: list[int]) -> None:
    assert bucket_sizes(most) == sizes


def test_a_call_that_reads_other_memory_in_a_replay_is_found() -> None:
    inputs = [torch.ones(2), torch.ones(2)]
    graph = EmulatedGraphs().capture(lambda: (inputs[0] + 1,))
    graph.replay()
    inputs.pop(0)
    with pytest.raises(AssertionError, match="reads a tensor that the capture did not"):
        graph.replay()
    with pytest.raises(AssertionError, match="waits for the device"):
        EmulatedGraphs().capture(lambda: (inputs[0] + float(inputs[0][0]),))


# A soft cap goes to the general operators, and experts wait for the number of their rows.
@pytest.mark.parametrize("family", ["gemma2", "qwen2_moe"])
def test_layers_that_wait_are_not_captured(
    tmp_path_factory: pytest.TempPathFactory, device: Device, graphs: EmulatedGraphs, family: str
) -> None:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), family)
    loaded = load_model(folder, dtype="float32", device=device)
    runner = new_runner(loaded, graphs)  # type: ignore[arg-type]
    assert not can_capture(loaded, runner._kv)
    assert not isinstance(runner._model, CapturedLM)


def test_a_pool_without_a_block_for_padding_is_not_captured(model: CausalLM, graphs: EmulatedGraphs) -> None:
    runner = new_runner(model, graphs)
    assert isinstance(runner._model, CapturedLM)
    runner._kv.scrap_block = None
    assert not can_capture(model, runner._kv)
