"""A model in two or three processes gives the ids of one: every mode, mixed with others, and across preemption."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from factories.engine.local_generators import ids_of, local_generator
from factories.engine.mixed import mixed_request
from factories.models.checkpoints import FAMILIES, tiny_checkpoint
from penstock import Generator
from penstock.common.errors import InvalidArgument, StartupError

# Of each family: drawn at random, several at once.
REQUESTS = 12
# Kinds of models beside the four: their numbers of heads, one tensor for several products, biases, scales, soft caps.
KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{family: (family, 2, {}) for family in FAMILIES},
    "one key/value head": ("llama", 2, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "three ranks": (
        "qwen2",
        3,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 96},
    ),
    "biases": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "untied": ("qwen2", 2, {"tie_word_embeddings": False, "vocab_size": 321}),
    "phi3": ("phi3", 2, {}),
    "gemma3_text": ("gemma3_text", 2, {}),
    "cohere": ("cohere", 2, {}),
    "glm4": ("glm4", 2, {}),
}
# That of the ordinary run: every other kind is for `make slow`.
USUAL = {"llama"}


def answers_of(folder: Path, count: int, asked: list[dict[str, Any]], **settings: Any) -> list[Any]:
    """Ask all at once, so that their steps are mixed."""
    with (
        local_generator(folder, load_tokenizer=False, tensor_parallel=count, **settings) as generator,
        ThreadPoolExecutor(len(asked)) as threads,
    ):
        return list(threads.map(lambda one: ids_of(generator, one), asked))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in USUAL else [pytest.mark.slow]) for kind in KINDS]
)
def test_ids_are_those_of_one_process(tmp_path: Path, kind: str) -> None:
    family, count, sizes = KINDS[kind]
    folder = tiny_checkpoint(tmp_path / "model", family, **sizes)
    random = Random(kind)
    asked = [mixed_request(random, {}) for _ in range(REQUESTS if family in FAMILIES else REQUESTS // 2)]
    assert answers_of(folder, count, asked, threads=count) == answers_of(folder, 1, asked)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["swap", pytest.param("recompute", marks=pytest.mark.slow)])
def test_a_pool_that_is_too_small_changes_no_id(tmp_path: Path, way: str) -> None:
    """Blocks are copied, to the host too, in every rank."""
    folder = tiny_checkpoint(tmp_path / "model")
    asked = [
        {"prompt": [*range(10, 60), number], "max_new_tokens": 60, "ignore_eos": True, "num_return_sequences": 2}
        | {"do_sample": True, "seed": number}
        for number in range(6)
    ]
    expected = answers_of(folder, 1, asked)
    host = {"host_kv_memory": "4MiB"} if way == "swap" else {}
    small: dict[str, Any] = {"kv_memory": "256KiB", "preemption": way, "max_context": 256, **host}
    preempted = threading.Event()
    with (
        local_generator(folder, load_tokenizer=False, tensor_parallel=2, threads=2, **small) as generator,
        ThreadPoolExecutor(len(asked)) as threads,
    ):
        assert list(threads.map(lambda one: ids_of(generator, one), asked)) == expected
        if generator._engine.on_engine(lambda engine: engine.stats.preemptions):
            preempted.set()
    assert preempted.is_set()


def test_prefixes_drafts_embeddings_and_hidden_states(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    prompt = [*range(5, 70)]

    def asked(generator: Generator) -> list[Any]:
        first = generator.generate(prompt, max_new_tokens=8)
        again = generator.generate([*prompt, 3], max_new_tokens=8)
        drafted = generator.generate(prompt, max_new_tokens=12, prompt_lookup_num_tokens=3)
        (score,) = generator.score([(prompt, [7, 8, 9])]).scores
        (vector,) = generator.embed([prompt]).vectors
        state = generator.generate(prompt, max_new_tokens=2, output_hidden_states=True)
        return [
            *first.choices[0].token_ids,
            *again.choices[0].token_ids,
            again.usage.cached_tokens,
            *drafted.choices[0].token_ids,
            score.logprob,
            *vector,
            *state.choices[0].token_ids,
        ]

    with local_generator(folder, load_tokenizer=False) as generator:
        wanted = asked(generator)
    with local_generator(folder, load_tokenizer=False, tensor_parallel=2, threads=2) as generator:
        assert asked(generator) == pytest.approx(wanted, abs=1e-3)


def test_what_it_does_not_do_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    with (
        local_generator(folder, load_tokenizer=False, tensor_parallel=2, threads=2) as generator,
        pytest.raises(InvalidArgument, match="several processes") as caught,
    ):
        generator.generate([5, 6], max_new_tokens=2, output_attentions=True)
    assert "output_attentions" in str(caught.value.field)


@pytest.mark.parametrize(
    ("family", "sizes", "settings", "fault"),
    [
        ("llama", {}, {"tensor_parallel": 3}, "heads cannot be divided evenly"),
        ("qwen3_moe", {}, {}, "mixture of experts"),
        ("olmo2", {}, {}, "norms all heads together"),
        ("llama", {"intermediate_size": 33}, {}, "inner numbers of its MLP"),
        ("llama", {}, {"threads": 1, "tensor_parallel": 2}, "--threads 1 is less than --tensor-parallel 2"),
        ("llama", {}, {"threads": 2, "kv_memory": "900GiB"}, "--kv-memory"),
    ],
)
def test_models_and_settings_that_cannot_be_spread_name_the_flag(
    tmp_path: Path, family: str, sizes: dict[str, Any], settings: dict[str, Any], fault: str
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", family, **sizes)
    given = {"threads": 4, "tensor_parallel": 2, **settings}
    with pytest.raises(StartupError, match=fault):
        local_generator(folder, load_tokenizer=False, **given)
