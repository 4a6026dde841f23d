"""`penstock quantize`: what it writes means what it says, wherever a run was stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models.byte_tokenizer import save_byte_tokenizer
from factories.models.checkpoints import reference_model, tiny_checkpoint
from factories.models.native import use_native
from factories.models.paged import PagedDriver, PagedSequence
from penstock.common.errors import StartupError
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.registry import load_model
from penstock.generation.quantise.layer_stream import LayerStream
from penstock.generation.quantise.output_folder import STATE_FILE, OutputFolder, Packing, packed_words
from penstock.generation.quantise.quantiser import QuantiseSettings, calibration_documents, calibration_text, quantise
from penstock.generation.weights.quantised.base import unpacked
from penstock.generation.weights.safetensors_folder import Checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

PROMPT = list(range(5, 45))
SETTINGS = QuantiseSettings(group=32, tokens=640, context=64)
# Families with attention, norms and masks of their own.
FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"]
SHAPE = {"hidden_size": 64, "intermediate_size": 128}


def source(folder: Path, family: str = "llama", **config: Any) -> Path:
    """A tiny checkpoint with a tokenizer of bytes."""
    tiny_checkpoint(folder, family, dtype=torch.bfloat16, **SHAPE, **config)
    save_byte_tokenizer(folder)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("model-*")) for name, value in load_file(file).items()}


def served(folder: Path) -> Tensor:
    """Logits of the service's model in float32, with the numbers that the files mean."""
    model = load_model(folder, dtype="float32", quantization="none", device=CPUDevice())
    sequence = PagedSequence(list(PROMPT))
    PagedDriver(model, num_blocks=16, block_size=8).step([(sequence, len(PROMPT))])
    return torch.stack(sequence.logits)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_the_model_with_its_matrices_rounded(tmp_path: Path, family: str) -> None:
    folder = source(tmp_path / "source", family)
    seen: list[tuple[int, int]] = []
    made = quantise(folder, tmp_path / "out", SETTINGS, progress=lambda done, total: seen.append((done, total)))
    written = tensors(tmp_path / "out")
    modules = [name.removesuffix(".weight_packed") for name in written if name.endswith("weight_packed")]
    assert made.matrices == len(modules)
    assert made.bits == pytest.approx(4.625)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    reference = reference_model(folder, torch.float32)
    with torch.no_grad():
        for module in modules:
            dense = Packing(32).dense(written, module)
            weight = reference.get_submodule(module).weight
            assert float((dense - weight).square().mean() / weight.square().mean()) < 0.05
            weight.copy_(dense)
        expected = reference(torch.tensor([PROMPT])).logits[0]
    # One of phi3's has a width that groups do not divide.
    ignored = set(json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"])
    plain = {name.removesuffix(".weight") for name in written if name.endswith("_proj.weight")}
    assert plain == ignored - {"lm_head"}
    assert float((served(tmp_path / "out") - expected).abs().mean() / expected.std()) < 2e-3
    # Of the outputs' energy on the calibration text, a few thousandths.
    assert made.loss < 0.01


def test_without_zeros_it_is_a_symmetric_checkpoint(tmp_path: Path) -> None:
    folder = source(tmp_path / "source")
    made = quantise(folder, tmp_path / "out", replace(SETTINGS, has_zeros=False))
    written = tensors(tmp_path / "out")
    assert made.bits == pytest.approx(4.5)
    assert not {name for name in written if name.endswith("zero_point")}
    model = load_model(tmp_path / "out", dtype="bfloat16", quantization="auto", device=CPUDevice())
    assert dict(model.config.weight_forms)["int4"] == made.matrices
    reference = reference_model(folder, torch.float32)
    modules = [name.removesuffix(".weight_packed") for name in written if name.endswith("weight_packed")]
    with torch.no_grad():
        for module in modules:
            reference.get_submodule(module).weight.copy_(Packing(32, has_zeros=False).dense(written, module))
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert float((served(tmp_path / "out") - expected).abs().mean() / expected.std()) < 2e-3


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_bits_that_are_left_go_to_some_matrices_as_smaller_groups_or_as_eight(tmp_path: Path, family: str) -> None:
    folder = source(tmp_path / "source", family)
    seen: list[tuple[int, int]] = []
    settings = replace(SETTINGS, group=64, most_bits=5.5)
    made = quantise(folder, tmp_path / "out", settings, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    written = tensors(tmp_path / "out")
    modules = [name.removesuffix(".weight_packed") for name in written if name.endswith("weight_packed")]
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    forms = {
        name: Packing(group["weights"]["group_size"], not group["weights"]["symmetric"], group["weights"]["num_bits"])
        for group in groups.values()
        for name in group["targets"]
    }
    assert forms.keys() == set(modules)
    assert {(4, 32), (8, 64)} <= {(form.num_bits, form.group) for form in forms.values()}
    reference = reference_model(folder, torch.float32)
    sizes = {name: reference.get_submodule(name).weight.numel() for name in modules}
    assert made.bits == pytest.approx(sum(sizes[name] * forms[name].bits for name in modules) / sum(sizes.values()))
    assert 5.2 < made.bits <= 5.5
    # Readers join them to one product.
    for joined in ("qkv", ("gate", "up")):
        assert all(
            len({forms[name] for name in modules if name.split(".")[2] == layer and name.split(".")[-1][:-5] in joined})
            == 1
            for layer in "01"
        )
    with torch.no_grad():
        for module in modules:
            weight = reference.get_submodule(module).weight
            dense = forms[module].dense(written, module)
            error = float((dense - weight).square().mean() / weight.square().mean())
            assert error < (0.05 if forms[module].num_bits == 4 else 2e-4)
            weight.copy_(dense)
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert float((served(tmp_path / "out") - expected).abs().mean() / expected.std()) < 2e-3
    whole = quantise(folder, tmp_path / "all-4", replace(SETTINGS, group=64))
    assert made.loss < whole.loss


def test_eight_bits_stay_eight_bits_on_the_kernels(tmp_path: Path) -> None:
    use_native()
    folder = source(tmp_path / "source")
    # A group so small that its scale would be no number of float16.
    values = load_file(folder / "model.safetensors")
    values["model.layers.0.self_attn.o_proj.weight"][3] *= 1e-6
    save_file(values, folder / "model.safetensors")
    made = quantise(folder, tmp_path / "out", replace(SETTINGS, most_bits=8.5))
    assert made.bits == pytest.approx(8.5)
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    model = load_model(tmp_path / "out", dtype="bfloat16", quantization="auto", device=device)
    # Of a layer q, k and v, o, gate and up, down.
    assert dict(model.config.weight_forms) == {"q8_0": made.matrices}


def test_fewer_bits_than_four_with_scales_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^--bits 4\.5: matrices of 4 bits take 4\.62 .*--group-size") as found:
        quantise(source(tmp_path / "source"), tmp_path / "out", replace(SETTINGS, most_bits=4.5))
    assert found.value.flag == "--bits"
    assert not (tmp_path / "out").exists()


def test_the_first_pass_is_that_of_the_whole_model(tmp_path: Path) -> None:
    """States behind the last layer, before anything is rounded."""
    folder = source(tmp_path / "source", "gemma3_text")
    documents = torch.tensor([PROMPT, PROMPT[::-1]])
    reference = reference_model(folder, torch.float32)
    with torch.inference_mode():
        stream = LayerStream(folder, Checkpoint(folder), documents)
        for index in range(len(stream.layers)):
            stream.load(index)
            stream.advance(index, lambda done: None)
            stream.unload(index)
        expected = reference.model(documents, output_hidden_states=True)
        norm = reference.model.norm
        assert torch.allclose(norm(stream.states), expected.last_hidden_state, atol=1e-4)


@pytest.mark.parametrize("most_bits", [None, 5.5])
def test_a_run_that_was_stopped_goes_on_to_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bits: float | None
) -> None:
    folder, settings = source(tmp_path / "source", num_hidden_layers=4), replace(SETTINGS, most_bits=most_bits)
    quantise(folder, tmp_path / "whole", settings)
    write, written = OutputFolder.write_layer, []

    def stopping(self: OutputFolder, index: int, layer: dict[str, Tensor]) -> None:
        if index == 2 and not written.count(2):
            written.append(index)
            raise KeyboardInterrupt
        written.append(index)
        write(self, index, layer)

    monkeypatch.setattr(OutputFolder, "write_layer", stopping)
    with pytest.raises(KeyboardInterrupt):
        quantise(folder, tmp_path / "stopped", settings)
    assert (tmp_path / "stopped" / STATE_FILE).is_file()
    with pytest.raises(StartupError, match=r"has no config\.json|lacks|does not exist"):
        load_model(tmp_path / "stopped", dtype="float32", quantization="none", device=CPUDevice())
    quantise(folder, tmp_path / "stopped", settings)
    assert written == [0, 1, 2, 2, 3]
    one, other = tensors(tmp_path / "whole"), tensors(tmp_path / "stopped")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not list((tmp_path / "stopped").glob(".*"))


def test_files_are_as_readable_as_others_of_this_user(tmp_path: Path) -> None:
    folder, plain = source(tmp_path / "source"), tmp_path / "plain"
    plain.touch()
    quantise(folder, tmp_path / "out", SETTINGS)
    assert {file.stat().st_mode for file in (tmp_path / "out").glob("model-*")} == {plain.stat().st_mode}


def test_an_unfinished_run_with_other_settings_is_not_mixed_with_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = source(tmp_path / "source")

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "write_rest", stopped)
        with pytest.raises(KeyboardInterrupt):
            quantise(folder, tmp_path / "out", SETTINGS)
    other = QuantiseSettings(group=64, tokens=640, context=64)
    with pytest.raises(StartupError, match="unfinished run with another MODEL, text or option"):
        quantise(folder, tmp_path / "out", other)
    assert quantise(folder, tmp_path / "out", other, force=True).bits == pytest.approx(4.3125)
    with pytest.raises(StartupError, match="is not empty: --force"):
        quantise(folder, tmp_path / "out", other)


