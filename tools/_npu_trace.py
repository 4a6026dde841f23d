"""Models of this package on fake tensors of npu:0, through the operators and meta functions of an imported torch-npu.

Run by tools/npu_wheel.py, which sees to it that `import torch_npu` works without CANN. Prints every operator of the
namespace npu that was called, with its results. Exit code 1: a schema is not the pinned one, an operator that is
expected was not called, a result has another shape, dtype or device than it must, or graphs have another interface
than devices/npu_graphs.py uses.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.model_config import Activation, ConfigReader, ModelConfig
from penstock.generation.devices.npu import NPUDevice
from penstock.generation.layers.linear import int8, npu_products
from penstock.generation.models.loader import build_model
from penstock.generation.models.registry import FAMILIES
from penstock.generation.weights.tensor_names import LayerLinear, tensor_shapes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

PINNED = Path(__file__).parents[1] / "tests" / "data" / "npu_schemas.json"
# Norms of heads in one, a window in the other, heads of two sizes that the attention takes.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": True},
    "mistral": {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "sliding_window": 128},
}
FORMATS = [
    (torch.bfloat16, "none"),
    (torch.float16, "none"),
    (torch.bfloat16, "int8"),
    (torch.float16, "int8"),
    (torch.bfloat16, "int4"),
    (torch.float16, "int4"),
]
EXPECTED = {
    *("npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache", "npu_rms_norm", "npu_add_rms_norm"),
    *("npu_rotary_mul", "npu_swiglu", "npu_dynamic_quant", "npu_quant_matmul", "npu_weight_quant_batchmatmul"),
    "npu_convert_weight_to_int4pack",
}
VOCAB, HIDDEN = 70_000, 512


class Calls(TorchDispatchMode):
    """Every call of an operator of the namespace npu, with the first results of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.results: dict[str, str] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace == "npu":
            name = func._opname
            self.counts[name] += 1
            parts = found if isinstance(found, tuple) else (found,)
            text = ", ".join(
                f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}"
                for one in parts
                if isinstance(one, torch.Tensor)
            )
            self.results.setdefault(name, text or "in place")
        return found


class FakeWeights:
    """loader.Weights without numbers, on the device."""

    num_bytes = 0
    mapped_bytes = 0
    forms: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, config: ModelConfig, device: NPUDevice, dtype: torch.dtype, quantization: str) -> None:
        self.dtype = dtype
        self._shapes = tensor_shapes(config)
        self._config = config
        self._device = device
        self._method = device.linear_method(dtype, quantization)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self._device.torch_device)

    def head_and_table(self) -> Any:
        table = self._empty(self._config.vocab_size, self._config.hidden_size)
        return self._method.head(self._empty(self._config.vocab_size, self._config.hidden_size)), table

    def linear(self, prefix: str, linear: LayerLinear, activation: Activation = Activation.SILU) -> Any:
        weight = self._empty(*linear.shape)
        bias = self._empty(linear.shape[0]) if linear.has_bias else None
        if linear.gated:
            return self._method.gated(weight, bias, self._device.layer_kernels(self.dtype), activation)
        return self._method.linear(weight, bias)

    def tensor(self, name: str, *, is_exact: bool = False) -> torch.Tensor:
        return self._empty(*self._shapes[name])

    def layer_is_complete(self) -> None:
        pass


def config_of(family: str) -> ModelConfig:
    """Return a small configuration of a family, of two layers."""
    values = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **MODELS[family],
    }
    return FAMILIES[family].model_config(ConfigReader(values, "config"), ConfigReader({}, "generation"))


