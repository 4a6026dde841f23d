"""The fast path: every feature keeps a step off it, and the ids are the same on either path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from factories.engine.fake_engine import engine_config, request, run
from factories.engine.pools import unwritten_pool
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.native import PRODUCT_SETS, use_instruction_set
from penstock.generation.core.decoding_mode import GuidanceOptions, TensorOutputs
from penstock.generation.core.request import Request
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.engine.decoding.parallel_sampling import DolaOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.draw_rows import DrawRows
from penstock.generation.runner.fast_path import FEATURES, FastPath
from penstock.generation.runner.model_runner import ModelRunner
from penstock.generation.runner.steady_decode import SteadyDecode
from penstock.generation.sampling.sampler import Sampler

CONFIG = engine_config(num_blocks=120)
# Feature -> options of a request that wants it; a new feature is not done before it stands here.
OPTIONS: dict[str, dict[str, Any]] = {
    "candidates": {"mode": BeamOptions(2)},
    "early exits": {"mode": DolaOptions((0,))},
    "grammar": {},
    "guidance": {"guidance": GuidanceOptions(1.5, (9,))},
    "hidden states": {"mode": ContrastiveOptions(0.6, 2)},
    "logprobs": {"top_logprobs": 1},
    "processors": {"repetition_penalty": 1.3},
    "sampling": {"do_sample": True},
    "tensors": {"tensors": TensorOutputs(logits=True)},
}


@pytest.fixture(scope="module", params=PRODUCT_SETS[-1:], autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, _instruction_set: None) -> CausalLM:
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", device=device)
    assert model.can_draw
    return model


class Everything:
    """A grammar, its state and the filler of its masks: every token may follow."""

    is_done = is_free = is_cut = False
    num_words = -(-VOCAB_SIZE // 32)

    def start(self, eos_token_ids: tuple[int, ...], max_tokens: int | None = None) -> Everything:
        return self

    def copy(self) -> Everything:
        return self

    def advance(self, token_id: int) -> bool:
        return True

    def fill_mask(self, mask_W: Any) -> None:
        mask_W.fill(-1)

    def fill(self, states: Any, words_RW: np.ndarray) -> None:
        words_RW.fill(-1)


def requests(feature: str) -> list[Request]:
    """A request that wants the feature and ends early, and a plain one."""
    wanting = request([1, 2, 3], request_id="wanting", max_new_tokens=4, **OPTIONS[feature])
    if feature == "grammar":
        wanting.grammar = Everything()
    return [wanting, request([4, 5], request_id="plain", max_new_tokens=12)]


class Ways:
    """Record of each step: does a sequence with the feature draw in it, and does the fast path take it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_off: bool = False) -> None:
        self.steps: list[tuple[bool, bool]] = []
        self.num_steady = 0
        takes, step = FastPath.takes, SteadyDecode.step

        def asked(path: FastPath, draws: DrawRows, num_results: int, sampler: Sampler) -> bool:
            taken = not is_off and takes(path, draws, num_results, sampler)
            self.steps.append((any(one.token_ids[:3] == [1, 2, 3] for one in draws.sequences), taken))
            return taken

        def stepped(steady: SteadyDecode, *arguments: Any) -> Any:
            result = step(steady, *arguments)
            self.num_steady += result is not None
            return result

        monkeypatch.setattr(FastPath, "takes", asked)
        monkeypatch.setattr(SteadyDecode, "step", stepped)


def ids_of(model: CausalLM, items: list[Request]) -> dict[str, dict[int, list[int]]]:
    config, facts = CONFIG, model.config
    geometry = (facts.num_layers, config.num_blocks, config.block_size, facts.num_kv_heads, facts.head_dim)
    runner = ModelRunner(model, unwritten_pool(*geometry, model.dtype), masks=Everything())
    answers = run(Engine(config, runner, None), *items)
    return {name: answer.ids for name, answer in answers.items()}


def test_every_feature_is_tried() -> None:
    assert set(OPTIONS) == {feature.name for feature in FEATURES}


@pytest.mark.parametrize("feature", OPTIONS)
def test_no_step_with_a_feature_takes_the_fast_path(
    model: CausalLM, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        ways = Ways(patch)
        ids = ids_of(model, requests(feature))
    assert [taken for wants, taken in ways.steps if wants] == [False] * sum(wants for wants, _ in ways.steps)
    assert any(wants for wants, _ in ways.steps)
    # Once it has ended: one step by the usual way of asking, and the others go on from it.
    assert any(taken for wants, taken in ways.steps if not wants)
    assert ways.num_steady > 3
    with monkeypatch.context() as patch:
        off = Ways(patch, is_off=True)
        assert ids_of(model, requests(feature)) == ids
    assert off.num_steady == 0
    assert not any(taken for _, taken in off.steps)


def test_plain_requests_go_the_fast_path_and_get_the_same_ids_without_it(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain() -> list[Request]:
        return [request([number, 7], request_id=str(number), max_new_tokens=6 + number) for number in range(4)]

    with monkeypatch.context() as patch:
        ways = Ways(patch)
        ids = ids_of(model, plain())
    assert all(taken for _, taken in ways.steps[1:])
    assert ways.num_steady > 0
    with monkeypatch.context() as patch:
        Ways(patch, is_off=True)
        assert ids_of(model, plain()) == ids
