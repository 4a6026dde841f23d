"""The best that this machine can do: a probe of memory and multiplication, and the ideal time of a workload.

    python -m benchmarks roofline [--threads 2] [--seconds 4]

Bandwidth is the best of several readers over 1 GiB, many times the last cache: numpy's reductions, a thread for each
part, and oneDNN's product of one row with a prepacked bf16 matrix. The peak of multiplication is oneDNN's prepacked
product of 256 rows with [9728, 1792] matrices. Where oneDNN packs no bf16 (CPUs without AVX-512), that row is of fp32,
and the peak of bf16 is that of fp32, which its numbers become before they are multiplied. Every figure is the best of
its repeats: a machine's limit is what it reached, and the shares given with it are then a little low rather than
flattering.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._report import Report
from benchmarks.cells import Workload

GIB = 1 << 30
ROWS, OUT, IN = 256, 9728, 1792
# Types with layers that the sizes of a config.json do not tell of.
_OTHER_LAYERS = frozenset({"qwen3_5_text", "deepseek_v2", "gemma4_text", "gpt_oss"})
# Parts of names of tensors that no row is multiplied with in a layer.
_NOT_MULTIPLIED = ("embed_tokens", "lm_head", "conv1d")
BYTES_PER_WEIGHT = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True)
class Machine:
    """Bytes a second read, and multiply-add operations a second (two for each pair) by number format."""

    bandwidth: float
    peaks: dict[str, float]

    def peak(self, dtype: str) -> float:
        """Return the peak for a weight format; 4-bit weights are multiplied as 8-bit ones at best."""
        return self.peaks["int8" if dtype == "int4" else dtype]


@dataclass(frozen=True)
class Model:
    """Sizes that bytes and operations follow from."""

    body: int
    head: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def read(cls, folder: Path) -> Model:
        """Read config.json (Llama, Qwen2 and kin). Of a mixture of experts only those of one row count. Of layers of
        other kinds the numbers are counted in the files."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        vocab = config["vocab_size"]
        if config.get("model_type") in _OTHER_LAYERS:
            kinds = config.get("layer_types") or ["full_attention"] * layers
            attending = sum(kind != "linear_attention" for kind in kinds)
            if (rank := config.get("kv_lora_rank")) is not None:
                # Keys and values of a token are one row together.
                kv_heads, head_dim = 1, (rank + config["qk_rope_head_dim"]) // 2
            return cls(_counted(folder, config), vocab * hidden, attending, heads, kv_heads, head_dim, vocab)
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        inner = config["intermediate_size"]
        if experts := config.get("num_experts_per_tok"):
            inner = experts * (config.get("moe_intermediate_size") or inner)
        mlp = 3 * hidden * inner
        return cls(layers * (attention + mlp), vocab * hidden, layers, heads, kv_heads, head_dim, vocab)

    @property
    def parameters(self) -> int:
        """Numbers of the matrices, the embedding counted once."""
        return self.body + self.head

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token, in bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def attention_operations(self, rows: int, before: int) -> float:
        """Return the operations of attention for `rows` tokens that follow `before`: scores and their product with the
        values."""
        pairs = rows * before + rows * (rows + 1) / 2
        return 4.0 * self.layers * self.heads * self.head_dim * pairs


def _counted(folder: Path, config: dict[str, Any]) -> int:
    """Return the numbers of the layers' matrices that a row is multiplied with."""
    experts = next((config[name] for name in ("n_routed_experts", "num_local_experts") if config.get(name)), 0)
    total = 0.0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, one in header.items():
            shape = one.get("shape", ())
            if len(shape) < 2 or any(part in name for part in _NOT_MULTIPLIED):
                continue
            chosen = config["num_experts_per_tok"] / experts if ".experts." in name and experts else 1.0
            total += chosen * math.prod(shape)
    return round(total)


@dataclass(frozen=True)
class Ideal:
    """Seconds that a workload takes at the machine's limits: all prompts first, then a step for every further token."""

    prefill: float
    decode: float

    def shares(self, figures: dict[str, float]) -> dict[str, float]:
        """Return shares of the limit: in the time to the last first token, in the time after it, and in the whole."""
        wall, first = figures["wall_s"], figures["last_ttft_s"]
        return {
            "prefill": self.prefill / first,
            "decode": self.decode / (wall - first) if wall > first else 0.0,
            "total": (self.prefill + self.decode) / wall,
        }