def run(family: str, dtype: torch.dtype, quantization: str) -> None:
    """Run a mixed step: a prompt, a decoding sequence and a chunk. Raises AssertionError."""
    config, device = config_of(family), NPUDevice(0)
    weights = FakeWeights(config, device, dtype, quantization)
    model = build_model(config, weights, device)
    place, size = device.torch_device, device.block_size(None)
    kv = KVCachePool(2, 16, size, config.num_kv_heads, config.head_dim, dtype, place)
    query_lens, kv_lens = [150, 1, 5], [150, 300, 200]
    rows = sum(query_lens)

    def empty(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=place)

    metadata = AttentionMetadata(
        empty(4), empty(3), empty(3, 3), empty(rows, kind=torch.int64), query_lens, kv_lens, max(kv_lens)
    )
    ids, positions = empty(rows, kind=torch.int64), empty(rows, kind=torch.int64)
    hidden = model.forward(ids, positions, metadata, kv)
    logits = model.compute_logits(hidden[:3])
    assert (hidden.shape, hidden.dtype, hidden.device) == ((rows, HIDDEN), dtype, place), hidden
    assert (logits.shape, logits.dtype, logits.device) == ((3, VOCAB), torch.float32, place), logits


def missing_for_graphs() -> list[str]:
    """Return what devices/npu_graphs.py uses and this wheel does not have."""
    npu: Any = torch.npu  # type: ignore[attr-defined]
    parameters = {"pool", "auto_dispatch_capture", "capture_error_mode"}
    missing = sorted(parameters - inspect.signature(npu.graph).parameters.keys())
    missing += [name for name in ("graph_pool_handle", "current_stream", "stream", "Stream") if not hasattr(npu, name)]
    missing += [f"NPUGraph.{name}" for name in ("update", "replay") if not hasattr(npu.NPUGraph, name)]
    handlers: Any = import_module("torch_npu.npu._npugraph_handlers.npugraph_handler")._NPU_GRAPH_OP_HANDLERS
    operator, lengths = "npu_fused_infer_attention_score.default", "actual_seq_lengths_kv"
    specs = handlers[operator].get_update_specs(operator) if operator in handlers else []
    return [*missing, *([] if lengths in [key for *_, key in specs] else [f"an update of {operator}'s {lengths}"])]


def packed_without_numbers(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """Result of npu_convert_weight_to_int4pack, for which the wheel has no meta function, as it is documented."""
    return weight.new_empty(weight.shape[0], weight.shape[1] // 8)


def main() -> int:
    """Compare schemas, run the models, print the calls."""
    torch_npu: Any = import_module("torch_npu")
    print(f"torch {torch.__version__}, torch-npu {torch_npu.__version__}, device {torch.npu.get_device_name(0)}")  # type: ignore[attr-defined]
    pinned: dict[str, str] = json.loads(PINNED.read_text(encoding="utf-8"))["schemas"]
    wrong = [
        f"{name}: {getattr(torch.ops.npu, name).default._schema}"
        for name, schema in pinned.items()
        # The wheel's tables say self, and what it registers says input.
        if str(getattr(torch.ops.npu, name).default._schema)
        != str(torch._C.parse_schema(f"npu::{schema.replace('(Tensor self', '(Tensor input')}"))
    ]
    print(f"{len(pinned) - len(wrong)} of {len(pinned)} registered schemas are the pinned ones {wrong or ''}")
    group = NPUDevice(0).process_group(torch.distributed.HashStore(), 0, 2, timedelta(minutes=1))
    print(f"process group of two ranks: {type(group).__name__}")
    for_graphs = missing_for_graphs()
    print(f"graphs lack {', '.join(for_graphs) or 'nothing'}")
    torch.library.register_fake("npu::npu_convert_weight_to_int4pack", packed_without_numbers)
    # A fake tensor has no numbers to look at.
    int8.check_finite = npu_products.check_finite = lambda scale: None  # type: ignore[assignment]
    every: Counter[str] = Counter()
    results: dict[str, str] = {}
    for family in MODELS:
        for dtype, quantization in FORMATS:
            with FakeTensorMode(), Calls() as calls:
                run(family, dtype, quantization)
            every += calls.counts
            results = {**calls.results, **results}
            print(f"{family} {str(dtype).removeprefix('torch.')} {quantization}: {calls.counts.total()} calls")
    for name, count in sorted(every.items()):
        print(f"{count:5} {name}: {results[name]}")
    missing, further = EXPECTED - every.keys(), every.keys() - EXPECTED
    print(f"not called: {sorted(missing) or 'none'}; beside these: {sorted(further) or 'none'}")
    return 1 if wrong or for_graphs or missing or further else 0


if __name__ == "__main__":
    sys.exit(main())
