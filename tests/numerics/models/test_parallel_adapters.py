"""A model in several processes gives the ids of one with the same LoRA adapters, loaded at the start and later."""

from __future__ import annotations

import gc
import signal
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from factories.engine.local_generators import ids_of, mindie_generator
from factories.engine.mixed import mixed_request
from factories.models.adapters import LAYER_TARGETS, lora_folder
from factories.models.checkpoints import tiny_checkpoint
from factories.models.native import cache_home, use_native
from factories.models.run_kernels import KERNELS
from penstock.common.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from penstock.compat.mindie import GeneratorTorch, LoraStatus
from penstock.generation.parallel.rank_messages import MessageKind, decode_forget, kind_of

REQUESTS = 16
ONE_TENSOR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
# Their numbers of heads, the order of a head's dims, one tensor for several products, biases; targets of the layers.
KINDS: dict[str, tuple[str, int, tuple[str, ...], dict[str, Any]]] = {
    "three ranks, one key/value head": (
        "qwen2",
        3,
        LAYER_TARGETS,
        {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96, "intermediate_size": 96}
        | {"tie_word_embeddings": False, "vocab_size": 322},
    ),
    "phi3": ("phi3", 2, ONE_TENSOR, {}),
    "glm4": ("glm4", 2, (*LAYER_TARGETS, "gate_up_proj"), {}),
    "llama": ("llama", 2, LAYER_TARGETS, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "biases": ("llama", 2, LAYER_TARGETS, {"attention_bias": True, "mlp_bias": True}),
    "cohere": ("cohere", 2, LAYER_TARGETS, {}),
    "qwen3": ("qwen3", 2, LAYER_TARGETS, {}),
}
USUAL = {"three ranks, one key/value head"}
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


def answers_of(generator: GeneratorTorch, asked: list[dict[str, Any]]) -> list[Any]:
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


def assert_equal_ids(model: Path, count: int, lora: dict[str, Path], seed: str, **settings: Any) -> None:
    asked, options = requests_of([*lora], seed), options_of(lora) | settings
    with mindie_generator(model, load_tokenizer=False, **options) as generator:
        expected = answers_of(generator, asked)
    with mindie_generator(model, load_tokenizer=False, tensor_parallel=count, threads=count, **options) as spread:
        assert answers_of(spread, asked) == expected
    # Each adapter, and none, means something else.
    assert len({str(ids) for ids in expected[: len(lora) + 1]}) == len(lora) + 1


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in USUAL else [pytest.mark.slow]) for kind in KINDS]
)
def test_ids_are_those_of_one_process(tmp_path: Path, kind: str) -> None:
    family, count, targets, sizes = KINDS[kind]
    model = tiny_checkpoint(tmp_path / "model", family, **sizes)
    assert_equal_ids(model, count, adapters_of(tmp_path, model, targets), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["three ranks, one key/value head", "biases", "phi3", "glm4"])
