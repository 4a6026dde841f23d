"""A model in several processes gives the ids of one with the same LoRA adapters, of --lora and loaded while it serves."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from factories.engine.local_generators import local_generator
from factories.engine.mixed import mixed_request
from factories.models.adapters import LAYER_TARGETS, lora_folder
from factories.models.checkpoints import tiny_checkpoint
from factories.models.native import cache_home, use_native
from penstock import Generator
from penstock.common.errors import InvalidArgument, PenstockError

REQUESTS = 16
ONE_TENSOR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
# Their numbers of heads, the order of a head's dims, one tensor for several products, biases; targets of the layers.
KINDS: dict[str, tuple[str, int, tuple[str, ...], dict[str, Any]]] = {
    "one key/value head": ("llama", 2, LAYER_TARGETS, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "three ranks": (
        "qwen2",
        3,
        LAYER_TARGETS,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 96}
        | {"tie_word_embeddings": False, "vocab_size": 322},
    ),
    "phi3": ("phi3", 2, ONE_TENSOR, {}),
    "glm4": ("glm4", 2, (*LAYER_TARGETS, "gate_up_proj"), {}),
    "biases": ("llama", 2, LAYER_TARGETS, {"attention_bias": True, "mlp_bias": True}),
    "cohere": ("cohere", 2, LAYER_TARGETS, {}),
    "qwen3": ("qwen3", 2, LAYER_TARGETS, {}),
}
USUAL = {"one key/value head", "three ranks"}
PROMPT = [*range(11, 40)]


def adapters_of(folder: Path, model: Path, targets: tuple[str, ...]) -> dict[str, Path]:
    """Make adapters of some modules, of all, of the embedding and of the head alone, of several ranks and scales."""
    wanted = {
        "layers": (targets, 4),
        "outputs": (("o_proj", "down_proj"), 3),
        "inputs": ((targets[0],), 16),
        "whole": ((*targets, "lm_head", "embed_tokens"), 8),
        "head": (("lm_head",), 2),
        "embedding": (("embed_tokens",), 5),
    }
    return {
        name: lora_folder(folder / name, model, rank=rank, seed=seed, targets=modules, strength=0.3)
        for seed, (name, (modules, rank)) in enumerate(wanted.items())
    }


def options_of(lora: dict[str, Path]) -> dict[str, Any]:
    return {"lora": tuple(f"{name}={folder}" for name, folder in lora.items())}


def ids_of(generator: Generator, asked: dict[str, Any]) -> Any:
    """Ids of each sequence, and a refusal's field and words."""
    options = {name: value for name, value in asked.items() if value is not None and name != "prompt"}
    try:
        answer = generator.generate(asked["prompt"], **options)
    except InvalidArgument as error:
        return error.field, error.message
    return [choice.token_ids for choice in answer.choices]


def answers_of(generator: Generator, asked: list[dict[str, Any]]) -> list[Any]:
    """Ask all at once, so that their steps are mixed."""
    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(lambda one: ids_of(generator, one), asked))


def requests_of(names: list[str], seed: str) -> list[dict[str, Any]]:
    """Make requests of every mode, most with an adapter: greedy ones of each first, with a prefix that some share."""
    random = Random(seed)
    asked: list[dict[str, Any]] = [
        {"prompt": PROMPT, "max_new_tokens": 8, "ignore_eos": True, "adapter": name} for name in (*names, None)
    ]
    asked += [mixed_request(random, {}) | {"adapter": random.choice([*names, None])} for _ in range(REQUESTS)]
    asked += [{"prompt": [*PROMPT, 7], "max_new_tokens": 6, "num_beams": 3, "adapter": names[0]}]
    return asked


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in USUAL else [pytest.mark.slow]) for kind in KINDS]
)
def test_ids_are_those_of_one_process(tmp_path: Path, kind: str) -> None:
    family, count, targets, sizes = KINDS[kind]
    model = tiny_checkpoint(tmp_path / "model", family, **sizes)
    lora = adapters_of(tmp_path, model, targets)
    asked = requests_of([*lora], kind)
    with local_generator(model, load_tokenizer=False, **options_of(lora)) as generator:
        expected = answers_of(generator, asked)
    with local_generator(model, load_tokenizer=False, tensor_parallel=count, threads=count, **options_of(lora)) as spread:
        assert answers_of(spread, asked) == expected
    # Each adapter, and none, means something else.
    assert len({str(ids) for ids in expected[: len(lora) + 1]}) == len(lora) + 1
