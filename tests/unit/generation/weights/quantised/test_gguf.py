"""GGUF files: blocks mean what transformers' reader makes of them, and a file is a model folder."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from factories.models.gguf_blocks import random_blocks
from factories.models.native import use_native
from factories.models.paged import PagedDriver, PagedSequence
from factories.models.quantised import write_gguf
from penstock.common import gguf_folder
from penstock.common.checkpoint import check_model, demo_folder, model_name, resolve_model
from penstock.common.errors import DoesNotFit, StartupError
from penstock.common.gguf_file import TYPES, GgufFile
from penstock.common.gguf_folder import config_of
from penstock.common.gguf_parts import GGUF_FILE, read_gguf
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.registry import checkpoint_weights, load_model, read_model_config
from penstock.generation.startup.memory_check import check_weights, stored_weight_bytes
from penstock.generation.weights.quantised import gguf
from penstock.generation.weights.quantised.gguf import GgufCheckpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers.integrations.gguf.dequant import dequantize

NUMBERS = {kind.name: number for number, kind in TYPES.items()}
HEADS, KV_HEADS = 4, 2
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ENDS = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
FACTS = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.block_count": 2,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 2,
}
Entry = tuple[int, tuple[int, ...], bytes]


# transformers has no Q5_0 and Q5_1: the library's own reader judges them (test_quantised_libraries.py).
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_mean_what_transformers_makes_of_them(kind: str) -> None:
    stored = TYPES[NUMBERS[kind]]
    blocks = torch.randint(
        0, 256, (50, stored.num_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    found = gguf._NUMBERS[kind](blocks).reshape(50, stored.numbers)
    expected = dequantize(blocks.flatten(), NUMBERS[kind], torch.float32).reshape(50, stored.numbers)
    # A sum of products may be rounded in another order.
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert expected.isfinite().float().mean() > 0.8


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_whole_numbers_mean_the_same(kind: str) -> None:
    stored = TYPES[NUMBERS[kind]]
    random = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (50, stored.num_bytes), dtype=torch.uint8, generator=random)
    values, scale, offset = gguf._WHOLE[kind](blocks)
    assert int(values.max()) == 15
    assert (offset is None) == (gguf.WHOLE_TYPES[kind] == "int4")
    groups, scale = values.reshape(-1, 32).float(), scale.reshape(-1, 1)
    meant = (groups - 8) * scale if offset is None else groups * scale + offset.reshape(-1, 1)
    exact = gguf._NUMBERS[kind](blocks).reshape(-1, 32)
    assert torch.allclose(meant, exact, rtol=1e-6, atol=1e-6, equal_nan=True)


def q4_0(value: Tensor) -> tuple[bytes, Tensor]:
    """A matrix as Q4_0, and its numbers."""
    groups = value.reshape(-1, 32)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    scale = (largest / -8).half()
    codes = (groups / scale.float()).round().add(8).clamp(0, 15).to(torch.uint8)
    octets = codes[:, :16] | codes[:, 16:] << 4
    data = torch.cat([scale.view(torch.uint8), octets], dim=1)
    return data.numpy().tobytes(), ((codes.float() - 8) * scale.float()).view_as(value)


def q8_0(value: Tensor) -> tuple[bytes, Tensor]:
    """A matrix as Q8_0, and its numbers."""
    groups = value.reshape(-1, 32)
    scale = (groups.abs().amax(1, keepdim=True) / 127).half()
    codes = (groups / scale.float()).round().to(torch.int8)
    data = torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], dim=1)
    return data.numpy().tobytes(), (codes.float() * scale.float()).view_as(value)


def turned(value: Tensor, heads: int) -> Tensor:
    """Rows in the order in which llama.cpp writes the query's and the key's."""
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def entries(
    tensors: dict[str, Tensor], *, is_turned: bool = True, names: dict[str, str] = NAMES
) -> tuple[dict[str, Entry], dict[str, Tensor]]:
    """A model's tensors as a file has them, and the numbers that these mean: matrices of a layer in Q4_0, the head in
    Q8_0, the table in float16."""
    found: dict[str, Entry] = {}
    meant: dict[str, Tensor] = {}
    for name, value in tensors.items():
        module, _, kind = name.rpartition(".")
        parts = module.split(".", 3)
        ours = ENDS.get(module) or f"blk.{parts[2]}.{names[parts[3]]}"
        pack = q8_0 if module == "lm_head" else q4_0
        if value.dim() == 1 or module == "model.embed_tokens":
            stored = value.float() if value.dim() == 1 else value.half()
            number, data, numbers = (
                NUMBERS["F32" if value.dim() == 1 else "F16"],
                stored.numpy().tobytes(),
                stored.float(),
            )
        else:
            number = NUMBERS["Q8_0" if module == "lm_head" else "Q4_0"]
            data, numbers = pack(value)
            if is_turned and parts[-1] in ("self_attn.q_proj", "self_attn.k_proj"):
                data, _ = pack(turned(value, HEADS if "q_proj" in module else KV_HEADS))
        found[f"{ours}.{kind}"] = number, tuple(value.shape), data
        meant[name] = numbers
    return found, meant


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Entry], Path]:
    """A llama's tensors as a GGUF file has them, and a plain checkpoint with the numbers that these mean."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("dense"), "llama", hidden_size=64, intermediate_size=128)
    found, meant = entries(load_file(folder / "model.safetensors"))
    save_file(meant, folder / "model.safetensors", metadata={"format": "pt"})
    return found, folder