@pytest.mark.parametrize(
    ("family", "config", "told"),
    [
        ("mixtral", {}, "has experts"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised or packed already"),
    ],
)
def test_models_that_it_does_not_take_are_named(tmp_path: Path, family: str, config: dict[str, Any], told: str) -> None:
    folder = source(tmp_path / "source", family)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    with pytest.raises(StartupError, match=told):
        quantise(folder, tmp_path / "out", SETTINGS)


def test_matrices_of_other_widths_stay_as_they_are(tmp_path: Path) -> None:
    folder = source(tmp_path / "source", num_hidden_layers=2)
    shutil.rmtree(folder)
    tiny_checkpoint(folder, "llama", num_hidden_layers=2, hidden_size=64, intermediate_size=112)
    source_tokenizer = source(tmp_path / "other")
    shutil.copy(source_tokenizer / "tokenizer.json", folder)
    made = quantise(folder, tmp_path / "out", SETTINGS)
    assert made.matrices == 2 * 6
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert [name for name in ignored if name != "lm_head"] == [f"model.layers.{n}.mlp.down_proj" for n in range(2)]
    assert served(tmp_path / "out").isfinite().all()


def test_the_text_that_ships_fills_the_default_run(tmp_path: Path) -> None:
    folder = source(tmp_path / "source")
    text = calibration_text(None)
    assert len(text) > 80_000
    documents = calibration_documents(folder, text, QuantiseSettings())
    assert documents.shape == (QuantiseSettings().tokens // QuantiseSettings().context, QuantiseSettings().context)


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"short", "the text has 5 tokens, less than a document of --calibration-context "), (b"\xff\xfe", "not UTF-8")],
)
def test_a_text_that_does_not_do_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    folder, file = source(tmp_path / "source"), tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(StartupError, match=told):
        quantise(folder, tmp_path / "out", QuantiseSettings(calibration=file))
    assert not (tmp_path / "out").exists()


