"""Weights written into a running Generator: its answers are those of a fresh start on them."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.free_drafts import free_drafts
from factories.engine.local_generators import local_generator
from factories.engine.step_gate import StepGate, held_after
from factories.models.checkpoints import tiny_checkpoint
from factories.models.draft_heads import eagle3_folder
from penstock import Generator
from penstock.common.errors import FailedPrecondition, InvalidArgument, NotFound
from penstock.generation.host.memory import resident_bytes
from safetensors.torch import load_file, save_file

FAMILIES = ("llama", "qwen2", "gemma3_text", "phi3", "cohere", "glm", "olmo2", "mixtral", "qwen2_moe", "gpt_oss")
PROMPT = [5, 17, 200, 33, 8, 91, 4, 60, 11, 250, 7, 19] * 3
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "ignore_eos": True}
# Enough that it runs while weights are made.
LONG = {**GREEDY, "max_new_tokens": 400}
UPDATES, GROWTH_BYTES = 100, 16 << 20


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def ids(generator: Generator) -> list[int]:
    return generator.generate(PROMPT, **GREEDY).token_ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same model with three draws of its weights."""
    root = tmp_path_factory.mktemp("models")
    return {seed: tiny_checkpoint(root / f"seed-{seed}", seed=seed) for seed in (0, 1, 2)}


@pytest.fixture
def generator(folders: dict[int, Path]) -> Iterator[Generator]:
    with local_generator(folders[0], load_tokenizer=False) as made:
        yield made


@pytest.fixture(scope="module")
def expected(folders: dict[int, Path]) -> dict[int, list[int]]:
    found = {}
    for seed, folder in folders.items():
        with local_generator(folder, load_tokenizer=False) as fresh:
            found[seed] = ids(fresh)
    assert len({tuple(one) for one in found.values()}) == len(found)
    return found


def in_each_format() -> Iterator[Any]:
    """Every family as it is stored; in int8 a dense one, one with experts, those with keys or states of their own."""
    own = ("deepseek_v3", "qwen3_5_text")
    for family in (*FAMILIES, *own):
        yield pytest.param(family, "none", id=family)
        marks = [] if family in {"qwen2", "gpt_oss", *own} else [pytest.mark.slow]
        yield pytest.param(family, "int8", id=f"{family}-int8", marks=marks)


@pytest.mark.parametrize(("family", "quantization"), [*in_each_format()])
def test_answers_are_those_of_a_fresh_start(family: str, quantization: str, tmp_path: Path) -> None:
    old, new = (tiny_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    settings = {"load_tokenizer": False, "quantization": quantization}
    with local_generator(new, **settings) as fresh, local_generator(old, **settings) as generator:
        before, after = ids(generator), ids(fresh)
        assert before != after
        assert generator.write_weights(stored(new)) == 1
        # The same prompt: a block of the old weights would be found.
        assert ids(generator) == after
        scores = (one.score([(PROMPT, [9, 8, 7])]).scores[0].logprob for one in (generator, fresh))
        assert next(scores) == next(scores)


def test_a_part_of_the_weights_may_come_alone(folders: dict[int, Path], generator: Generator, tmp_path: Path) -> None:
    ours, theirs = stored(folders[0]), stored(folders[1])
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "config.json").write_bytes((folders[0] / "config.json").read_bytes())
    names = [name for name in ours if ".layers.1.mlp." in name or name.endswith("layers.0.input_layernorm.weight")]
    save_file({**ours, **{name: theirs[name] for name in names}}, mixed / "model.safetensors", {"format": "pt"})
    with local_generator(mixed, load_tokenizer=False) as fresh:
        after = ids(fresh)
    generator.write_weights({name: theirs[name] for name in names})
    assert ids(generator) == after
    # What stayed is still there to be replaced, and the numbers may have another dtype.
    generator.write_weights({name: tensor.double().float() for name, tensor in ours.items() if name in names})
    with local_generator(folders[0], load_tokenizer=False) as first:
        assert ids(generator) == ids(first)


def test_a_stream_in_flight_goes_on_and_is_told_both_versions(
    folders: dict[int, Path], generator: Generator, expected: dict[int, list[int]]
) -> None:
    with held_after(4) as gate:
        stream = generator.stream(PROMPT, **LONG)
        early = [next(stream) for _ in range(3)]
        written(generator, folders[1], gate)
        gate.open()
        list(stream)
    found = stream.result()
    assert [token_id for delta in early for token_id in delta.token_ids] == expected[0][:3]
    assert found.token_ids[:3] == expected[0][:3]
    assert len(found.token_ids) == LONG["max_new_tokens"]
    assert (found.finished.first_weights_version, found.finished.last_weights_version) == (0, 1)
    after = generator.generate(PROMPT, **GREEDY)
    assert after.token_ids == expected[1]
    assert (after.finished.first_weights_version, after.finished.last_weights_version) == (1, 1)


def test_a_request_that_waits_begins_on_the_new_weights(
    folders: dict[int, Path], expected: dict[int, list[int]]
) -> None:
    with local_generator(folders[0], load_tokenizer=False, max_running_sequences=1) as generator:
        # The waiting one has its prompt in the cache of the old weights.
        assert ids(generator) == expected[0]
        with held_after(3) as gate:
            running = generator.stream(PROMPT, **LONG)
            next(running)
            waiting = generator.stream(PROMPT, **GREEDY)
            written(generator, folders[1], gate)
            gate.open()
            spans, fresh = running.result(), waiting.result()
        assert (spans.finished.first_weights_version, spans.finished.last_weights_version) == (0, 1)
        assert (fresh.finished.first_weights_version, fresh.finished.last_weights_version) == (1, 1)
        assert fresh.token_ids == expected[1]