def folder_of(path: Path) -> Path:
    """The folder that resolve_model makes, without a tokenizer."""
    folder = path.with_suffix("")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(read_gguf(path))))
    (folder / GGUF_FILE).symlink_to(path)
    return folder


def logits(folder: Path, **options: Any) -> Tensor:
    loaded = load_model(folder, device=CPUDevice(), **{"dtype": "float32", **options})
    sequence = PagedSequence(list(range(5, 35)))
    PagedDriver(loaded, num_blocks=8, block_size=8).step([(sequence, 30)])
    return torch.stack(sequence.logits)


def test_a_model_is_the_numbers_of_its_blocks(tmp_path: Path, model: tuple[dict[str, Entry], Path]) -> None:
    found, dense = model
    write_gguf(tmp_path / "tiny.gguf", FACTS, found)
    folder = folder_of(tmp_path / "tiny.gguf")
    exact = logits(dense)
    assert float((logits(folder, quantization="none") - exact).abs().max()) < 1e-4
    kept = load_model(folder, dtype="float32", device=CPUDevice())
    # The head in Q8_0 has no form of ours.
    assert kept.config.weight_forms == (("float32", 1), ("int4", 14))
    assert kept.config.checkpoint_format == "gguf of F16, F32, Q4_0, Q8_0"
    assert float((logits(folder) - exact).abs().mean() / exact.std()) < 0.04
    assert stored_weight_bytes(folder) == (tmp_path / "tiny.gguf").stat().st_size


@pytest.mark.kernels
def test_a_tied_head_in_q4_0_runs_in_the_one_call_of_the_kernels(
    tmp_path: Path, model: tuple[dict[str, Entry], Path]
) -> None:
    use_native()
    found, dense = dict(model[0]), load_file(model[1] / "model.safetensors")
    data, table = q4_0(dense["model.embed_tokens.weight"])
    del found["output.weight"]
    found["token_embd.weight"] = NUMBERS["Q4_0"], tuple(table.shape), data
    write_gguf(tmp_path / "tiny.gguf", FACTS, found)
    folder = folder_of(tmp_path / "tiny.gguf")
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    kept = load_model(folder, dtype="float32", device=device)
    assert kept.config.weight_forms == (("q4_0", 15),)
    assert kept.can_draw
    assert torch.equal(kept.embed(torch.arange(320)), table)
    exact = logits(folder, quantization="none")
    sequence = PagedSequence(list(range(5, 35)))
    PagedDriver(kept, num_blocks=8, block_size=8).step([(sequence, 30)])
    assert float((torch.stack(sequence.logits) - exact).abs().mean() / exact.std()) < 0.05


