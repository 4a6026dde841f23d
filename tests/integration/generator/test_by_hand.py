"""MindIE's operations of a GeneratorTorch: forward and sample by hand, blocks that a caller holds, warm-up, caches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.local_generators import mindie_generator
from factories.engine.step_gate import held_after
from factories.models.adapters import lora_folder
from factories.models.checkpoints import tiny_checkpoint
from penstock.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock.compat.mindie import GeneratorTorch, LoraStatus, ModelInput, SamplingMetadata
from penstock.compat.mindie.lora_status import load_lora, unload_lora

PROMPT = [150, 9, 33, 101, 7, 44, 45]
ENDLESS: dict[str, Any] = {"ignore_eos": True, "do_sample": False}


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def generator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GeneratorTorch]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param)
    with mindie_generator(folder, load_tokenizer=False, block_size=4) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_held(generator: GeneratorTorch) -> Iterator[None]:
    yield
    generator.release_blocks()
    assert generator._engine.on_engine(lambda engine: engine.load().kv_blocks_used) == 0
    generator._engine.on_engine(lambda engine: engine.check_integrity())


def prefill(generator: GeneratorTorch, ids: list[int], table: list[int], **fields: Any) -> torch.Tensor:
    given = ModelInput(
        input_ids=ids, position_ids=[*range(len(ids))], block_tables=[table], context_length=[len(ids)], **fields
    )
    return generator.forward(given)


def decode(generator: GeneratorTorch, token: int, length: int, table: list[int], **fields: Any) -> torch.Tensor:
    given = ModelInput(
        input_ids=torch.tensor([token]),
        position_ids=torch.tensor([length - 1]),
        block_tables=torch.tensor([table]),
        context_length=torch.tensor([length]),
        is_prefill=False,
        **fields,
    )
    return generator.forward(given)


def by_hand(generator: GeneratorTorch, count: int, table: list[int], options: dict[str, Any]) -> list[int]:
    """Drive prefill, sample, decode, sample … as a caller of GeneratorTorch does."""
    logits = prefill(generator, PROMPT, table)
    output: list[int] = []
    while True:
        metadata = SamplingMetadata([5], [PROMPT], [output], options)
        (drawn,) = generator.sample(logits, metadata)
        output = [*output, drawn.token_id]
        if len(output) == count:
            return output
        length = len(PROMPT) + len(output)
        logits = decode(generator, drawn.token_id, length, table)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "seed": 7, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "seed": 8, "top_k": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"do_sample": False, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "sample", "penalties", "n-grams"],
)
def test_a_generation_by_hand_gives_the_ids_of_generate(generator: GeneratorTorch, options: dict[str, Any]) -> None:
    wanted = generator.generate(PROMPT, max_new_tokens=12, ignore_eos=True, **options).token_ids
    assert by_hand(generator, 12, [11, 3, 8, 20, 2], options) == wanted
    assert generator.clear_cache([5]) == 1
    assert generator.clear_cache([5]) == 0
    assert generator.release_blocks() == 5


def test_it_goes_on_beside_live_requests(generator: GeneratorTorch) -> None:
    wanted = generator.generate(PROMPT, max_new_tokens=8, **ENDLESS).token_ids
    # Those of the tokens to come, too: none can be claimed while requests are live.
    generator.claim_blocks([4, 5, 6, 7])
    logits = prefill(generator, PROMPT, [4, 5, 6, 7])
    alone = generator.generate([5, 6, 7], max_new_tokens=60, **ENDLESS).token_ids
    with generator.stream([5, 6, 7], max_new_tokens=60, **ENDLESS) as stream:
        next(stream)
        output: list[int] = []
        for _ in range(8):
            (drawn,) = generator.sample(logits, SamplingMetadata([1], [PROMPT], [output], {"do_sample": False}))
            output = [*output, drawn.token_id]
            logits = decode(generator, drawn.token_id, len(PROMPT) + len(output), [4, 5, 6, 7])
        assert output == wanted
        assert stream.result().token_ids == alone
    generator.clear_cache([1])


def test_rows_of_several_sequences_and_wanted_rows(generator: GeneratorTorch) -> None:
    two = ModelInput(
        input_ids=[*PROMPT, 5, 6],
        position_ids=[*range(7), 0, 1],
        block_tables=[[0, 1], [2, 0]],
        slots=[*range(7), 8, 9],
        context_length=[7, 2],
        max_seq_len=7,
        prefill_head_indices=[2, 6, 8],
    )
    rows = generator.forward(two)
    assert rows.shape == (3, generator._engine.loaded.served.vocab_size)
    torch.testing.assert_close(rows[1], prefill(generator, PROMPT, [3, 4])[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows[2], prefill(generator, [5, 6], [5])[0], rtol=1e-4, atol=1e-4)


def test_copied_blocks_go_on_from_the_same_place(generator: GeneratorTorch) -> None:
    logits = prefill(generator, PROMPT, [0, 1])
    assert generator.copy_blocks([[0, 10], [1, 11]]) == 2
    token = int(logits.argmax())
    here = decode(generator, token, 8, [0, 1])
    there = decode(generator, token, 8, [10, 11])
    assert torch.equal(here, there)
    assert generator.release_blocks([0, 1, 10]) == 3
    for bad, text in (([[1]], "pairs"), ([[1, 2], [3, 2]], "twice"), ([[1, 10**6]], "in \\[0, "), ([1, 2], "pairs")):
        with pytest.raises(InvalidArgument, match=f"pairs.*: .*{text}"):
            generator.copy_blocks(bad)
    # In order, as over RPC, and nothing is claimed for a call that is refused.
    generator.copy_blocks([[0, 10], [10, 12]])
    assert torch.equal(decode(generator, token, 8, [12, 11]), here)
    assert generator.release_blocks() == 4


@pytest.mark.parametrize(
    ("field", "changed", "text"),
    [
        ("input_ids", {"input_ids": [10**6] * 3}, "must be ids below"),
        ("input_ids", {"input_ids": []}, "at least one"),
        ("input_ids", {"input_ids": [0.5, 1, 2]}, "must be whole numbers"),
        ("input_ids", {"input_ids": [[1, 2], [3]]}, "equal length"),
        ("position_ids", {"position_ids": [0, 1]}, "must have 3 entries"),
        ("position_ids", {"position_ids": [1, 2, 3]}, "newest tokens"),
        ("block_tables", {"block_tables": [0, 1]}, "row of blocks"),
        ("block_tables", {"block_tables": [[10**6]]}, "from 0 to"),
        ("block_tables", {"context_length": [9], "query_length": [3], "position_ids": [6, 7, 8]}, "room for 9 tokens"),
        ("slots", {"slots": [0, 1, 3]}, "places that block_tables give"),
        ("slots", {"input_ids": [1, 2], "position_ids": [0, 0], "block_tables": [[0], [0]], "context_length": [1, 1]},
         "twice"),
        ("context_length", {"context_length": None}, "is needed"),
        ("context_length", {"context_length": [2], "query_length": [3]}, "must count the rows"),
        ("query_length", {"query_length": [2]}, "3 together"),
        ("max_seq_len", {"max_seq_len": 2}, "must not be less"),
        ("prefill_head_indices", {"prefill_head_indices": [3]}, "ascending"),
        ("prefill_head_indices", {"prefill_head_indices": [1, 0]}, "ascending"),
    ],
)  # fmt: skip
def test_a_wrong_input_is_named(generator: GeneratorTorch, field: str, changed: dict[str, Any], text: str) -> None:
    fields = {"input_ids": [1, 2, 3], "position_ids": [0, 1, 2], "block_tables": [[0]], "context_length": [3]}
    with pytest.raises(InvalidArgument, match=text) as caught:
        generator.forward(ModelInput(**{**fields, **changed}))
    assert caught.value.field == field
    assert generator._engine.on_engine(lambda engine: engine.caller_blocks.device) == frozenset()


def test_adapters_by_hand_and_by_request_are_the_same(generator: GeneratorTorch, tmp_path: Path) -> None:
    folder = lora_folder(tmp_path / "lora", generator._engine.loaded.files.folder)
    with pytest.raises(NotFound) as caught:
        prefill(generator, PROMPT, [0, 1], adapter_ids=["mine"])
    assert caught.value.field == "adapter"
    assert generator.load_lora("mine", "/nowhere") is LoraStatus.INVALID_LORA_PATH
    assert generator.load_lora("mine", folder) is LoraStatus.SUCCESS
    assert generator.load_lora("mine", folder) is LoraStatus.DUPLICATED_LORA_ID
    assert list(generator.adapter_manager.names()) == ["mine"]
    plain, tuned = (
        generator.generate(PROMPT, max_new_tokens=1, adapter=name, output_scores=True, **ENDLESS).token_ids
        for name in ("", "mine")
    )
    without = prefill(generator, PROMPT, [0, 1], adapter_ids=[None])
    adapted = prefill(generator, PROMPT, [0, 1], adapter_ids=["mine"])
    assert not torch.equal(without, adapted)
    assert ([int(without.argmax())], [int(adapted.argmax())]) == (list(plain), list(tuned))
    with pytest.raises(InvalidArgument, match="one for each sequence"):
        prefill(generator, PROMPT, [0, 1], adapter_ids=["mine", None])
    assert generator.unload_lora("mine") is LoraStatus.SUCCESS
    assert generator.unload_lora("mine") is LoraStatus.INVALID_LORA_ID


def test_an_adapter_that_left_memory_is_read_again_and_not_left_out(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "qwen2")
    with mindie_generator(folder, load_tokenizer=False, max_adapters=1) as made:
        plain = made.generate(PROMPT, max_new_tokens=6, **ENDLESS).token_ids
        wanted = {}
        for seed, name in enumerate(("one", "two")):
            assert made.load_lora(name, lora_folder(tmp_path / name, folder, seed=seed)) is LoraStatus.SUCCESS
            wanted[name] = made.generate(PROMPT, max_new_tokens=6, adapter=name, **ENDLESS).token_ids
        assert plain not in wanted.values()
        for name, ids in wanted.items():
            assert made.generate(PROMPT, max_new_tokens=6, adapter=name, **ENDLESS).token_ids == ids
        assert made.adapter_manager.figures().evictions == 3


def test_swaps_without_a_host_pool_are_refused(generator: GeneratorTorch) -> None:
    with pytest.raises(FailedPrecondition, match="no host pool") as caught:
        generator.swap_cache([[0, 1, 2], [1, 2, 3]])
    assert caught.value.reason == "NO_HOST_POOL"
    for bad in ([[2, 1, 2]], [[0, 1]], [0, 1, 2]):
        with pytest.raises(InvalidArgument, match="swaps: must be"):
            generator.swap_cache(bad)


def test_blocks_go_to_the_host_pool_and_back(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "qwen2")
    with mindie_generator(folder, load_tokenizer=False, block_size=4, host_kv_memory="1MiB") as made:
        wanted = by_hand(made, 5, [0, 1, 2], {"do_sample": False})
        logits = prefill(made, PROMPT, [0, 1, 2])
        token = int(logits.argmax())
        assert made.swap_cache([[1, 0, 7], [1, 1, 8], [1, 2, 9]]) == 3
        # Other sequences overwrite the blocks of the device.
        prefill(made, [9] * 12, [0, 1, 2])
        assert made.swap_cache([[0, 7, 4], [0, 8, 5], [0, 9, 6]]) == 3
        following = decode(made, token, len(PROMPT) + 1, [4, 5, 6])
        assert [token, int(following.argmax())] == wanted[:2]
        assert made._engine.on_engine(lambda engine: engine.caller_blocks.host) == {7, 8, 9}
        assert made.release_blocks(host_blocks=[8, 100]) == 1
        assert made.release_blocks([0, 4]) == 2
        assert made.release_blocks() == 6


class Store:
    """Adapter store that fails as it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[tuple[str, Path | None]] = []

    def load(self, name: str, path: Path) -> None:
        self.calls.append((name, path))
        if self.error is not None:
            raise self.error

    def unload(self, name: str) -> None:
        self.calls.append((name, None))
        if self.error is not None:
            raise self.error

    def names(self) -> tuple[str, ...]:
        return ("a",)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, LoraStatus.SUCCESS),
        (ResourceExhausted("full", reason="ADAPTER_SLOTS_FULL"), LoraStatus.SLOTS_FULL),
        (InvalidArgument("name", "is loaded", reason="ADAPTER_EXISTS"), LoraStatus.DUPLICATED_LORA_ID),
        (InvalidArgument("name", "is too long"), LoraStatus.INVALID_LORA_ID),
        (InvalidArgument("path", "is none", reason="ADAPTER_PATH"), LoraStatus.INVALID_LORA_PATH),
        (InvalidArgument("path", "is broken", reason="ADAPTER_BROKEN"), LoraStatus.INVALID_LORA_PATH),
        (InvalidArgument("path", "rank", reason="ADAPTER_RANK"), LoraStatus.INVALID_LORA_RANK),
        (InvalidArgument("path", "DoRA", reason="ADAPTER_UNSUPPORTED"), LoraStatus.UNSUPPORTED),
        (NotFound("name", reason="ADAPTER_NOT_FOUND"), LoraStatus.INVALID_LORA_ID),
    ],
)
def test_the_status_of_a_store_of_adapters(error: Exception | None, status: LoraStatus) -> None:
    store: Any = Store(error)
    assert load_lora(store, "a", "/x") is status
    assert unload_lora(store, "a") is status
    assert store.calls == [("a", Path("/x")), ("a", None)]
    assert load_lora(store, "", "/x") is LoraStatus.INVALID_LORA_ID


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("a rank of this model has ended", reason="ENGINE_FAILED"),
        InvalidArgument("path", "is of a kind that no status has"),
    ],
)
def test_an_error_without_a_status_is_raised(error: PenstockError) -> None:
    store: Any = Store(error)
    with pytest.raises(type(error)):
        load_lora(store, "a", "/x")
    with pytest.raises(type(error)):
        unload_lora(store, "a")


