"""All layers in one call of the kernels: the bits of the layers one by one, whatever the batch, chunks and threads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.sequences import params
from factories.engine.sequences import sequence as new_sequence
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.native import PRODUCT_SETS, use_instruction_set
from factories.models.paged import PagedDriver, PagedSequence
from factories.models.quantised import EIGHT_BITS, FOUR_BITS, compressed, quantised_pair
from penstock.generation.attention.attention_keeper import AttentionKeeper, KeptRow
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.attention.state_pool import new_states
from penstock.generation.core.step import ScheduledSequence, SchedulerOutput
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.layers.decoder_layer import DecoderLayer
from penstock.generation.layers.latent_prompts import LEAST_ROWS
from penstock.generation.layers.linear.native import Format, NativeLinearMethod
from penstock.generation.models import fused
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import ModelRunner

# Without vectors of tokens; no layer reads the keys of another, and layers with windows have more key/value heads.
GEMMA4_LARGE: dict[str, Any] = {
    "attention_k_eq_v": True,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}
CASES: list[Any] = [
    ("qwen2", {}),
    ("qwen3", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 12}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("gemma4_text", {}),
    # Gates, and no layer that keeps a state.
    ("qwen3_5_text", {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}),
    # Experts, with a gated shared one, without one, with sinks and rounded-once norms, and beside compressed keys and
    # values, where queries come of one product or of two, and a router reads floats.
    ("qwen2_moe", {}),
    ("qwen3_moe", {}),
    ("gpt_oss", {}),
    ("deepseek_v2", {}),
    ("deepseek_v3", {}),
    ("youtu", {}),
    *(pytest.param(family, {}, marks=pytest.mark.slow) for family in ("minicpm3", "glm4_moe_lite", "sarvam_mla")),
    pytest.param("mixtral", {}, marks=pytest.mark.slow),
    pytest.param("gemma4_text", GEMMA4_LARGE, marks=pytest.mark.slow),
    *(pytest.param(family, {}, marks=pytest.mark.slow) for family in ("granite", "phi3", "glm4", "smollm3")),
]
# Layers that keep a state: also in the last layer, after which only some rows are wanted, and of widths that vectors do
# not divide.
LAST_KEEPS_STATE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 34,
}
STATE_CASES: list[Any] = [
    ("qwen3_5_text", {}),
    ("qwen3_5_text", LAST_KEEPS_STATE),
    ("qwen3_5_moe_text", {}),
    pytest.param("qwen3_next", {}, marks=pytest.mark.slow),
]
FORMATS = ("none", "int8", "int4")
# With blocks of 16 keys and heads of whole vectors, decode steps read keys and values where they lie in the pool.
PAGED_HEADS: dict[str, Any] = {"head_dim": 32}


@pytest.fixture(scope="module", params=PRODUCT_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


def native(folder: Path, quantization: str) -> CausalLM:
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(folder, dtype="bfloat16", quantization=quantization, device=device)
    assert model._fused is not None
    return model


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 40))] for _ in range(count)]


def logits(
    model: CausalLM,
    ids: list[list[int]],
    *,
    max_chunk: int,
    together: bool,
    block_size: int = 8,
    kv_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return the logits of every position of every prompt."""
    sequences = [PagedSequence(list(prompt)) for prompt in ids]
    driver = PagedDriver(model, num_blocks=64, block_size=block_size, kv_dtype=kv_dtype)
    for group in [sequences] if together else [[sequence] for sequence in sequences]:
        driver.prefill(group, max_chunk)
    return [torch.stack(sequence.logits) for sequence in sequences]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize(("family", "config"), [*CASES, *STATE_CASES])
