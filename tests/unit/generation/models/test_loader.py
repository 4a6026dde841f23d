"""Checkpoints load in every form transformers writes, and whatever is wrong with one is named."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.native import use_native
from factories.models.paged import PagedDriver, PagedSequence
from penstock.common.errors import StartupError
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.devices.device_registry import open_device
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.weights import safetensors_folder
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def load(folder: Path, **options: object) -> CausalLM:
    return load_model(folder, device=CPUDevice(), **options)  # type: ignore[arg-type]


def logits(model: CausalLM) -> torch.Tensor:
    """Return the logits of a fixed prompt."""
    sequence = PagedSequence(list(range(5, 25)))
    PagedDriver(model, num_blocks=4, block_size=8).step([(sequence, 20)])
    return torch.stack(sequence.logits)


def edit(folder: Path, change: dict[str, torch.Tensor | None], file: str = WEIGHTS) -> None:
    """Replace, add or (None) drop tensors."""
    tensors: dict[str, torch.Tensor | None] = {**load_file(folder / file), **change}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / file)


def set_config(folder: Path, **fields: object) -> None:
    values = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(values))


def refused(folder: Path) -> str:
    with pytest.raises(StartupError) as caught:
        load(folder)
    assert caught.value.flag == "MODEL"
    return caught.value.message


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tiny_checkpoint(tmp_path, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def test_shards_and_a_single_file_give_the_same_model(tmp_path: Path) -> None:
    one = load(tiny_checkpoint(tmp_path / "one"))
    many = load(tiny_checkpoint(tmp_path / "many", max_shard_size="30KB"))
    assert torch.equal(logits(one), logits(many))


def test_the_model_says_what_it_is(single: Path) -> None:
    model = load(single)
    count = sum(tensor.numel() for tensor in load_file(single / WEIGHTS).values())
    assert model.config.num_parameters == count
    assert model.num_bytes == count * 4
    assert (model.config.architecture, model.config.dtype) == ("Qwen2ForCausalLM", "float32")
    assert model.dtype is torch.float32


def test_progress_rises_to_all_bytes_also_within_a_tensor(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_folder, "PIECE_BYTES", 500)
    seen: list[tuple[int, int]] = []
    load_model(
        sharded,
        device=CPUDevice(),
        progress=lambda done, total: seen.append((done, total)),
        map_embeddings=False,
    )
    assert seen == sorted(seen)
    done, total = seen[0]
    assert done < total / 2
    assert seen[-1] == (total, total)
    steps = [after - before for (before, _), (after, _) in itertools.pairwise(seen)]
    largest = max(tensor.nbytes for file in sharded.glob("*.safetensors") for tensor in load_file(file).values())
    assert max(steps) < largest / 4


def test_mapping_a_file_anew_while_it_is_read_changes_nothing(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = logits(load(single))
    monkeypatch.setattr(safetensors_folder, "RELEASE_BYTES", 1000)
    monkeypatch.setattr(safetensors_folder, "PIECE_BYTES", 500)
    assert torch.equal(logits(load(single)), before)


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", [QUERY, "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_number_that_no_quantised_weight_holds_names_its_tensor(
    tmp_path: Path, kernels: str, quantization: str, name: str, bad: float
) -> None:
    device = CPUDevice()
    if kernels == "native":
        use_native()
        device.instruction_set = "avx2"
    folder = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    weight = load_file(folder / WEIGHTS)[name]
    weight[3, 5] = bad
    edit(folder, {name: weight})
    with pytest.raises(StartupError, match=name) as caught:
        load_model(folder, device=device, quantization=quantization)
    assert caught.value.flag == "MODEL"
    assert load_model(folder, device=device).num_bytes > 0


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_model_survives_its_files_being_overwritten(tmp_path: Path, quantization: str) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    model = load(folder, quantization=quantization, map_embeddings=False)
    before = logits(model)
    with (tmp_path / WEIGHTS).open("r+b") as file:
        file.truncate(0)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(("stored", "expected"), [(torch.bfloat16, "bfloat16"), (torch.float32, "float32")])
def test_auto_is_the_checkpoints_dtype(tmp_path: Path, stored: torch.dtype, expected: str) -> None:
    assert load(tiny_checkpoint(tmp_path, dtype=stored)).config.dtype == expected


def test_auto_goes_by_the_tensors_when_the_config_does_not_say(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    set_config(folder, dtype=None)
    assert load(folder).config.dtype == "bfloat16"


def test_auto_float16_is_a_dtype_that_this_cpu_can_compute_fast(tmp_path: Path) -> None:
    model = load(tiny_checkpoint(tmp_path, dtype=torch.float16))
    assert model.config.dtype in ("float16", "bfloat16")
    assert logits(model).isfinite().all()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("fp32", "float32"), ("bfloat16", "bfloat16"), ("bf16", "bfloat16"), ("fp16", "float16"), ("float32", "float32")],
)
def test_a_dtype_asked_for_by_name_is_used(single: Path, asked: str, expected: str) -> None:
    model = load(single, dtype=asked)
    assert model.config.dtype == expected
    assert logits(model).isfinite().all()


def test_an_unknown_dtype_names_the_flag(single: Path) -> None:
    with pytest.raises(StartupError, match="--dtype") as caught:
        load(single, dtype="int8")
    assert caught.value.flag == "--dtype"


def test_tied_needs_no_lm_head(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    model = load(folder)
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    hidden = torch.randn(3, 48)
    torch.testing.assert_close(model.compute_logits(hidden), hidden @ embedding.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", ["both", "lm_head.weight"])
def test_tied_with_an_lm_head_tensor_is_the_same(tmp_path: Path, kept: str) -> None:
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    before = logits(load(folder))
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"].clone()
    edit(
        folder,
        {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding.clone() if kept == "both" else None},
    )
    assert torch.equal(logits(load(folder)), before)


def test_tied_tensors_that_differ_stay_two_and_it_is_said(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    before = logits(load(folder))
    set_config(folder, tie_word_embeddings=True)
    with capture_logs() as logs:
        assert torch.equal(logits(load(folder)), before)
    assert "differ" in logs[0]["event"]


def test_rotary_buffers_of_old_checkpoints_are_tolerated(single: Path) -> None:
    edit(single, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    assert logits(load(single)).isfinite().all()


def test_a_missing_tensor_is_named(single: Path) -> None:
    edit(single, {QUERY: None})
    assert f"{single} lacks tensor {QUERY}" in refused(single)


def test_many_missing_tensors_are_counted(single: Path) -> None:
    set_config(single, num_hidden_layers=3)
    set_config(single, layer_types=["full_attention"] * 3)
    message = refused(single)
    assert "model.layers.2.self_attn.q_proj.weight" in message
    assert "and 7 more" in message


def test_an_unexpected_tensor_is_named_with_its_file(single: Path) -> None:
    edit(single, {"model.layers.0.self_attn.o_proj.bias": torch.zeros(48)})
    assert f"{WEIGHTS} has unexpected tensor model.layers.0.self_attn.o_proj.bias" in refused(single)


def test_a_wrong_shape_is_named_with_what_was_expected(single: Path) -> None:
    edit(single, {QUERY: torch.zeros(48, 40)})
    expected = f"{single / WEIGHTS}: tensor {QUERY} has shape [48, 40], config.json asks for [48, 48]"
    assert expected in refused(single)


def test_an_unusable_number_format_is_named(single: Path) -> None:
    edit(single, {QUERY: torch.zeros(48, 48, dtype=torch.int8)})
    assert f"tensor {QUERY} is stored as I8" in refused(single)


def test_no_weights_at_all_is_said(single: Path) -> None:
    (single / WEIGHTS).unlink()
    assert f"has neither {WEIGHTS} nor {INDEX}" in refused(single)


@pytest.mark.parametrize("size", [0, 4, 100, 50_000])
def test_a_truncated_file_is_named(single: Path, size: int) -> None:
    with (single / WEIGHTS).open("r+b") as file:
        file.truncate(size)
    assert f"{single / WEIGHTS} is not a complete safetensors file" in refused(single)


def test_a_file_of_something_else_is_named(single: Path) -> None:
    (single / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n" * 10)
    assert f"{single / WEIGHTS} is not a complete safetensors file" in refused(single)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard} does not exist, but {INDEX} names it" in refused(sharded)


def test_a_shard_without_a_promised_tensor_is_named(sharded: Path) -> None:
    shard = json.loads((sharded / INDEX).read_text())["weight_map"][QUERY]
    edit(sharded, {QUERY: None}, shard)
    assert f"{sharded / shard} has no tensor {QUERY}" in refused(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {QUERY: "../other.safetensors"}}])
def test_a_broken_index_is_named(sharded: Path, index: dict[str, object]) -> None:
    (sharded / INDEX).write_text(json.dumps(index))
    assert INDEX in refused(sharded)


def test_devices_are_opened_by_name() -> None:
    assert open_device().name == open_device("cpu").name == "cpu"
    with pytest.raises(StartupError, match="--device"):
        open_device("abacus")


def test_the_cpu_takes_the_threads_it_is_given() -> None:
    device = open_device("cpu")
    device.start(num_threads=1, kernels="torch")
    assert torch.get_num_threads() == 1
    assert device.describe() == "cpu (1 thread)"
    assert 0 < device.memory().available <= device.memory().total
    with pytest.raises(StartupError, match="--threads"):
        device.start(num_threads=0)
    with pytest.raises(StartupError, match="--kernels"):
        device.start(kernels="fast")


@pytest.mark.parametrize(("kernels", "machine", "told"), [
    ("auto", "x86_64", True), ("auto", "aarch64", True), ("auto", "riscv64", False), ("torch", "x86_64", False),
])  # fmt: skip
def test_who_could_have_kernels_and_has_none_is_told(
    kernels: str, machine: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("penstock.generation.devices.cpu.system_folder", lambda: str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: machine)
    device = open_device("cpu")
    device.start(kernels=kernels)
    assert ("penstock build-kernels" in (device.advice() or "")) is told


def test_logits_are_float32_rows_over_the_vocabulary(single: Path) -> None:
    model = load(single, dtype="bf16")
    result = model.compute_logits(torch.randn(3, 48).bfloat16())
    assert (result.shape, result.dtype) == ((3, VOCAB_SIZE), torch.float32)
    assert model.compute_logits(torch.empty(0, 48).bfloat16()).shape == (0, VOCAB_SIZE)