def written(generator: Generator, folder: Path, gate: StepGate) -> None:
    """Write a folder's weights, while steps go on one by one."""
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(generator.write_weights, stored(folder))
        while not writing.done():
            gate.allow(1)
            wait([writing], 0.1)
        assert writing.result() == 1


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (lambda t: t.clear(), "tensors", "at least one"),
        (lambda t: t.update({"model.head": t["model.norm.weight"]}), r"tensors[1].name", "a tensor of this model"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "tensors[0].shape", "of model.norm.weight must be"),
        (lambda t: t.update({"model.norm.weight": torch.ones(48).int()}), "tensors[0].dtype", "of model.norm.weight"),
        (
            lambda t: t.update({"model.layers.0.mlp.gate_proj.weight": torch.zeros(80, 48)}),
            "tensors",
            "must have model.layers.0.mlp.up_proj.weight beside model.layers.0.mlp.gate_proj.weight",
        ),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "tensors", "model.norm.weight has a number"),
    ],
)
def test_a_wrong_update_is_refused_by_name_and_changes_nothing(
    change: Any, field: str, words: str, folders: dict[int, Path], generator: Generator, expected: dict[int, list[int]]
) -> None:
    tensors = {"model.norm.weight": stored(folders[1])["model.norm.weight"].clone()}
    change(tensors)
    with pytest.raises(InvalidArgument) as refused:
        generator.write_weights(tensors)
    assert refused.value.field == field, refused.value.message
    assert words in refused.value.message
    assert ids(generator) == expected[0]


def test_forms_that_take_no_weights_say_so(folders: dict[int, Path], tmp_path: Path) -> None:
    tensors = stored(folders[1])
    forms: list[tuple[Path, dict[str, Any], str]] = [
        (folders[0], {"quantization": "int4"}, "int4"),
        (folders[0], {"model_route": "fallback"}, "--model-route"),
        (folders[0], {"tensor_parallel": 2, "threads": 2}, "--tensor-parallel"),
    ]
    for folder, settings, words in forms:
        with local_generator(folder, load_tokenizer=False, **settings) as generator:
            with pytest.raises(FailedPrecondition, match=words) as refused:
                generator.write_weights(tensors)
            assert refused.value.reason == "WEIGHTS_FIXED"


def test_a_draft_model_takes_new_weights_by_its_name(
    folders: dict[int, Path], expected: dict[int, list[int]], tmp_path: Path
) -> None:
    drafts = shutil.copytree(folders[0], tmp_path / "drafts")
    with local_generator(folders[0], load_tokenizer=False, assistant_model=str(drafts)) as generator:

        def rejected(seed: int) -> int:
            answer = generator.generate(PROMPT, **GREEDY, assistant_model="drafts")
            assert answer.token_ids == expected[seed]
            assert answer.usage.accepted_draft_tokens + answer.usage.rejected_draft_tokens > 0
            return answer.usage.rejected_draft_tokens

        assert rejected(0) == 0
        generator.write_weights(stored(folders[1]))
        assert rejected(1) > 0
        # The version is that of the served model's weights.
        assert generator.write_weights(stored(folders[1]), model="drafts") == 1
        assert rejected(1) == 0
        with pytest.raises(NotFound, match="model"):
            generator.write_weights(stored(folders[1]), model="others")


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "draft head"])
def test_nothing_keeps_the_first_weights_in_memory(tmp_path: Path, drafts: bool) -> None:
    folder = tiny_checkpoint(tmp_path / "model", seed=0, num_hidden_layers=4)
    settings = {"draft_head": str(eagle3_folder(tmp_path / "head"))} if drafts else {}
    options = {"assistant_model": "head"} if drafts else {}
    with free_drafts(), local_generator(folder, load_tokenizer=False, **settings) as generator:
        usage = generator.generate(PROMPT, **GREEDY, **options).usage
        assert (usage.rejected_draft_tokens > 0) == drafts
        first = weakref.ref(generator._engine.loaded.weights.model)
        generator.write_weights(stored(folder))
        gc.collect()
        assert first() is None


def test_a_draft_head_takes_no_new_weights(tmp_path: Path) -> None:
    folder, head = tiny_checkpoint(tmp_path / "model", num_hidden_layers=4), eagle3_folder(tmp_path / "head")
    with local_generator(folder, load_tokenizer=False, draft_head=str(head)) as generator:
        with pytest.raises(FailedPrecondition, match="--draft-head") as refused:
            generator.write_weights(stored(folder), model="head")
        assert refused.value.reason == "WEIGHTS_FIXED"


@pytest.mark.slow
def test_updates_take_no_memory(folders: dict[int, Path], generator: Generator, expected: dict[int, list[int]]) -> None:
    """The memory after some updates is that after a hundred more."""
    weights = [stored(folders[seed]) for seed in (1, 2)]
    sizes = []
    for number in range(UPDATES + 20):
        assert generator.write_weights(weights[number % 2]) == number + 1
        assert ids(generator) == expected[1 + number % 2]
        if number in (19, UPDATES + 19):
            sizes.append(resident_bytes())
    assert sizes[1] - sizes[0] < GROWTH_BYTES, sizes