def test_ids_on_the_kernels_are_those_of_one_process(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_native()
    # Where the ranks find them.
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home()))
    family, count, targets, sizes = KINDS[kind]
    model = tiny_checkpoint(tmp_path / "model", family, **sizes)
    assert_equal_ids(model, count, adapters_of(tmp_path, model, targets), kind, kernels="native")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model and adapters of it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    model = tiny_checkpoint(folder / "model")
    all_targets = (*LAYER_TARGETS, "lm_head", "embed_tokens")
    return {
        "model": model,
        "one": lora_folder(folder / "one", model, seed=1, strength=0.3),
        "two": lora_folder(folder / "two", model, seed=2, strength=0.3, targets=all_targets),
        "embedding": lora_folder(folder / "embedding", model, targets=("q_proj",), saved=("embed_tokens",)),
        "head": lora_folder(folder / "head", model, targets=("q_proj",), saved=("lm_head",)),
        # More than a socket takes before it is read.
        "large": lora_folder(folder / "large", model, rank=1024, targets=LAYER_TARGETS),
    }


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Ids of one process by adapter, and of the model itself."""
    with mindie_generator(folders["model"], load_tokenizer=False) as generator:
        for name in ("one", "two", "embedding"):
            generator.adapter_manager.load(name, folders[name])
        return {
            str(name): ids_of(generator, {"prompt": PROMPT, "max_new_tokens": 8, "adapter": name})
            for name in ("one", "two", "embedding", None)
        }


def in_two(folders: dict[str, Path]) -> GeneratorTorch:
    """Make the model in two processes."""
    options: dict[str, Any] = {"tensor_parallel": 2, "threads": 2, "max_adapter_rank": 1024}
    return mindie_generator(folders["model"], load_tokenizer=False, **options)


@pytest.fixture(scope="module")
def spread(folders: dict[str, Path]) -> Iterator[GeneratorTorch]:
    with in_two(folders) as generator:
        yield generator


def test_adapters_come_change_and_go_under_traffic(
    spread: GeneratorTorch,
    folders: dict[str, Path],
    alone: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks forget each reading after its last request."""
    store, ranks = spread.adapter_manager, spread._engine.loaded.weights.ranks
    assert ranks is not None
    complete: list[int] = []
    forgotten: list[int] = []
    changed = threading.Condition()
    send = ranks._send

    def noted(message: bytes) -> None:
        kind, body = kind_of(message)
        if kind is MessageKind.ADAPTER:
            complete.append(int.from_bytes(body, "little"))
        elif kind is MessageKind.FORGET:
            with changed:
                forgotten.extend(decode_forget(body))
                changed.notify_all()
        send(message)

    monkeypatch.setattr(ranks, "_send", noted)
    is_over = threading.Event()

    def asks(name: str | None) -> list[list[int]]:
        found: list[list[int]] = ids_of(spread, {"prompt": PROMPT, "max_new_tokens": 8, "adapter": name})
        return found

    def asks_on(name: str | None, allowed: tuple[str, ...]) -> int:
        count = 0
        while not is_over.is_set():
            assert asks(name) in [alone[one] for one in allowed]
            count += 1
        return count

    store.load("changing", folders["one"])
    with ThreadPoolExecutor(3) as threads:
        traffic = [threads.submit(asks_on, None, ("None",))]
        traffic += [threads.submit(asks_on, "changing", ("one", "two")) for _ in range(2)]
        try:
            for turn in range(2):
                store.load("changing", folders[("two", "one")[turn % 2]], replace=True)
                # What is loaded is what the next request has, whatever else runs.
                assert asks("changing") == alone[("two", "one")[turn % 2]]
                store.load("coming", folders["embedding"])
                assert asks("coming") == alone["embedding"]
                store.unload("coming")
        finally:
            is_over.set()
        assert all(one.result() for one in traffic)
    store.unload("changing")
    with pytest.raises(NotFound):
        asks("changing")
    assert len(complete) == len(set(complete)) == 5
    gc.collect()
    # While nothing else is asked for.
    with changed:
        assert changed.wait_for(lambda: sorted(forgotten) == sorted(complete), 30)


def test_a_head_of_its_own_is_refused_and_an_embedding_is_not(
    spread: GeneratorTorch, folders: dict[str, Path], alone: dict[str, list[list[int]]]
) -> None:
    store = spread.adapter_manager
    with pytest.raises(InvalidArgument, match=r"modules_to_save \(lm_head\): --tensor-parallel") as caught:
        store.load("head", folders["head"])
    assert (caught.value.reason, caught.value.field) == ("ADAPTER_UNSUPPORTED", "path")
    adapter = store.load("embedding", folders["embedding"])
    assert adapter.depends_on_weights
    # In both ranks the embedding's change beside an identity; of q_proj A twice and B in parts, in float32.
    config = spread._engine.loaded.weights.model.config
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    of_layers = config.num_layers * 8 * (2 * hidden + queries)
    dense = 4 * (2 * hidden * (config.vocab_size + hidden) + of_layers)
    if KERNELS == "native":
        # Panels are padded.
        assert dense < adapter.num_bytes < 1.1 * dense
    else:
        assert adapter.num_bytes == dense
    assert ids_of(spread, {"prompt": PROMPT, "max_new_tokens": 8, "adapter": "embedding"}) == alone["embedding"]