MIX = {
    "attn_q": "Q4_K",
    "attn_k": "IQ4_XS",
    "attn_v": "Q6_K",
    "attn_output": "Q5_0",
    "ffn_gate": "Q5_K",
    "ffn_up": "Q5_K",
    "ffn_down": "MXFP4",
    "token_embd": "Q8_0",
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a llama with matrices of eight types, and with one table for embedding and head."""
    home = tmp_path_factory.mktemp("mixed")
    folder = tiny_checkpoint(home / "dense", "llama", hidden_size=256, intermediate_size=256, head_dim=64)
    found: dict[str, Entry] = {}
    draw = torch.Generator().manual_seed(5)
    for name, value in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        parts = module.split(".", 3)
        ours = ENDS.get(module) or NAMES[parts[3]]
        whole = ours if module in ENDS else f"blk.{parts[2]}.{ours}"
        if value.dim() == 1:
            found[f"{whole}.{kind}"] = NUMBERS["F32"], tuple(value.shape), value.float().numpy().tobytes()
        elif ours in MIX:
            rows = random_blocks(MIX[ours], *value.shape, draw)
            found[f"{whole}.{kind}"] = NUMBERS[MIX[ours]], tuple(value.shape), rows.numpy().tobytes()
    facts = FACTS | {
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 256,
        "llama.rope.dimension_count": 64,
        "llama.attention.key_length": 64,
    }
    write_gguf(home / "mixed.gguf", facts, found)
    return folder_of(home / "mixed.gguf")


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mix_of_types_stays_as_it_is_in_the_one_call_of_the_kernels(mixed: Path, dtype: str) -> None:
    use_native()
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    kept = load_model(mixed, dtype=dtype, device=device)
    assert dict(kept.config.weight_forms) == {
        **dict.fromkeys(("q4_k", "iq4_xs", "q6_k", "q5_0", "mxfp4"), 2),
        "q5_k": 4,
        "q8_0": 1,
    }
    assert kept.can_draw
    table = GgufCheckpoint(mixed).take("model.embed_tokens.weight")
    assert torch.equal(kept.embed(torch.arange(320)).float(), table.to(kept.dtype).float())
    # The table has no second copy, and each matrix the size of the file's.
    assert kept.num_bytes < 1.05 * stored_weight_bytes(mixed)
    exact = logits(mixed, quantization="none")
    sequence = PagedSequence(list(range(5, 35)))
    PagedDriver(kept, num_blocks=8, block_size=8).step([(sequence, 30)])
    assert float((torch.stack(sequence.logits).float() - exact).abs().mean() / exact.std()) < 0.05


def test_a_mix_of_types_is_expected_to_take_the_memory_of_the_file(mixed: Path) -> None:
    config, stored = read_model_config(mixed), stored_weight_bytes(mixed)
    check_weights(stored, config, "auto", stored)
    for quantization, available in (("auto", stored - 1), ("none", stored)):
        with pytest.raises(DoesNotFit, match="choose a smaller MODEL"):
            check_weights(stored, config, quantization, available)
    # Its blocks do not become compact, however small a matrix is beside all of them.
    with pytest.raises(DoesNotFit):
        check_weights(100 * stored, replace(config, num_layers=400), "auto", 100 * stored - 1, compact=True)


def test_without_the_kernels_a_mix_of_types_is_dequantised(mixed: Path) -> None:
    kept = load_model(mixed, dtype="float32", device=CPUDevice())
    assert {form for form, _ in kept.config.weight_forms} == {"float32"}


def test_rows_of_a_table_in_blocks_are_read_alone(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that measure the importance of inputs for int4: any ids, also twice, and of several pieces."""
    monkeypatch.setattr(gguf, "PIECE_BYTES", 4 * 256 * 100)
    weights = checkpoint_weights(mixed, read_model_config(mixed), CPUDevice(), "bfloat16", "none", map_embeddings=False)
    ids = [319, 0, 99, 100, 99, 250]
    table = GgufCheckpoint(mixed).take("model.embed_tokens.weight")
    assert torch.equal(weights.embedded(ids), table[ids].bfloat16())


def test_int4_of_a_mix_of_types_weighs_its_inputs(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = logits(mixed, quantization="int4")
    (kept,) = (tmp_path / "penstock" / "importance").iterdir()
    of_inputs = load_file(kept)
    assert len(of_inputs) == 8
    assert all(bool(one.isfinite().all()) and float(one.min()) > 0 for one in of_inputs.values())
    exact = logits(mixed, quantization="none")
    assert float((found - exact).abs().mean() / exact.std()) < 0.3


GEMMA3_NAMES = NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA3_FACTS = {
    name.replace("llama.", "gemma3."): value for name, value in FACTS.items() if "dimension_count" not in name
} | {
    "general.architecture": "gemma3",
    "gemma3.rope.freq_base": 1e6,
    "gemma3.attention.key_length": 16,
    "gemma3.attention.sliding_window": 8,
}


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Entry], Path]:
    """A Gemma 3's tensors as a file has them, whose norms have one more, and a plain checkpoint of the same numbers."""
    changes = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "query_pre_attn_scalar": 16}
    folder = tiny_checkpoint(
        tmp_path_factory.mktemp("gemma3"), "gemma3_text", hidden_size=64, intermediate_size=128, head_dim=16, **changes
    )
    tensors = load_file(folder / "model.safetensors")
    of_file = {name: value.float() + 1.0 if "norm" in name else value for name, value in tensors.items()}
    found, _ = entries(of_file, is_turned=False, names=GEMMA3_NAMES)
    _, meant = entries(tensors, is_turned=False, names=GEMMA3_NAMES)
    save_file(meant, folder / "model.safetensors", metadata={"format": "pt"})
    return found, folder


