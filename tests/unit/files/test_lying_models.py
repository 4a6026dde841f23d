"""Files of a model that lie are read or refused by an error that names them, whatever a value is."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from factories.models.lies import HOSTILE_FACTS, Outcomes, damaged, lies, opened, rewrite, safetensors, texts
from factories.models.quantised import CASES, quantised_pair, write_gguf
from penstock.common.errors import StartupError
from penstock.common.gguf_file import GgufFile
from penstock.common.gguf_folder import config_of
from penstock.common.gguf_parts import GGUF_FILE, read_gguf
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.registry import FAMILIES, checkpoint_weights, load_model, read_model_config
from penstock.generation.options.hf_json import load_defaults
from penstock.generation.weights.files import INDEX_FILE, SINGLE_FILE, file_names, least_weight_bytes
from penstock.generation.wire.option_messages import from_options
from safetensors.torch import load_file, save_file

CPU = CPUDevice()
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
        "truncate": True,
    },
}


def weights(folder: Path) -> None:
    """Check a folder as far as its numbers."""
    config = read_model_config(folder)
    checkpoint_weights(folder, config, CPUDevice(), "auto", "auto", map_embeddings=True)


def write(path: Path, value: Any) -> None:
    rewrite(path, value if isinstance(value, bytes) else json.dumps(value).encode())


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("families")
    return {family: tiny_checkpoint(where / family, family) for family in FAMILIES}


def some(lying: Iterable[tuple[str, Any]], part: int, parts: int) -> list[tuple[str, Any]]:
    """One of `parts` parts of them, drawn."""
    return [lie for number, lie in enumerate(lying) if number % parts == part % parts]


# All lies about each family's fields are for `make slow`; together the families meet each of a common field's.
@pytest.mark.parametrize("parts", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_config_json(family: str, parts: int, families: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(families[family], tmp_path / "model"))
    values = json.loads((folder / "config.json").read_text())
    outcomes = Outcomes()
    outcomes.note("as it is", lambda: weights(folder))
    added = ("quantization_config", "rope_scaling", "torch_dtype", "compression_config")
    for name, document in some([*lies(values, added=added), *texts(values)], list(FAMILIES).index(family), parts):
        write(folder / "config.json", document)
        outcomes.note(name, lambda: read_model_config(folder))
    outcomes.check(600 // parts)


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_rotary_embedding_is_refused_before_it_is_computed(
    kind: str, families: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(families["llama"], tmp_path / "model"))
    values = json.loads((folder / "config.json").read_text()) | {"rope_parameters": SCALINGS[kind]}
    outcomes = Outcomes()
    for name, scaling in [("as it is", SCALINGS[kind]), *some(lies(SCALINGS[kind], added=("rope_theta",)), 0, 2)]:
        write(folder / "config.json", {**values, "rope_parameters": scaling})
        outcomes.note(name, lambda: load_model(folder, device=CPUDevice()))
    outcomes.check(30)


def test_sizes_are_refused_before_anything_is_allocated(families: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(families["qwen3"], tmp_path / "model"))
    values = json.loads((folder / "config.json").read_text())
    outcomes = Outcomes()
    for name, document in some(lies(values), 0, 4):
        write(folder / "config.json", document)
        outcomes.note(name, lambda: load_model(folder, device=CPUDevice()))
    outcomes.check(200)


def generation_defaults(folder: Path) -> None:
    """Read them, and write them as GetModelInfo does."""
    from_options(load_defaults(folder, (1,), 320, 4).defaults.options).SerializeToString()


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_5_text", ("num_attention_heads",)),
        ("qwen3_next", ("linear_num_key_heads", "linear_num_value_heads")),
    ],
)
def test_orders_of_rows_are_not_listed_for_rows_that_no_file_has(
    family: str, fields: tuple[str, ...], families: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(families[family], tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", config | dict.fromkeys(fields, 100_000))
    tracemalloc.start()
    with pytest.raises(StartupError, match="has shape"):
        weights(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_generation_config_json(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "eos_token_id": [1, [2, 3]],
        "bos_token_id": 0,
        "pad_token_id": 0,
        "stop_strings": ["x"],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "do_sample": True,
        "num_beams": 2,
        "max_new_tokens": 8,
        "max_length": 20,
        "suppress_tokens": [4, 5],
        "bad_words_ids": [[6, 7]],
        "sequence_bias": [[[8], 1.0]],
        "forced_eos_token_id": 1,
        "exponential_decay_length_penalty": [2, 1.1],
        "watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.0},
        "guidance_scale": 1.5,
        "num_return_sequences": 1,
        "dola_layers": "low",
        "cache_implementation": None,
    }
    outcomes = Outcomes()
    for name, document in [("as it is", {}), *some(lies(values), 0, 4), *texts(values)]:
        write(tmp_path / "generation_config.json", document)
        outcomes.note(name, lambda: generation_defaults(tmp_path))
    for number, (name, value) in enumerate(values.items()):
        for named, document in some(lies({name: value}), number, 2):
            write(tmp_path / "generation_config.json", document)
            outcomes.note(named, lambda: generation_defaults(tmp_path))
    outcomes.check(1000)


def test_headers_of_safetensors(families: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(families["llama"], tmp_path / "model"))
    header, data = opened((folder / SINGLE_FILE).read_bytes())
    names = list(header)
    small = {name: header[name] for name in names[:3]}
    rest = {name: header[name] for name in names[3:]}
    outcomes = Outcomes()
    outcomes.note("as it is", lambda: load_model(folder, device=CPUDevice()))
    found = [(name, lie | rest) for name, lie in lies(small) if isinstance(lie, dict)] + [
        lie for lie in lies(small) if not isinstance(lie[1], dict)
    ]
    content = (folder / SINGLE_FILE).read_bytes()
    files = [(name, safetensors(document, data)) for name, document in [*found, *texts(header)]]
    files += damaged(content, 100, within=len(content) - len(data))
    files += [("shorter", content[:-1]), ("longer", content + b"x"), ("only a length", content[:8])]
    for name, damage in files:
        rewrite(folder / SINGLE_FILE, damage)
        outcomes.note(name, lambda: weights(folder))
        outcomes.note(name, lambda: least_weight_bytes(folder, "auto", "none", map_embeddings=True))
    outcomes.check(800)


def test_index_of_shards(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", max_shard_size="30KB")
    values = json.loads((folder / INDEX_FILE).read_text())
    outcomes = Outcomes()
    for name, document in [("as it is", values), *some(lies(values), 0, 5), *texts(values)]:
        write(folder / INDEX_FILE, document)
        outcomes.note(name, lambda: weights(folder))
        outcomes.note(name, lambda: file_names(folder))
    outcomes.check(300)


@pytest.mark.parametrize("parts", [12, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_quantised_checkpoints(case: str, parts: int, tmp_path: Path) -> None:
    (config, quantise), _ = CASES[case]
    folder = quantised_pair(tmp_path, config, quantise, layers=1).folder
    values = json.loads((folder / "config.json").read_text())
    outcomes = Outcomes()
    outcomes.note("as it is", lambda: load_model(folder, device=CPUDevice()))
    for name, document in some(lies(config), list(CASES).index(case), parts):
        write(folder / "config.json", {**values, "quantization_config": document})
        outcomes.note(name, lambda: load_model(folder, device=CPUDevice()))
    outcomes.check(60 // parts)


def test_facts_in_the_headers_of_quantised_checkpoints(tmp_path: Path) -> None:
    """torchao's in the metadata, bitsandbytes' as bytes of a tensor."""
    outcomes = Outcomes()
    (config, quantise), _ = CASES["torchao-int8"]
    folder = quantised_pair(tmp_path, config, quantise, layers=1).folder
    header, data = opened((folder / SINGLE_FILE).read_bytes())
    name, text = next((name, text) for name, text in header["__metadata__"].items() if name != "format")
    for named, document in [
        ("as it is", json.loads(text)),
        *some(lies(json.loads(text)), 0, 3),
        *texts(json.loads(text)),
    ]:
        said = document.decode(errors="replace") if isinstance(document, bytes) else json.dumps(document)
        metadata = {**header["__metadata__"], name: said}
        rewrite(folder / SINGLE_FILE, safetensors({**header, "__metadata__": metadata}, data))
        outcomes.note(named, lambda: load_model(folder, device=CPUDevice()))
    for nested in (False, True):
        (tmp_path / f"nf4-{nested}").mkdir()
        (config, quantise), _ = CASES["nf4-nested" if nested else "nf4"]
        folder = quantised_pair(tmp_path / f"nf4-{nested}", config, quantise, layers=1).folder
        tensors = load_file(folder / SINGLE_FILE)
        state = next(one for one in tensors if "quant_state" in one)
        facts = json.loads(bytes(tensors[state].tolist()))
        for named, document in [("as it is", facts), *some(lies(facts), int(nested), 4)]:
            said = document if isinstance(document, bytes) else json.dumps(document).encode()
            tensors[state] = torch.frombuffer(bytearray(said or b" "), dtype=torch.uint8)
            save_file(tensors, folder / SINGLE_FILE)
            outcomes.note(named, partial(load_model, folder, device=CPUDevice()))
    outcomes.check(200)


GGUF_FACTS: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "split.count": 1,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.block_count": 1,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 16,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 16,
    "llama.rope.scaling.type": "linear",
    "llama.rope.scaling.factor": 2.0,
    "llama.rope.scaling.original_context_length": 256,
    "llama.expert_count": 0,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 2,
    "tokenizer.ggml.eom_token_id": 3,
    "tokenizer.ggml.tokens": ["a", "b"],
    "other": 1,
}
GGUF_NAMES = {
    "token_embd": (320, 64), "output": (320, 64), "output_norm": (64,),
    "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,),
    "blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64), "blk.0.attn_output": (64, 64),
    "blk.0.ffn_gate": (128, 64), "blk.0.ffn_up": (128, 64), "blk.0.ffn_down": (64, 128),
}  # fmt: skip


def gguf_tensors() -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    return {
        f"{name}.weight": (0, shape, torch.full(shape, 0.5).numpy().tobytes()) for name, shape in GGUF_NAMES.items()
    }


def use_gguf(folder: Path) -> None:
    """All that a service does with a file, but for the tokenizer's conversion, which is a process of its own."""
    write(folder / "config.json", config_of(read_gguf(folder / GGUF_FILE)))
    weights(folder)


