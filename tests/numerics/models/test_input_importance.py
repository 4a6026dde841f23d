"""The importance of inputs for int4: mean squares of what transformers' modules read, a rank's and an expert's too; and
kept in the cache."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from factories.models.checkpoints import reference_model, tiny_checkpoint
from factories.models.native import use_native
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.layers.linear.base import Linear
from penstock.generation.layers.linear.native import Format, NativeLinear, NativeLinearMethod
from penstock.generation.models import input_importance
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.importance_cache import kept
from penstock.generation.models.input_importance import measure_importance
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import checkpoint_weights, load_model, read_model_config
from penstock.generation.weights.sharding import Shard, own_inputs
from safetensors.torch import save_file
from torch import Tensor


def measured(folder: Path, device: CPUDevice | None = None) -> dict[str, Tensor]:
    """Return the importance by our layers in float32."""
    device = CPUDevice() if device is None else device
    config = read_model_config(folder)
    weights = checkpoint_weights(folder, config, device, "float32", "none", map_embeddings=False)
    return measure_importance(config, weights, device)


def by_transformers(folder: Path, modules: dict[str, str]) -> dict[str, Tensor]:
    """Return the mean squares of the inputs of transformers' modules, `modules` by our names."""
    model = reference_model(folder)
    found: dict[str, list[Tensor]] = {name: [] for name in modules}

    def record(name: str, _module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found[name].append(inputs[0].flatten(0, -2))

    for name, module in modules.items():
        model.get_submodule(module).register_forward_pre_hook(partial(record, name))
    random = torch.Generator().manual_seed(35)
    ids = torch.randint(model.config.vocab_size, (512,), generator=random).view(2, 256)
    with torch.inference_mode():
        model(ids)
    return {name: torch.cat(rows).square().mean(0) for name, rows in found.items()}


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_importance_is_the_mean_square_of_what_a_matrix_reads(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    found = measured(folder)
    layers = range(read_model_config(folder).num_layers)
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert list(found) == [f"model.layers.{layer}.{name}" for layer in layers for name in names]
    theirs = {name: name.replace("qkv", "q").replace("gate_up", "gate") for name in found}
    for name, expected in by_transformers(folder, theirs).items():
        torch.testing.assert_close(found[name], expected, rtol=2e-3, atol=1e-6)


def test_experts_that_few_rows_reach_have_the_inputs_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(tmp_path, "mixtral")
    experts = read_model_config(folder).experts
    assert experts is not None
    downs = [f"model.layers.0.{experts.module}.experts.{number}.down_proj" for number in range(experts.count)]
    own = measured(folder)
    assert not torch.equal(own[downs[0]], own[downs[1]])
    monkeypatch.setattr(input_importance, "_LEAST_ROWS", 1 << 20)
    shared = measured(folder)
    for name in downs[1:]:
        torch.testing.assert_close(shared[name], shared[downs[0]])
    assert not torch.equal(shared[downs[0]], own[downs[0]])


def test_a_rank_has_the_importance_of_its_own_inputs(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    config, found = read_model_config(folder), measured(folder)
    parts = [own_inputs(found, config, Shard(rank, 2)) for rank in range(2)]
    for name in found:
        whole = found[name]
        if name.endswith(("o_proj", "down_proj")):
            assert torch.equal(torch.cat([part[name] for part in parts]), whole)
        else:
            assert all(torch.equal(part[name], whole) for part in parts)


@pytest.mark.parametrize("spoilt", [{}, {"model.layers.0.self_attn.o_proj": torch.ones(())}])
def test_a_rank_takes_what_another_program_has_left_in_the_cache(spoilt: dict[str, Tensor], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    found = own_inputs(spoilt, read_model_config(folder), Shard(1, 2))
    assert all(value.dim() == 1 for value in found.values())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "importance"


def packed_linears(model: LanguageModel) -> list[Linear]:
    assert isinstance(model, CausalLM)
    return [linear for layer in model.layers for linear in layer.quantisable]


class _NativeCPU(CPUDevice):
    """The CPU with the kernels that the test loaded."""

    def __init__(self) -> None:
        super().__init__()
        use_native()
        self.instruction_set = torch.ops.penstock.instruction_set("")


def test_int4_is_packed_by_the_importance(tmp_path: Path, cache: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", num_hidden_layers=1)
    model = load_model(folder, dtype="float32", quantization="int4", device=_NativeCPU())
    importance = measured(folder)

    class Weighed:
        def __init__(self, weight: Tensor, own: Tensor | None) -> None:
            self.shape, self.dtype, self.importance = (weight.shape[0], weight.shape[1]), weight.dtype, own
            self.weight = weight

        def pieces(self) -> list[Tensor]:
            return [self.weight]

        def joined(self) -> Tensor:
            return self.weight

    weight = reference_model(folder).get_submodule("model.layers.0.mlp.down_proj").weight.detach()
    down = packed_linears(model)[3]
    assert isinstance(down, NativeLinear)
    own = importance["model.layers.0.mlp.down_proj"]
    method = NativeLinearMethod(Format.INT4)
    same, other = (method.linear(Weighed(weight, one), None) for one in (own, None))  # type: ignore[arg-type]
    x = torch.randn(3, weight.shape[1])
    assert torch.equal(down(x), same(x))
    assert not torch.equal(down(x), other(x))
    assert len(list(cache.glob("*.safetensors"))) == 1


@pytest.mark.parametrize("make", [CPUDevice, _NativeCPU])
def test_a_later_start_measures_nothing(
    make: Callable[[], CPUDevice], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    first = load_model(folder, dtype="float32", quantization="int4", device=make())

    def fail(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("penstock.generation.models.registry.measure_importance", fail)
    second = load_model(folder, dtype="float32", quantization="int4", device=make())
    x = torch.randn(3, first.config.hidden_size)
    assert torch.equal(packed_linears(first)[0](x), packed_linears(second)[0](x))
    for quantization in ("none", "int8"):
        load_model(folder, dtype="float32", quantization=quantization, device=make())
    # Other weights under the same name.
    path = next(folder.glob("*.safetensors"))
    os.utime(path, ns=(1, 1))
    with pytest.raises(AssertionError, match="measured again"):
        load_model(folder, dtype="float32", quantization="int4", device=make())


@pytest.mark.parametrize(
    "spoilt", [torch.full((64,), torch.nan), torch.full((64,), -1.0), torch.ones(63), torch.ones(64).half()]
)
def test_importance_that_cannot_be_is_not_used(spoilt: Tensor, tmp_path: Path, cache: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", num_hidden_layers=1, hidden_size=64)
    first = load_model(folder, dtype="float32", quantization="int4", device=_NativeCPU())
    assert first.config.hidden_size == 64
    path = next(cache.glob("*.safetensors"))
    save_file({"model.layers.0.self_attn.qkv_proj": spoilt}, path)
    model = load_model(folder, dtype="float32", quantization="int4", device=_NativeCPU())
    path.unlink()
    save_file({}, path)
    alike = load_model(folder, dtype="float32", quantization="int4", device=_NativeCPU())
    x = torch.randn(3, 64)
    assert torch.equal(packed_linears(model)[0](x), packed_linears(alike)[0](x))


def test_a_cache_that_cannot_be_used_is_no_error(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    found = {"a": torch.ones(3)}
    file = tmp_path / "file"
    file.write_text("not a folder")
    assert kept(folder, file, torch.float32, lambda: found) is found
    cache = tmp_path / "cache"
    assert kept(folder, cache, torch.float32, lambda: found) is found
    next(cache.glob("*.safetensors")).write_bytes(b"damaged")
    # As in a hub's cache that has lost a file.
    (folder / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert kept(folder, cache, torch.float32, lambda: found) is found
    assert torch.equal(kept(folder, cache, torch.float32, dict)["a"], found["a"])
    assert not list(cache.glob("tmp*"))
    # Another dtype has other numbers.
    assert kept(folder, cache, torch.bfloat16, dict) == {}


def test_a_full_disk_is_no_error(tmp_path: Path) -> None:
    folder, found = tiny_checkpoint(tmp_path / "model"), {"a": torch.ones(1 << 12)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # Of a file: a write beyond it fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
        assert kept(folder, tmp_path / "cache", torch.float32, lambda: found) is found
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list((tmp_path / "cache").iterdir())


def test_the_progress_of_a_start_never_goes_back_while_importance_is_measured(tmp_path: Path, cache: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    shown: list[tuple[int, int]] = []
    load_model(
        folder,
        dtype="float32",
        quantization="int4",
        device=CPUDevice(),
        progress=lambda done, total: shown.append((done, total)),
    )
    assert len(list(cache.glob("*.safetensors"))) == 1
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)
    assert shown[-1][0] == shown[-1][1] > 0
