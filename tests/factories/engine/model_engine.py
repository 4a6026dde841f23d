"""Engine over a real (tiny) model, and the rule that a request's answer does not depend on others beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import Answer, collect, engine_config, run
from factories.engine.pools import add_states, in_groups, unwritten_host_pool, unwritten_pool
from factories.models.run_kernels import cpu_device, new_runner
from penstock.generation.attention.index_keys import index_rows
from penstock.generation.core.request import Request
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.mode_registry import MODES, ModeRegistry
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.startup.tune_engine import window_of

GOLDENS = Path(__file__).parents[2] / "goldens"
ROOMY = engine_config(num_blocks=300, max_batch_tokens=200, max_running_sequences=64)


def load_tiny(folder: Path) -> CausalLM:
    """Load the checkpoint in fp32 on one thread."""
    return load_model(folder, dtype="float32", device=cpu_device())


def model_engine(
    model: CausalLM,
    config: EngineConfig = ROOMY,
    kv_dtype: torch.dtype | None = None,
    modes: ModeRegistry = MODES,
) -> Engine:
    """Make an engine on a pool of its own, which shows reads of unwritten places. Blocks behind windows are given
    back, also where only some layers have one."""
    layout, config = in_groups(model, config)
    layers = model.config.num_kv_layers if layout is None else layout.layers_a_block
    geometry = (layers, config.num_blocks, config.block_size)
    heads = (model.config.num_kv_heads, model.config.head_dim)
    kinds: dict[str, Any] = {
        "has_values": model.config.has_values,
        "index": index_rows(model.config, model.dtype),
        "shapes": model.config.kv_shapes,
    }
    kv = unwritten_pool(*geometry, *heads, kv_dtype or model.dtype, layout, **kinds)
    config = replace(add_states(model, kv, config), window=window_of(model))
    return with_free_drafts(
        Engine(config, new_runner(model, kv, host=unwritten_host_pool(kv, config)), None, modes=modes)
    )


def with_free_drafts(engine: Engine) -> Engine:
    """Let prompt lookup draft wherever it can: what verifying costs is measured, and so differs from run to run."""
    setting: Any = engine
    setting._draft_costs = None
    return engine


# Requests of some 60 tokens in all: the pool holds them all; it does, in many small steps; it holds a part of them.
_SMALL = engine_config(num_blocks=34, block_size=3, max_running_sequences=12, max_batch_tokens=12, reserve_share=0.0)
in_any_company = pytest.mark.parametrize(
    "config",
    [
        pytest.param(engine_config(), id="roomy", marks=pytest.mark.slow),
        pytest.param(
            engine_config(max_batch_tokens=12, max_running_sequences=12, num_blocks=80),
            id="chunked",
            marks=pytest.mark.slow,
        ),
        pytest.param(_SMALL, id="preempted"),
    ],
)


def answer_alone(model: CausalLM, item: Request, modes: ModeRegistry = MODES) -> Answer:
    """Return the answer of an idle engine to the request."""
    return run(model_engine(model, modes=modes), item)[item.request_id]


def answers_alone(model: CausalLM, requests: list[Request], modes: ModeRegistry = MODES) -> dict[str, Answer]:
    """Return the answer of an idle engine to each request, by its id."""
    return {item.request_id: answer_alone(model, item, modes) for item in requests}


def check_company(
    model: CausalLM,
    make_requests: Callable[[], list[Request]],
    config: EngineConfig,
    modes: ModeRegistry = MODES,
    alone: Mapping[str, Answer] | None = None,
) -> Engine:
    """Check that every request gets the answer that it gets alone, one joining a step, and again with cached prefixes.

    `alone`: `answers_alone` of the requests, where a test has them already. The engine is returned for its counters.
    """
    wanted = {name: answer.ids for name, answer in (alone or answers_alone(model, make_requests(), modes)).items()}
    engine = model_engine(model, config, modes=modes)
    answers: dict[str, Answer] = {}
    for item in make_requests():
        engine.add(item)
        collect(answers, engine.step())
        engine.check_integrity()
    run(engine, answers=answers)
    assert {name: answer.ids for name, answer in answers.items()} == wanted
    again = run(engine, *make_requests())
    assert {name: answer.ids for name, answer in again.items()} == wanted
    assert engine.load().kv_blocks_used == 0
    return engine


def check_any_company(model: CausalLM, make_requests: Callable[[], list[Request]], config: EngineConfig) -> Engine:
    """Check as `check_company`, by one of `in_any_company`: requests are preempted in the small pool, in no other."""
    engine = check_company(model, make_requests, config)
    assert (engine.stats.preemptions > 0) == (config is _SMALL)
    return engine


def golden_cases(mode: str, options: Iterable[str]) -> list[Mapping[str, Any]]:
    """Return the cases of a golden file that use only keyword arguments among `options`."""
    cases = json.loads((GOLDENS / f"{mode}.json").read_text(encoding="utf-8"))["cases"]
    known = set(options)
    return [case for case in cases if case["kwargs"].keys() <= known]