def test_facts_of_gguf(tmp_path: Path) -> None:
    outcomes = Outcomes()
    write_gguf(tmp_path / GGUF_FILE, GGUF_FACTS, gguf_tensors())
    outcomes.note("as it is", lambda: use_gguf(tmp_path))
    outcomes.note("as it is", lambda: load_model(tmp_path, device=CPUDevice()))
    for fact in GGUF_FACTS:
        for name, value in HOSTILE_FACTS.items():
            write_gguf(tmp_path / GGUF_FILE, {**GGUF_FACTS, fact: value}, gguf_tensors())
            outcomes.note(f"{fact}: {name}", lambda: use_gguf(tmp_path))
    outcomes.check(700)


# Facts of architectures that read more than llama's, beside those that all have.
OWN_FACTS: dict[str, dict[str, Any]] = {
    "gemma3": {"attention.sliding_window": 8, "attention.sliding_window_pattern": [1, 0], "rope.freq_base_swa": 1e4},
    "gemma4": {
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [1, 0],
        "attention.head_count_kv": [2, 1],
        "attention.key_length_swa": 16,
        "attention.shared_kv_layers": 1,
        "feed_forward_length": [128, 256],
        "embedding_length_per_layer_input": 8,
        "final_logit_softcapping": 5.0,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
    },
    "phi3": {"attention.sliding_window": 8, "rope.scaling.attn_factor": 1.1},
    "qwen35": {
        "attention.key_length": 16,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 64,
        "full_attention_interval": 2,
        "rope.dimension_sections": [2, 1, 1, 0],
        "rope.dimension_count": 8,
        "nextn_predict_layers": 1,
    },
    "falcon-h1": {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 64,
    },
    "lfm2": {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    "deepseek2": {
        "attention.kv_lora_rank": 16,
        "attention.q_lora_rank": 16,
        "attention.key_length": 24,
        "attention.value_length": 16,
        "attention.key_length_mla": 24,
        "attention.value_length_mla": 16,
        "rope.dimension_count": 8,
        "rope.scaling.yarn_log_multiplier": 0.1,
        "leading_dense_block_count": 1,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 1,
        "expert_group_count": 2,
        "expert_group_used_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    },
}


@pytest.mark.parametrize("architecture", OWN_FACTS)
def test_facts_of_further_architectures_of_gguf(tmp_path: Path, architecture: str) -> None:
    outcomes = Outcomes()
    path = tmp_path / GGUF_FILE
    common = {"context_length": 512, "embedding_length": 64, "feed_forward_length": 128, "block_count": 2}
    common |= {"attention.head_count": 4, "attention.key_length": 16, "rope.freq_base": 1e4}
    common |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0} if architecture == "deepseek2" else {}
    facts = {f"{architecture}.{one}": value for one, value in {**common, **OWN_FACTS[architecture]}.items()}
    facts = {"general.architecture": architecture, **facts}
    write_gguf(path, facts, gguf_tensors())
    assert config_of(read_gguf(path))["architectures"]
    for fact in facts:
        for name, value in HOSTILE_FACTS.items():
            write_gguf(path, {**facts, fact: value}, gguf_tensors())
            outcomes.note(f"{fact}: {name}", lambda: json.dumps(config_of(read_gguf(path))))
    outcomes.check(200)


def test_tensors_and_bytes_of_gguf(tmp_path: Path) -> None:
    outcomes = Outcomes()
    path = tmp_path / GGUF_FILE
    write_gguf(path, GGUF_FACTS, gguf_tensors())
    content = path.read_bytes()
    for name, damage in damaged(content, 200, within=1800):
        rewrite(path, damage)
        outcomes.note(name, lambda: use_gguf(tmp_path))
    whole = gguf_tensors()
    facts = {name: value for name, value in GGUF_FACTS.items() if "scaling" not in name}
    for factors in ([0.0] * 8, [float("nan")] * 8, [float("inf")] * 8, [1e38] * 8, [-1.0] * 8, [1.0] * 7, []):
        stored = (0, (len(factors),), struct.pack(f"<{len(factors)}f", *factors))
        write_gguf(path, facts, {**whole, "rope_freqs.weight": stored})
        outcomes.note(f"factors {factors}", lambda: use_gguf(tmp_path))
    shapes: list[tuple[int, ...]] = [(), (0,), (2**63, 0), (2**64 - 1,) * 4, (64,), (1, 1, 1, 64), (0, 0)]
    for tensor, (number, shape, data) in whole.items():
        for lie in shapes:
            write_gguf(path, facts, {**whole, tensor: (number, lie, data)})
            outcomes.note(f"{tensor} {lie}", lambda: use_gguf(tmp_path))
        for kind in (1, 2, 14, 23, 99):
            write_gguf(path, facts, {**whole, tensor: (kind, shape, data)})
            outcomes.note(f"{tensor} of type {kind}", lambda: use_gguf(tmp_path))
        for name in ("", "x" * 60_000, "x" * 70_000, f"blk.{'9' * 5000}.attn_q.weight", "blk.-1.attn_q.weight", "\0"):
            renamed = {name if one == tensor else one: entry for one, entry in whole.items()}
            write_gguf(path, facts, renamed)
            outcomes.note(f"{tensor} as {name[:9]}", lambda: use_gguf(tmp_path))
    outcomes.check(500)


def test_arrays_of_gguf_stay_in_the_file(tmp_path: Path) -> None:
    """As lists they took 17 bytes for one of the file."""
    size = 1 << 24
    facts = {"general.architecture": "llama", "tokenizer.ggml.scores": struct.pack("<IIQ", 9, 0, size) + bytes(size)}
    write_gguf(tmp_path / GGUF_FILE, facts, {})
    tracemalloc.start()
    try:
        file = GgufFile(tmp_path / GGUF_FILE)
        _, read = tracemalloc.get_traced_memory()
        numbers = file.numbers("tokenizer.ggml.scores")
        _, asked = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read < 1 << 20
    assert len(numbers) == size
    assert asked < 2.5 * size


def test_texts_and_counts_of_gguf_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / GGUF_FILE
    for value in (
        struct.pack("<IIQ", 9, 8, 1 << 22) + struct.pack("<Q", 0) * (1 << 22),
        struct.pack("<IQ", 8, 1 << 27) + bytes(1 << 27),
    ):
        write_gguf(path, {"x": value}, {})
        with pytest.raises(StartupError, match=r"too long|longer than"):
            GgufFile(path)
