"""64 requests of every mode at once, in a pool too small for them, give exactly what each gives alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from factories.engine.fake_engine import Answer, collect, engine_config, run
from factories.engine.host_pools import HOSTS, host_fields
from factories.engine.mixed import Draw, drafted, mixed_request, structured, textual
from factories.engine.modes import ROOMY, load_service, new_engine, prepare, to_message
from factories.models.golden_models import golden_checkpoint
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from penstock.common.checkpoint import demo_folder
from penstock.generation.engine.config import EngineConfig
from penstock.generation.startup.loaded_model import LoadedModel

CONCURRENT = 64
SCORE_TOLERANCE = 1e-4


def tight(random: Random) -> EngineConfig:
    """Room for a few of them at a time, and for less when they grow."""
    return engine_config(
        num_blocks=random.randint(48, 64),
        block_size=random.randint(3, 5),
        max_context_tokens=100,
        max_running_sequences=random.randint(16, 64),
        max_batch_tokens=random.randint(64, 80),
        prefix_cache=random.random() < 0.8,
        **host_fields(*random.choice(HOSTS)),
    )


class Load(NamedTuple):
    """A served model, what else requests may ask of it, and how many crowds it gets."""

    loaded: LoadedModel
    extra: Mapping[str, Draw]
    num_examples: int


def random_model(folder: Path) -> Load:
    """Two layers, and a draft model that is nearly the same."""
    return Load(with_draft(folder, "golden-qwen2", noise=0.1), {"drafted": drafted("draft")}, 1)


def deep_model(folder: Path) -> Load:
    """Eight layers, so that DoLa has some to contrast."""
    return Load(with_draft(folder, "golden-deep", noise=0.02), {"drafted": drafted("draft")}, 1)


def with_draft(folder: Path, name: str, noise: float) -> LoadedModel:
    draft = golden_checkpoint(folder / "draft", name, noise=noise)
    served = golden_checkpoint(folder / "model", name)
    return load_service(served, assistant_model=str(draft), assistant_kv_memory="1MiB")


def demo_model(folder: Path) -> Load:
    """Text: structured output, stop strings, token healing; its own draft model."""
    demo = demo_folder()
    loaded = load_service(demo, assistant_model=str(demo), assistant_kv_memory="4MiB")
    name = loaded.served.assistant_model
    return Load(loaded, {"drafted": drafted(name), "structured": structured(name), "textual": textual}, 1)


@pytest.fixture(
    scope="module",
    params=[random_model, *(pytest.param(make, marks=pytest.mark.slow) for make in (deep_model, demo_model))],
    ids=lambda make: make.__name__,
)
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    torch.set_num_threads(1)
    make: Callable[[Path], Load] = request.param
    return make(tmp_path_factory.mktemp("models"))


class Alone:
    """Output of each request on an engine of its own."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._answers: dict[str, Answer] = {}

    def __call__(self, spec: dict[str, Any]) -> Answer:
        key = json.dumps(spec, sort_keys=True)
        if key not in self._answers:
            item = prepare(self._loaded, message(spec))
            self._answers[key] = run(new_engine(self._loaded, ROOMY), item)[item.request_id]
        return self._answers[key]


def message(spec: dict[str, Any]) -> Any:
    return to_message(spec["prompt"], {name: value for name, value in spec.items() if name != "prompt"})


def check_together(
    loaded: LoadedModel, alone: Alone, specs: list[dict[str, Any]], config: EngineConfig, gaps: list[int]
) -> Counter[str]:
    engine = new_engine(loaded, config)
    answers: dict[str, Answer] = {}
    items = [prepare(loaded, message(spec)) for spec in specs]
    for number, item in enumerate(items):
        engine.add(item)
        for _ in range(gaps[number % len(gaps)]):
            collect(answers, engine.step())
            engine.check_integrity()
    run(engine, answers=answers)
    for spec, item in zip(specs, items, strict=True):
        check_same(answers[item.request_id], alone(spec), spec)
    assert engine.load().kv_blocks_used == 0
    engine.check_integrity()
    stats = engine.stats
    return Counter(
        preemptions=stats.preemptions,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        copy_on_write_blocks=stats.copy_on_write_blocks,
        accepted_draft_tokens=stats.accepted_draft_tokens,
        rejected_draft_tokens=stats.rejected_draft_tokens,
    )


def check_same(together: Answer, alone: Answer, spec: dict[str, Any]) -> None:
    assert together.finished is not None
    assert alone.finished is not None
    assert together.finished.error is None, spec
    assert alone.finished.error is None, spec
    assert together.ids == alone.ids, spec
    for one, other in zip(together.finished.sequences, alone.finished.sequences, strict=True):
        assert (one.index, one.reason, one.num_tokens) == (other.index, other.reason, other.num_tokens), spec
        assert (one.stop_token_id, one.stop_string) == (other.stop_token_id, other.stop_string), spec
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=SCORE_TOLERANCE), spec


def test_64_mixed_requests_give_what_each_gives_alone_and_leave_every_block_free(load: Load) -> None:
    alone, seen = Alone(load.loaded), Counter[str]()

    # No shrinking: an example takes seconds, and the message names the request that differs.
    @settings(max_examples=load.num_examples, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(st.integers(0, 1 << 32))
    def check(seed: int) -> None:
        random = Random(seed)
        specs = [mixed_request(random, load.extra) for _ in range(CONCURRENT)]
        gaps = [random.randint(0, 2) for _ in range(5)]
        seen.update(check_together(load.loaded, alone, specs, tight(random), gaps))

    check()
    # The property says nothing if nobody was preempted, shared a prefix or was drafted for.
    assert min(seen.values()) > 0, seen