@pytest.mark.parametrize("block_size", [8, 16])
def test_the_same_bits_as_layer_by_layer(
    tmp_path: Path,
    family: str,
    config: dict[str, Any],
    quantization: str,
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads = PAGED_HEADS if block_size == 16 else {}
    model = native(tiny_checkpoint(tmp_path, family, **config, **heads), quantization)
    ids = prompts(6)
    # int8 weights with int8 keys and values, so that both are in some case.
    options: dict[str, Any] = {"max_chunk": 16, "together": True, "block_size": block_size}
    options["kv_dtype"] = torch.int8 if quantization == "int8" else None
    together = logits(model, ids, **options)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        shared = logits(model, ids, **options)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(model, "_fused", None)
    single = logits(model, ids, **options)
    for one, other, third in zip(together, shared, single, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def test_products_of_a_layer_may_have_forms_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantised checkpoint with modules that are not converted, and groups with a scheme each."""
    kept_dense = ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    zeros = {**FOUR_BITS, "symmetric": False}
    config, four = compressed("pack-quantized", zeros, ignore=kept_dense)
    _, eight = compressed("int-quantized", EIGHT_BITS)
    config["format"] = "mixed-precision"
    config["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": zeros, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*down_proj"], "weights": EIGHT_BITS, "format": "int-quantized"},
    }
    folder = quantised_pair(
        tmp_path, config, lambda module, weight: (eight if "down" in module else four)(module, weight)
    ).folder
    model = native(folder, "auto")
    assert model.config.weight_forms == (("int4-asymmetric", 9), ("int8", 2))
    ids = prompts(4)
    together = logits(model, ids, max_chunk=16, together=True)
    alone = logits(model, ids, max_chunk=1, together=False)
    monkeypatch.setattr(model, "_fused", None)
    single = logits(model, ids, max_chunk=16, together=True)
    for one, other, third in zip(together, alone, single, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch(tmp_path: Path, quantization: str) -> None:
    model = native(tiny_checkpoint(tmp_path), quantization)
    ids = prompts(4)
    together = logits(model, ids, max_chunk=7, together=True)
    alone = logits(model, ids, max_chunk=1, together=False)
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("max_chunk", [1, 40])
@pytest.mark.parametrize("quantization", FORMATS)
def test_a_sequence_gets_the_same_bits_whatever_the_size_of_blocks(
    tmp_path: Path, quantization: str, max_chunk: int
) -> None:
    model = native(tiny_checkpoint(tmp_path, **PAGED_HEADS), quantization)
    ids = prompts(4)
    found = [logits(model, ids, max_chunk=max_chunk, together=True, block_size=size) for size in (16, 5)]
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("tail", [1, 3])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["bf16", "int8"])
@pytest.mark.parametrize("block_size", [8, 16])
def test_blocks_that_a_step_writes_and_others_read_in_it_give_the_bits_of_steps_one_by_one(
    tmp_path: Path, block_size: int, kv_dtype: torch.dtype | None, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = native(tiny_checkpoint(tmp_path, num_hidden_layers=3, **PAGED_HEADS), "none")
    draw = random.Random(7)
    common = [draw.randrange(VOCAB_SIZE) for _ in range(2 * block_size)]
    endings = [[draw.randrange(VOCAB_SIZE) for _ in range(tail)] for _ in range(4)]

    def run(*, together: bool) -> list[torch.Tensor]:
        driver = PagedDriver(model, num_blocks=16, block_size=block_size, kv_dtype=kv_dtype)
        first, *others = sequences = [PagedSequence([*common, *ending]) for ending in endings]
        first.blocks.extend(driver.take_blocks(3))
        for other in others:
            other.blocks.extend(first.blocks[:2])
            other.computed = len(common)
        # The reader comes before the writer, so that threads meet keys that are not there yet.
        work = [(sequence, sequence.left) for sequence in [*others, first]]
        for step in [work] if together else [[entry] for entry in reversed(work)]:
            driver.step(step)
        return [torch.stack(sequence.logits) for sequence in sequences]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        # A race would not show every time.
        together = [run(together=True) for _ in range(5)]
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(model, "_fused", None)
    expected = run(together=False)
    for found in together:
        for one, other in zip(found, expected, strict=True):
            assert one.isfinite().all()
            assert torch.equal(one, other)


@pytest.mark.parametrize(("family", "config"), CASES)
def test_rows_get_the_same_bits_beside_one_whose_attention_is_wanted(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    model = native(tiny_checkpoint(tmp_path, family, **config), "none")
    ids = prompts(2)
    lengths = [len(prompt) for prompt in ids]
    blocks = torch.arange(2 * 5, dtype=torch.int32).view(2, 5)
    metadata, positions = AttentionMetadata.build(lengths, lengths, blocks, 8)
    keeper = AttentionKeeper(model.attention, [KeptRow(lengths[0] - 1, 0, lengths[0])])
    hidden, pools = [], []
    for attention in (None, keeper):
        kv = KVShape.of(model.config, model.dtype, 8).pool(10, torch.device("cpu"))
        hidden.append(model.forward(torch.tensor([*ids[0], *ids[1]]), positions, metadata, kv, attention=attention))
        pools.append(kv.tensors[0])
    assert torch.equal(*hidden)
    assert torch.equal(*pools)
    weights = keeper.weights(0)
    assert weights.shape == (model.config.num_layers, model.config.num_heads, lengths[0])
    sums = weights.sum(-1)
    if model.config.has_sinks:
        assert bool((sums < 1).all())
    else:
        torch.testing.assert_close(sums, torch.ones(model.config.num_layers, model.config.num_heads))


@pytest.mark.parametrize(
    ("spelt", "instead", "refusal"),
    [
        ("post_attention_norm", "post_norm", "layer 0 of the decoder cannot have post_norm"),
        ("down.weight", "down.wieght", "layer 0 of the decoder must have down.weight"),
        ("qkv.bias", "qkv.bais", "layer 0 of the decoder cannot have qkv.bais"),
    ],
)
def test_a_tensor_by_a_name_that_the_kernels_do_not_know_ends_the_start(
    tmp_path: Path, spelt: str, instead: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = fused.named_tensors

    def misspelt(layer: DecoderLayer) -> dict[str, torch.Tensor]:
        tensors = named(layer)
        tensors[instead] = tensors.pop(spelt)
        return tensors

    monkeypatch.setattr(fused, "named_tensors", misspelt)
    with pytest.raises(RuntimeError, match=refusal):
        native(tiny_checkpoint(tmp_path, "qwen2"), "none")


def test_experts_of_other_formats_in_some_layers_go_layer_by_layer(tmp_path: Path) -> None:
    """A quantised checkpoint where the experts of a layer are not converted."""
    config, four = compressed("pack-quantized", FOUR_BITS, ignore=(r"re:model\.layers\.0\.mlp\.experts.*",))

    def quantise(module: str, weight: torch.Tensor) -> Any:
        return None if module.startswith("model.layers.0.mlp.experts") else four(module, weight)

    folder = quantised_pair(tmp_path, config, quantise, family="qwen3_moe", layers=2).folder
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(folder, dtype="bfloat16", quantization="auto", device=device)
    assert model._fused is None
    for found in logits(model, prompts(2), max_chunk=16, together=True):
        assert found.isfinite().all()


@pytest.mark.parametrize("rows", [LEAST_ROWS - 1, LEAST_ROWS])
def test_a_step_with_a_prompt_over_compressed_keys_goes_layer_by_layer(
    tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is beside one row of another sequence; the steps after it are one call again."""
    model = native(tiny_checkpoint(tmp_path, "deepseek_v3"), "none")
    metadata, _ = AttentionMetadata.build([rows, 1], [rows, 1], torch.zeros(2, 20, dtype=torch.int32), 8)
    assert model.draws_in(metadata) == (rows < LEAST_ROWS)
    draw = random.Random(rows)
    first_ids, second_ids = ([draw.randrange(VOCAB_SIZE) for _ in range(count)] for count in (rows, 1))

    def run() -> list[list[int]]:
        runner = ModelRunner(model, KVShape.of(model.config, model.dtype, 8).pool(40, torch.device("cpu")))
        live = [new_sequence(list(ids), params(), seq_id=place) for place, ids in enumerate((first_ids, second_ids))]
        for place, one in enumerate(live):
            one.block_table.extend(range(20 * place, 20 * place + 20))
        for _ in range(4):
            entries = [
                ScheduledSequence(one, one.num_computed_tokens, len(one.token_ids) - one.num_computed_tokens, (one,))
                for one in live
            ]
            output = runner.execute(SchedulerOutput(tuple(entries)))
            for one in live:
                one.num_computed_tokens = len(one.token_ids)
                one.token_ids.append(output.sampled[one.seq_id].token_id)
        return [one.token_ids for one in live]

    found = run()
    monkeypatch.setattr(model, "_fused", None)
    assert found == run()


def test_what_is_not_all_native_goes_layer_by_layer(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    assert load_model(folder, dtype="bfloat16", device=CPUDevice())._fused is None


def test_heads_larger_than_the_kernels_take_are_torchs(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3", head_dim=264, num_hidden_layers=1)
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(folder, dtype="bfloat16", device=device)
    (found,) = logits(model, prompts(1), max_chunk=8, together=True)
    assert found.isfinite().all()


def highest(model: CausalLM, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return the ids of `forward_and_draw` for every row of one prompt, and the logits of `forward`."""
    found = []
    for draws in (True, False):
        facts = model.config
        kv = KVCachePool(facts.num_layers, 8, 8, facts.num_kv_heads, facts.head_dim, model.dtype, torch.device("cpu"))
        metadata, positions = AttentionMetadata.build(
            [len(ids)], [len(ids)], torch.arange(8, dtype=torch.int32).view(1, 8), 8
        )
        forward = model.forward_and_draw if draws else model.forward
        found.append(forward(torch.tensor(ids), positions, metadata, kv))
    (hidden, chosen), expected = found[0], found[1]
    assert torch.equal(hidden, expected)
    return chosen.tolist(), model.compute_logits(expected)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 8, 40])
def test_the_drawn_ids_are_those_of_the_highest_logits(
    tmp_path: Path, quantization: str, threads: int, count: int
) -> None:
    # The last panel of the head is not full.
    model = native(tiny_checkpoint(tmp_path, vocab_size=300), quantization)
    draw = random.Random(count)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        chosen, logits_TV = highest(model, [draw.randrange(300) for _ in range(count)])
    finally:
        torch.set_num_threads(before)
    assert chosen == logits_TV.numpy().argmax(-1).tolist()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("family", "config"), STATE_CASES)
def test_states_and_draws_are_those_of_layer_by_layer_where_some_rows_are_wanted(
    tmp_path: Path, family: str, config: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = native(tiny_checkpoint(tmp_path, family, **config), "none")
    counts, slots = [20, 1, 9], (2, 0, 1)
    draw = random.Random(9)
    ids = [draw.randrange(VOCAB_SIZE) for _ in range(sum(counts))]
    metadata, positions = AttentionMetadata.build(counts, counts, torch.arange(9, dtype=torch.int32).view(3, 3), 8)
    metadata = replace(metadata, state_slots=slots)
    rows = torch.tensor([19, 20, 29])

    def run() -> tuple[list[int], list[torch.Tensor]]:
        kv = KVShape.of(model.config, model.dtype, 8).pool(9, torch.device("cpu"))
        kv.states = new_states(model.state_layout, 3, torch.device("cpu"))
        assert kv.states is not None
        if model._fused is None:
            hidden = model.forward(torch.tensor(ids), positions, metadata, kv, rows)
            drawn = model.compute_logits(hidden).argmax(-1)
        else:
            hidden, drawn = model.forward_and_draw(torch.tensor(ids), positions, metadata, kv, rows)
        assert kv.states.behind(slots, counts) is None
        return drawn.tolist(), [hidden, kv.tensors[0], *kv.states.in_place()]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        drawn, found = run()
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(model, "_fused", None)
    expected, parts = run()
    assert drawn == expected
    for one, other in zip(found, parts, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("number", "part", "refusal"),
    [
        (0, torch.zeros(3, 1, 3, 8), "the rows before a step are of other layers"),
        (1, torch.zeros(3, 1, 1, 8, 8), "the states are of other layers"),
        (2, torch.tensor([3]), "a sequence has no slot"),
        (3, torch.tensor([0]), "a sequence has no slot, no rows, or keeps others"),
        (4, torch.tensor([0, 0]), "a number of each sequence"),
        (1, torch.zeros(3), "the states are of other layers"),
    ],
)
def test_states_of_another_model_or_step_are_refused(
    tmp_path: Path, number: int, part: torch.Tensor, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = native(tiny_checkpoint(tmp_path, "qwen3_5_text"), "none")
    kv = KVShape.of(model.config, model.dtype, 8).pool(1, torch.device("cpu"))
    kv.states = new_states(model.state_layout, 3, torch.device("cpu"))
    metadata, positions = AttentionMetadata.build([4], [4], torch.zeros(1, 1, dtype=torch.int32), 8)
    states = fused._states

    def wrong(metadata: AttentionMetadata, kv: KVCachePool) -> list[torch.Tensor]:
        parts = states(metadata, kv)
        parts[number] = part
        return parts

    monkeypatch.setattr(fused, "_states", wrong)
    with pytest.raises(RuntimeError, match=refusal):
        model.forward(torch.tensor([1, 2, 3, 4]), positions, replace(metadata, state_slots=(0,)), kv)


def test_a_step_with_other_rows_than_its_sequences_or_that_revises_states_is_refused(tmp_path: Path) -> None:
    model = native(tiny_checkpoint(tmp_path, "qwen3_5_text"), "none")
    kv = KVShape.of(model.config, model.dtype, 8).pool(1, torch.device("cpu"))
    kv.states = new_states(model.state_layout, 3, torch.device("cpu"))
    metadata, positions = AttentionMetadata.build([4], [4], torch.zeros(1, 1, dtype=torch.int32), 8)
    metadata = replace(metadata, state_slots=(0,))
    ids = torch.tensor([1, 2, 3, 4])
    other = replace(metadata, query_start=torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="the sequences have other rows"):
        model.forward(ids, positions, other, kv)
    with pytest.raises(RuntimeError, match="goes layer by layer"):
        model.forward_and_draw(ids, positions, replace(metadata, state_kept=(2,)), kv)


def with_head(model: CausalLM, weight_VI: torch.Tensor, bias_V: torch.Tensor | None = None) -> CausalLM:
    return CausalLM(
        model.config,
        embedding=model._embedding,
        layers=model.layers,
        norm=model._norm,
        lm_head=NativeLinearMethod(Format.BF16).linear(weight_VI, bias_V),
        rotaries=model._rotaries,
        attention=model.attention,
        dtype=model.dtype,
        device=model.device,
        num_bytes=0,
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_of_equal_logits_the_first_is_drawn(tmp_path: Path, threads: int) -> None:
    model = native(tiny_checkpoint(tmp_path), "none")
    rows = torch.randn(7, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        chosen, logits_TV = highest(with_head(model, rows.repeat(40, 1)), list(range(20)))
    finally:
        torch.set_num_threads(before)
    assert max(chosen) < 7
    assert chosen == logits_TV.numpy().argmax(-1).tolist()


@pytest.mark.parametrize("count", [3, 20])
def test_columns_that_no_output_has_are_never_drawn(tmp_path: Path, count: int) -> None:
    """All logits are below zero, which is what the padded columns of the last panel come to."""
    model = native(tiny_checkpoint(tmp_path), "none")
    rows = torch.randn(45, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    bias = torch.full((45,), -1e4, dtype=model.dtype)
    chosen, logits_TV = highest(with_head(model, rows, bias), list(range(count)))
    assert logits_TV.max() < 0
    assert chosen == logits_TV.numpy().argmax(-1).tolist()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize("place", [1, 40, 95])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_logit_that_is_not_finite_draws_nothing(tmp_path: Path, count: int, place: int, bad: float) -> None:
    """Others of its vector are lower than what was found before: they are not passed over with it."""
    model = native(tiny_checkpoint(tmp_path), "none")
    rows = torch.randn(96, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    bias = torch.cat((torch.full((32,), 1e3), torch.full((64,), -1e3)))
    bias[place] = bad
    chosen, logits_TV = highest(with_head(model, rows, bias.to(model.dtype)), list(range(count)))
    assert not logits_TV[:, place].isfinite().any()
    assert chosen == [-1] * count


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_a_finite_highest_logit_draws_nothing(tmp_path: Path, bad: float) -> None:
    model = native(tiny_checkpoint(tmp_path), "none")
    weight = torch.ones(64, model.config.hidden_size, dtype=model.dtype)
    weight[40] = bad
    chosen, logits_TV = highest(with_head(model, weight), [3, 4])
    assert not logits_TV[:, 40].isfinite().any()
    assert [logits_TV[row].isnan().any() or logits_TV[row].max().isinf() for row in range(2)] == [
        id == -1 for id in chosen
    ]
    assert -1 in chosen


@pytest.mark.parametrize(
    ("options", "has_logits"),
    [
        ([{}, {}], False),
        ([{}, {"do_sample": True}], True),
        ([{}, {"repetition_penalty": 1.1}], True),
        ([{"top_logprobs": 2}, {}], True),
    ],
)
def test_logits_are_made_only_where_more_than_the_highest_is_wanted(
    tmp_path: Path, options: list[dict[str, Any]], has_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = native(tiny_checkpoint(tmp_path), "none")
    facts, calls = model.config, []
    compute_logits = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda *given: calls.append(1) or compute_logits(*given))
    kv = KVCachePool(facts.num_layers, 8, 8, facts.num_kv_heads, facts.head_dim, model.dtype, torch.device("cpu"))
    runner = ModelRunner(model, kv)
    live = [new_sequence([3 + place], params(**given), seq_id=place) for place, given in enumerate(options)]
    for place, one in enumerate(live):
        one.block_table.append(place)
    step = SchedulerOutput(tuple(ScheduledSequence(one, 0, 1, (one,)) for one in live))
    assert set(runner.execute(step).sampled) == {0, 1}
    assert bool(calls) == has_logits
