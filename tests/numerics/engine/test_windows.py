"""Models whose layers all have windows: blocks behind them are given back, nothing of these is read, ids stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import collect, engine_config, request, run
from factories.engine.model_engine import answers_alone, check_company, model_engine
from factories.models.model_types import VOCAB_SIZE, WINDOW, greedy_ids, reference_of, tiny_model_type
from factories.models.native import use_native
from factories.models.run_kernels import cpu_device
from penstock.common.errors import ResourceExhausted
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.core.request import Request
from penstock.generation.core.step import RunnerOutput, SchedulerOutput
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.acceptance import check_capacity
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.engine.engine import Engine
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import load_model
from penstock.generation.startup.tune_engine import window_of

CONFIG = engine_config(
    num_blocks=24, block_size=4, max_context_tokens=1000, max_batch_tokens=20, max_running_sequences=9
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_type(tmp_path_factory.mktemp("model"), "mistral", max_position_embeddings=1024)


def loaded(folder: Path, route: str) -> LanguageModel:
    return load_model(folder, dtype="float32", device=cpu_device(), route=ModelRoute(route))


@pytest.fixture(scope="module")
def native(folder: Path) -> LanguageModel:
    return loaded(folder, "native")


@pytest.fixture(scope="module", params=["native", "fallback"])
def model(request: pytest.FixtureRequest, folder: Path) -> LanguageModel:
    return loaded(folder, request.param)


class Poisoning:
    """Runner in whose steps every free block is NaN."""

    def __init__(self, engine: Engine) -> None:
        self._runner: Any = engine._runner
        self._pool = engine._scheduler.pool
        self.poisoned = 0
        engine._runner = self

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        sources = {copy.source for copy in output.copies}
        free = [block for block in self._pool._free if block not in sources]
        self.poisoned += len(free)
        kv = self._runner._kv
        for layer in range(kv.num_layers):
            for part in (kv.key(layer), kv.value(layer)):
                part[free] = torch.nan
        result: RunnerOutput = self._runner.execute(output)
        return result

    def release(self, seq_ids: list[int]) -> None:
        self._runner.release(seq_ids)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = Random(seed)
    return [source.randrange(3, VOCAB_SIZE) for _ in range(length)]


def requests() -> list[Request]:
    long, head = prompt_of(70), prompt_of(30, 1)
    repeated = prompt_of(9, 2) * 5
    return [
        request(long, max_new_tokens=30, request_id="greedy"),
        request([*long[:61], 4], max_new_tokens=9, request_id="same beginning"),
        request(head, max_new_tokens=20, request_id="drawn", do_sample=True, seed=11, num_return_sequences=3),
        request([*head, *head], max_new_tokens=25, request_id="beams", mode=BeamOptions(3)),
        request(repeated, max_new_tokens=30, request_id="drafts", mode=AssistanceOptions(prompt_lookup_num_tokens=4)),
        request(head[:20], max_new_tokens=20, request_id="groups", mode=BeamOptions(4, 2, 1.0), num_return_sequences=2),
    ]


def test_only_models_whose_layers_all_have_one_give_blocks_back(tmp_path: Path, model: LanguageModel) -> None:
    assert window_of(model) == WINDOW + model.attention.reads_behind
    mixed = load_model(tiny_model_type(tmp_path, "gemma2"), dtype="float32", device=cpu_device())
    assert window_of(mixed) == 0


@pytest.mark.thinned(2)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_nothing_behind_the_window_is_read(native: LanguageModel, prefix_cache: bool) -> None:
    wide = replace(CONFIG, num_blocks=200, max_batch_tokens=300)
    config = replace(CONFIG, prefix_cache=prefix_cache)
    engine = model_engine(native, config)
    poison = Poisoning(engine)
    alone = {item.request_id: run(model_engine(native, wide), item)[item.request_id].ids for item in requests()}
    for _ in range(2):
        assert {name: answer.ids for name, answer in run(engine, *requests()).items()} == alone
        engine.check_integrity()
    assert poison.poisoned > 0
    assert (engine.stats.prefix_hit_tokens > 0) == prefix_cache


def test_answers_do_not_depend_on_others_beside_them(native: LanguageModel) -> None:
    # Room for the largest alone: the kernels read, and so keep, more behind a window.
    windowed = replace(CONFIG, window=window_of(native))
    needed = (
        MODES.blocks_needed(windowed, item.params, len(item.prompt_token_ids), item.params.max_new_tokens)
        for item in requests()
    )
    config = replace(CONFIG, num_blocks=max(needed))
    alone = answers_alone(native, requests())
    engine = check_company(native, requests, config, alone=alone)
    assert engine.stats.preemptions > 0
    host = check_company(native, requests, replace(config, num_host_blocks=100, preemption="swap"), alone=alone)
    assert host.stats.swaps > 0


def check_memory(model: LanguageModel, prompt: list[int], new_tokens: int) -> dict[int, list[int]]:
    """Check that a pool of no more than a window and a step's rows is enough. Return the ids."""
    # Without a prefix cache, so that what is given back is free at once, and spoilt.
    group = replace(CONFIG, window=window_of(model)).block_groups[0]
    most = group.most_blocks(CONFIG.max_batch_tokens, CONFIG.block_size)
    config = replace(CONFIG, num_blocks=most, prefix_cache=False)
    engine = model_engine(model, config)
    poison = Poisoning(engine)
    item = request(prompt, max_new_tokens=new_tokens)
    engine.check(item)
    engine.add(item)
    held = []
    answers: dict[str, Any] = {}
    while engine.has_work:
        held += [group.num_blocks for group in engine._groups.values()]
        collect(answers, engine.step())
    assert max(held) <= config.num_blocks < len(prompt) // config.block_size // 2
    assert engine.stats.preemptions == 0
    assert poison.poisoned > 0
    # Of a decoding sequence: its window, and a token more.
    assert held[-1] <= -(-window_of(model) // config.block_size) + 1
    found: dict[int, list[int]] = answers[item.request_id].ids
    return found


def test_a_sequence_of_many_windows_holds_one_and_a_step(model: LanguageModel, folder: Path) -> None:
    prompt = prompt_of(8 * window_of(model))
    assert check_memory(model, prompt, 24)[0] == greedy_ids(reference_of(folder), prompt, 24)
    # With one full layer the request would need all of its blocks.
    with pytest.raises(ResourceExhausted, match="KV blocks"):
        check_capacity(replace(CONFIG, num_blocks=14), MODES, request(prompt, max_new_tokens=24))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_read_nothing_behind_the_window(folder: Path, dtype: str) -> None:
    use_native()
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(folder, dtype=dtype, device=device)
    assert model.can_draw
    prompt = prompt_of(8 * window_of(model))
    wide = replace(CONFIG, num_blocks=300, max_batch_tokens=700)
    item = request(prompt, max_new_tokens=90, request_id="wide")
    wanted = run(model_engine(model, wide), item)["wide"].ids
    assert check_memory(model, prompt, 90) == wanted