def test_gemma_3_has_its_own_names_norms_and_windows(tmp_path: Path, gemma3: tuple[dict[str, Entry], Path]) -> None:
    found, dense = gemma3
    write_gguf(tmp_path / "tiny.gguf", GEMMA3_FACTS, found)
    folder = folder_of(tmp_path / "tiny.gguf")
    config = read_model_config(folder)
    assert config.model_type == "gemma3_text"
    assert [layer_rope.theta for layer_rope in config.layer_ropes] == [10_000.0] * 2
    # Beyond the window of 8, too.
    assert float((logits(folder, quantization="none") - logits(dense)).abs().max()) < 1e-4


@pytest.mark.parametrize("fact", ["attention.sliding_window", "attention.key_length"])
def test_gemma_3_without_a_fact_of_its_own_is_refused(
    tmp_path: Path, gemma3: tuple[dict[str, Entry], Path], fact: str
) -> None:
    facts = {name: value for name, value in GEMMA3_FACTS.items() if name != f"gemma3.{fact}"}
    write_gguf(tmp_path / "tiny.gguf", facts, gemma3[0])
    with pytest.raises(StartupError, match=f"has no gemma3.{fact}"):
        config_of(GgufFile(tmp_path / "tiny.gguf"))


def test_config_is_made_of_the_facts(tmp_path: Path, model: tuple[dict[str, Entry], Path]) -> None:
    found = dict(model[0])
    turns = [8192 * 10000.0 ** (-2 * i / 16) / 6.283185307179586 for i in range(8)]
    smooth = [min(max((turn - 1) / 3, 0.0), 1.0) for turn in turns]
    factors = [1 / ((1 - one) / 8 + one) for one in smooth]
    found["rope_freqs.weight"] = NUMBERS["F32"], (8,), struct.pack("<8f", *factors)
    del found["output.weight"]
    write_gguf(tmp_path / "tiny.gguf", FACTS, found)
    config = read_model_config(folder_of(tmp_path / "tiny.gguf"))
    assert config.rope.rope_type == "llama3"
    assert config.rope.factor == pytest.approx(8, abs=1e-3)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (1, 2)
    assert (config.head_dim, config.num_kv_heads, config.vocab_size) == (16, KV_HEADS, 320)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"general.architecture": "mamba"},
            "general.architecture 'mamba', which is not read from GGUF; supported are llama",
        ),
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"llama.attention.head_count": "four"}, "has llama.attention.head_count 'four', which is not a whole number"),
        ({"llama.attention.head_count_kv": 0}, "has llama.attention.head_count_kv 0, which is not a whole number"),
        ({"llama.rope.freq_base": float("nan")}, "has llama.rope.freq_base nan, which is not a number above 0"),
        ({"llama.expert_count": 8}, "has no llama.expert_used_count"),
        ({"llama.logit_scale": 2.0}, "has llama.logit_scale"),
        ({"llama.rope.dimension_count": 8}, "has llama.rope.dimension_count 8"),
        ({"llama.rope.scaling.type": "longrope"}, "has llama.rope.scaling.type 'longrope'"),
        ({"split.count": 3}, "is part 1 of 3, and they are found by their names"),
        ({"llama.feed_forward_length": 96}, "tensor model.layers.0.mlp.down_proj.weight has shape [64, 128]"),
        ({"llama.block_count": 3}, "lacks tensors model.layers.2."),
    ],
)
def test_facts_that_do_not_fit_are_named(
    tmp_path: Path, model: tuple[dict[str, Entry], Path], change: dict[str, Any], named: str
) -> None:
    facts = {name: value for name, value in {**FACTS, **change}.items() if value is not None}
    write_gguf(tmp_path / "tiny.gguf", facts, model[0])
    with pytest.raises(StartupError) as caught:
        load_model(folder_of(tmp_path / "tiny.gguf"), device=CPUDevice())
    assert named in caught.value.message
    assert caught.value.flag == "MODEL"