def test_an_adapter_that_a_rank_has_no_memory_for_is_refused(
    spread: GeneratorTorch, folders: dict[str, Path], alone: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = spread._engine.loaded.weights.ranks._adapters  # type: ignore[union-attr]
    send = loads._send

    def send_too_large(message: bytes) -> None:
        """Send it, with A of more bytes than there are addresses."""
        if kind_of(message)[0] is MessageKind.ADAPTER_PART:
            message = message[:-16] + struct.pack("<II", 1 << 22, 1 << 24) + message[-8:]
        send(message)

    monkeypatch.setattr(loads, "_send", send_too_large)
    for _ in range(2):
        with pytest.raises(ResourceExhausted, match="path: rank 1 has no memory for the adapter") as caught:
            spread.adapter_manager.load("refused", folders["one"])
        assert (caught.value.reason, caught.value.field) == ("ADAPTER_MEMORY_FULL", "path")
    assert spread.load_lora("refused", folders["one"]) is LoraStatus.SLOTS_FULL
    assert "refused" not in spread.adapter_manager
    monkeypatch.undo()
    # Its rank goes on.
    spread.adapter_manager.load("refused", folders["one"])
    assert ids_of(spread, {"prompt": PROMPT, "max_new_tokens": 8, "adapter": "refused"}) == alone["one"]


def rank_of(spread: GeneratorTorch) -> psutil.Process:
    """Process of rank 1."""
    ranks = spread._engine.loaded.weights.ranks
    assert ranks is not None
    return psutil.Process(ranks._ranks[0].process.pid)


def test_a_rank_that_ends_while_it_gets_an_adapter_ends_the_load(folders: dict[str, Path]) -> None:
    with in_two(folders) as spread, ThreadPoolExecutor(1) as threads:
        rank = rank_of(spread)
        # It reads no more: the load must wait for it, and not for ever once it is gone.
        rank.send_signal(signal.SIGSTOP)
        load = threads.submit(spread.adapter_manager.load, "large", folders["large"])
        with pytest.raises(TimeoutError):
            load.result(0.3)
        rank.kill()
        with pytest.raises(Unavailable, match="the adapter was not loaded: a rank of this model has ended"):
            load.result(30)
        assert "large" not in spread.adapter_manager
        with pytest.raises(Unavailable):
            spread.load_lora("one", folders["one"])


def test_an_interrupt_in_the_middle_of_a_load_leaves_whole_messages(
    folders: dict[str, Path], alone: dict[str, list[list[int]]], request: pytest.FixtureRequest
) -> None:
    # As in a program; who runs the tests may have another one.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with in_two(folders) as spread:
        rank, main = rank_of(spread), threading.get_ident()
        rank.send_signal(signal.SIGSTOP)
        # The socket is full by then.
        interrupt = threading.Timer(1, signal.pthread_kill, (main, signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            spread.load_lora("large", folders["large"])
        interrupt.cancel()
        rank.send_signal(signal.SIGCONT)
        assert "large" not in spread.adapter_manager
        assert spread.load_lora("one", folders["one"]) is LoraStatus.SUCCESS
        for name in ("one", None):
            assert ids_of(spread, {"prompt": PROMPT, "max_new_tokens": 8, "adapter": name}) == alone[str(name)]


@pytest.mark.slow
def test_a_model_that_is_closed_while_it_gets_an_adapter_says_so(folders: dict[str, Path]) -> None:
    with ThreadPoolExecutor(1) as threads:
        spread = in_two(folders)
        rank_of(spread).send_signal(signal.SIGSTOP)
        load = threads.submit(spread.adapter_manager.load, "large", folders["large"])
        with pytest.raises(TimeoutError):
            load.result(0.3)
        spread.close()
        with pytest.raises(Unavailable) as caught:
            load.result(30)
        assert caught.value.reason == "ENGINE_STOPPED"