def test_a_limit_that_leaves_no_document_is_named(tmp_path: Path) -> None:
    folder = source(tmp_path / "source")
    with pytest.raises(StartupError, match=r"^--calibration-tokens: 64 tokens.*--calibration-context 65$") as found:
        quantise(folder, tmp_path / "out", QuantiseSettings(tokens=64, context=65))
    assert found.value.flag == "--calibration-tokens"


@pytest.mark.parametrize("name", ["model.safetensors", "penstock.safetensors", "model.gguf"])
def test_force_replaces_a_model_that_readers_would_prefer(tmp_path: Path, name: str) -> None:
    folder, out = source(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(b"an earlier model")
    (out / "notes.txt").write_text("the user's")
    quantise(folder, out, SETTINGS, force=True)
    assert (out / "notes.txt").exists()
    assert served(out).isfinite().all()


def test_a_tokenizer_of_another_model_is_named(tmp_path: Path) -> None:
    folder = source(tmp_path / "source", vocab_size=40)
    with pytest.raises(StartupError, match=r"^MODEL: tokenizer\.json gives id \d+, and the embedding has 40 rows"):
        quantise(folder, tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out").exists()


def test_words_are_filled_from_the_lowest_number() -> None:
    whole = torch.arange(20, dtype=torch.uint8).remainder(16)[None]
    words = packed_words(whole)
    assert words.dtype == torch.int32
    assert words[0, 0].item() == 0x76543210
    assert torch.equal(unpacked(words, 4)[:, :20], whole)
    octets = torch.arange(100, 106, dtype=torch.uint8)[None]
    words = packed_words(octets, 8)
    assert words.dtype == torch.int32
    assert words[0, 0].item() == 0x67666564
    assert torch.equal(unpacked(words, 8)[:, :6], octets)