def test_broken_files_are_named(tmp_path: Path, model: tuple[dict[str, Entry], Path]) -> None:
    path = tmp_path / "tiny.gguf"
    found = dict(model[0])
    write_gguf(path, FACTS, found)
    content = path.read_bytes()
    for size, named in (
        (0, "not a complete GGUF"),
        (3, "not a complete GGUF"),
        (100, "not a complete GGUF"),
        (-999, "is cut short"),
    ):
        path.write_bytes(content[:size])
        with pytest.raises(StartupError, match=named):
            GgufFile(path)
    path.write_bytes(b"GGUF\1" + content[5:])
    with pytest.raises(StartupError, match=r"version 1; supported are 2, 3"):
        GgufFile(path)
    number, shape, data = found["blk.0.ffn_up.weight"]
    write_gguf(path, FACTS, {**found, "blk.0.ffn_up.weight": (22, shape, data)})
    with pytest.raises(StartupError, match=r"type IQ2_S; supported are F32"):
        GgufFile(path)
    write_gguf(path, FACTS, {**found, "blk.0.ffn_up.weight": (number, (64, 65), data)})
    with pytest.raises(StartupError, match=r"ffn_up.weight has shape \[64, 65\]: its rows are not whole blocks"):
        GgufFile(path)
    write_gguf(path, FACTS, {**found, "blk.0.ffn_extra.weight": (number, shape, data)})
    with pytest.raises(StartupError, match=r"has unexpected tensors blk.0.ffn_extra.weight"):
        load_model(folder_of(path), device=CPUDevice())


def test_model_may_be_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: tuple[dict[str, Entry], Path]
) -> None:
    """With its tokenizer, which is converted in a process of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ours = json.loads((demo_folder() / "tokenizer.json").read_text())
    vocabulary = {**ours["model"]["vocab"], **{one["content"]: one["id"] for one in ours["added_tokens"]}}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    merges = [one if isinstance(one, str) else " ".join(one) for one in ours["model"]["merges"]]
    facts = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens}
    special = {one["content"] for one in ours["added_tokens"]}
    facts |= {"tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens]}
    facts |= {"tokenizer.ggml.merges": merges, "tokenizer.chat_template": "{{ messages[0].content }}"}
    home = tmp_path / "model"
    home.mkdir()
    path = home / "tiny.gguf"
    write_gguf(path, {**FACTS, **facts}, model[0])
    with pytest.raises(StartupError, match="does not exist yet"):
        resolve_model(str(path), allow_hub=False)
    check_model(str(path))
    folder = resolve_model(str(path))
    assert model_name(path) == "tiny"
    # Found again, also by the folder that has nothing else, and before anything is imported.
    assert [resolve_model(str(one), allow_hub=False) for one in (path, home)] == [folder, folder]
    assert read_model_config(folder).architecture == "LlamaForCausalLM"
    found, expected = (Tokenizer.from_file(str(one / "tokenizer.json")) for one in (folder, demo_folder()))
    text = "<|im_start|>Penstock serves 12 models, doesn't it?<|im_end|>"
    assert found.encode(text, add_special_tokens=False).ids == expected.encode(text, add_special_tokens=False).ids
    # A file that was replaced is another one.
    write_gguf(path, {**FACTS, "llama.context_length": 256}, model[0])
    os.utime(path, ns=(1, 1))
    assert resolve_model(str(path)) != folder
    (home / "other.gguf").symlink_to(path)
    with pytest.raises(StartupError, match=r"several GGUF files \(other.gguf, tiny.gguf\)"):
        resolve_model(str(home))


def test_starts_of_one_file_make_its_folder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: tuple[dict[str, Entry], Path]
) -> None:
    """As a tokenizer and a generation service do that start together."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, FACTS, model[0])
    flock, starts, conversions = fcntl.flock, threading.Semaphore(0), []

    def counted(descriptor: int, operation: int) -> None:
        starts.release()
        flock(descriptor, operation)

    def convert(_path: Path, folder: Path) -> None:
        conversions.append(folder)
        assert all(starts.acquire(timeout=60) for _ in range(2)), "the other start does not wait for this one"

    monkeypatch.setattr(fcntl, "flock", counted)
    monkeypatch.setattr(gguf_folder, "_write_tokenizer", convert)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(resolve_model, [str(path)] * 2)
    assert first == second
    assert len(conversions) == 1