def ideal(workload: Workload, model: Model, machine: Machine, dtype: str) -> Ideal:
    """A step takes what its weights and keys and values take to read, or its operations to do, whichever is more.

    A common prefix is computed once. Attention counts in bf16 operations.
    """
    weights = (model.body + model.head) * BYTES_PER_WEIGHT[dtype]
    peak, attention_peak = machine.peak(dtype), machine.peak("bf16")
    tokens = workload.common + sum(prompt - workload.common for prompt, _ in workload.lengths)
    attention = model.attention_operations(workload.common, 0) + sum(
        model.attention_operations(prompt - workload.common, workload.common) for prompt, _ in workload.lengths
    )
    operations = 2.0 * (model.body * tokens + model.head * len(workload.lengths))
    prefill = max(weights / machine.bandwidth, operations / peak + attention / attention_peak)
    decode = 0.0
    for step in range(1, max(workload.outputs)):
        contexts = [prompt + step for prompt, output in workload.lengths if output > step]
        rows = len(contexts)
        reading = (weights + model.kv_bytes * sum(contexts)) / machine.bandwidth
        decode += max(reading, 2.0 * (model.body + model.head) * rows / peak)
    return Ideal(prefill, decode)


def _best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest call, of as many as fit into `seconds` and two at least."""
    call()
    fastest, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        fastest = min(fastest, now - start)
        if now > end:
            return fastest


def _map(pool: ThreadPoolExecutor, call: Callable[[Any], object], parts: list[Any]) -> None:
    for _ in pool.map(call, parts):
        pass


def _bandwidths(threads: int, seconds: float) -> dict[str, float]:
    import numpy
    import torch
    from penstock.generation.host.cpu_features import packing_obstacle

    parts = numpy.array_split(numpy.ones(GIB // 8, dtype=numpy.int64), threads)
    found = {}
    with ThreadPoolExecutor(threads) as pool:
        for reduction in (numpy.bitwise_or, numpy.maximum):
            read = partial(_map, pool, reduction.reduce, parts)
            found[f"numpy.{reduction.__name__}"] = GIB / _best(read, seconds)
    name, dtype = ("bf16", torch.bfloat16) if packing_obstacle(torch.bfloat16) is None else ("fp32", torch.float32)
    matrix = torch.ones(GIB // dtype.itemsize // 4096, 4096, dtype=dtype)
    row = torch.ones(1, 4096, dtype=dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, 1)
    del matrix
    product = torch.ops.mkldnn._linear_pointwise
    found[f"oneDNN {name}, 1 row"] = GIB / _best(lambda: product(row, packed, None, "none", [], ""), seconds)
    return found


def _peaks(seconds: float) -> dict[str, float]:
    import torch
    from penstock.generation.host.cpu_features import packing_obstacle

    operations, peaks = 2.0 * ROWS * OUT * IN, {}
    product = torch.ops.mkldnn._linear_pointwise
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        if packing_obstacle(dtype) is not None:
            continue
        rows = torch.randn(ROWS, IN).to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(OUT, IN).to(dtype), ROWS)
        peaks[name] = operations / _best(partial(product, rows, packed, None, "none", [], ""), seconds)
    peaks.setdefault("bf16", peaks["fp32"])
    peaks["int8"] = operations / _best(_int8_product(), seconds)
    return peaks


def _int8_product() -> Callable[[], object]:
    import torch
    from penstock.generation.host.cpu_features import packing_obstacle

    rows = torch.randint(0, 255, (ROWS, IN), dtype=torch.uint8)
    weight = torch.randint(-127, 127, (OUT, IN), dtype=torch.int8)
    scales, zeros = torch.full((OUT,), 0.01), torch.zeros(OUT, dtype=torch.int64)
    packed = torch.ops.onednn.qlinear_prepack(weight, [ROWS, IN])
    multiply = torch.ops.onednn.qlinear_pointwise
    # Without bf16 of its own oneDNN takes minutes for a result in it.
    result = torch.bfloat16 if packing_obstacle(torch.bfloat16) is None else torch.float32
    return lambda: multiply(rows, 0.01, 128, packed, scales, zeros, None, 1.0, 0, result, "none", [], "")


def probe(threads: int, seconds: float) -> dict[str, Any]:
    """Measure this machine; about six times `seconds`."""
    import torch

    torch.set_num_threads(threads)
    bandwidths = _bandwidths(threads, seconds)
    return {"bandwidth": max(bandwidths.values()), "bandwidths": bandwidths, "peaks": _peaks(seconds)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each figure")


def main(options: argparse.Namespace, _report: Report) -> None:
    """Measure, and report it."""
    wanted = {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):  # read when torch is loaded: start again
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})
    print(json.dumps(probe(options.threads, options.seconds)))