def test_sampling_metadata_is_checked(generator: GeneratorTorch) -> None:
    size = generator._engine.loaded.served.vocab_size
    logits = torch.randn(2, size)
    good: dict[str, Any] = {"sequence_ids": [1, 2], "prompt_token_ids": [[5], [6]]}
    for field, given, changed in (
        ("logits", logits[:1], {}),
        ("logits", logits[:, :-1], {}),
        ("logits", torch.zeros(2, size, dtype=torch.int64), {}),
        ("sequence_ids", logits, {"sequence_ids": [1, 1]}),
        ("prompt_token_ids", logits, {"prompt_token_ids": [[5], []]}),
        ("output_token_ids", logits, {"output_token_ids": [[5]]}),
        ("options", logits, {"options": [{}]}),
        ("options", logits, {"options": {"num_beams": 2}}),
        ("options", logits, {"options": {"json_object": True}}),
        ("config.top_p", logits, {"options": {"top_p": 2.0}}),
        ("logits", torch.full((2, size), float("nan")), {"options": {"do_sample": True}}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            generator.sample(given, SamplingMetadata(**{**good, **changed}))
        assert caught.value.field == field
    drawn = generator.sample(logits, SamplingMetadata(**good, options=[{"do_sample": False}, {"top_logprobs": 2}]))
    assert [one.token_id for one in drawn] == logits.argmax(-1).tolist()
    assert drawn[0].logprobs is None
    assert drawn[1].logprobs is not None
    # A caller's logits stay as they were.
    again = logits.clone()
    generator.sample(logits, SamplingMetadata(**good, options={"repetition_penalty": 1.5}))
    assert torch.equal(logits, again)
    generator.clear_cache([1, 2])


def test_blocks_and_requests_keep_out_of_each_others_way(generator: GeneratorTorch) -> None:
    with held_after(1), generator.stream(PROMPT, max_new_tokens=50, **ENDLESS):
        generator._engine.call(generator._engine.core.hub.wait_busy())
        done = threading.Event()
        found: list[BaseException] = []

        def claim() -> None:
            try:
                prefill(generator, PROMPT, [0, 1])
            except FailedPrecondition as error:
                found.append(error)
            done.set()

        thread = threading.Thread(target=claim)
        thread.start()
    assert done.wait(60)
    thread.join()
    generator._engine.call(generator._engine.core.hub.wait_idle())
    # The request was live when it took its turn, or over.
    assert all(getattr(error, "reason", "") == "BUSY" for error in found)
    prefill(generator, PROMPT, [0, 1])
    with pytest.raises(FailedPrecondition, match="a caller holds blocks") as caught:
        generator.warm_up()
    assert caught.value.reason == "BUSY"


def test_warm_up_takes_minds_arguments_and_returns_the_pool(generator: GeneratorTorch) -> None:
    pool = generator.cache_pool
    for sizes in ((), (4096, 2560, 128, 4), (1, 1, 1, 1), (10**6, 10**6, 10**6, 10**6)):
        assert generator.warm_up(*sizes) == pool.num_bytes == pool.num_blocks * pool.bytes_per_block
    for name in ("max_prefill_tokens", "max_seq_len", "max_input_len", "max_iter_times"):
        with pytest.raises(InvalidArgument, match="must be at least 1"):
            generator.warm_up(**{name: 0})
    wanted = generator.generate(PROMPT, max_new_tokens=4, **ENDLESS).token_ids
    generator.warm_up(64, 32, 8, 3)
    assert generator.generate(PROMPT, max_new_tokens=4, **ENDLESS).token_ids == wanted


def test_caches_are_cleared_whole_or_by_request(generator: GeneratorTorch) -> None:
    generator.generate(PROMPT * 4, max_new_tokens=2, **ENDLESS)
    assert generator.clear_cache() >= 6
    assert generator.clear_cache() == 0
    wanted = generator.generate(PROMPT, max_new_tokens=80, **ENDLESS).token_ids
    generator.clear_cache()
    with generator.stream(PROMPT, max_new_tokens=80, request_id="mine", **ENDLESS) as stream:
        for _ in range(5):
            next(stream)
        assert generator.clear_cache(["mine"]) >= 1
        assert stream.result().token_ids == wanted
    with pytest.raises(NotFound, match=r"sequence_ids\[0\]") as caught:
        generator.clear_cache(["mine"])
    assert caught.value.reason == "REQUEST_NOT_FOUND"
