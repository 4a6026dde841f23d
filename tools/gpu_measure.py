"""Speed of a device with a model of random weights, beside the limits that it reaches by itself in the same run.

    python tools/gpu_measure.py --device cuda:0                    # Llama-3.1-8B's shape in bfloat16
    python tools/gpu_measure.py --device cpu --tiny                # the same calls in seconds, to try them

It prints a table in Markdown: decode steps of 1, 64 and 256 sequences and a prompt of 2048 tokens, each with its share
of the limit (bytes over the measured read bandwidth, or operations over the measured peak, whichever takes longer);
64 requests by Penstock's engine and by transformers' own continuous batching; and the waits and allocations that the
profiler saw in steady decode steps. Exit code 1 where one of the project's promises does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "services"))

from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.model_config import Activation, ModelConfig
from penstock.generation.core.request import Request
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence as TokenSequence
from penstock.generation.core.step import ScheduledSequence, SchedulerOutput
from penstock.generation.devices.base import Device
from penstock.generation.devices.device_registry import open_device
from penstock.generation.devices.torch_dtypes import named_dtype
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine
from penstock.generation.layers.linear.base import Linear
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.loader import build_model
from penstock.generation.models.registry import read_model_config
from penstock.generation.runner.model_runner import ModelRunner
from penstock.generation.weights.tensor_names import LayerLinear, tensor_shapes

# Must show: shares and ratios that the project promises on a GPU.
LEAST_SHARE, LEAST_RATIO = 0.75, 3.0
# One read of the drawn ids is the only wait of a step.
WAITS_A_STEP = 1
_TRACED = "steady steps"
_ALLOCATING = ("cudaMalloc", "cudaFree", "cudaHostAlloc")


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run."""

    config: Mapping[str, Any]
    batches: tuple[int, ...]
    context: int
    prompt: int
    steps: int
    requests: int
    # Tokens of each request: prompt and answer.
    request_tokens: tuple[int, int]
    # Of the buffer that bandwidth is measured on.
    buffer_bytes: int
    # Edge of the matrices that the peak is measured on.
    edge: int


_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
FULL = Plan(_LLAMA, (1, 64, 256), 512, 2048, 64, 64, (128, 128), 4 << 30, 8192)
_TINY_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
TINY = Plan(_LLAMA | _TINY_SIZES, (1, 3), 20, 32, 6, 4, (6, 5), 1 << 22, 256)


def config_of(plan: Plan) -> ModelConfig:
    """Return the configuration as a service reads it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plan.config), encoding="utf-8")
        return read_model_config(Path(folder))


class RandomWeights:
    """loader.Weights of small random numbers, made on the device."""

    mapped_bytes = 0

    def __init__(self, config: ModelConfig, device: Device, dtype: torch.dtype, quantization: str) -> None:
        self.dtype = dtype
        self.num_bytes = 0
        self.forms: Mapping[str, int] = {}
        self._config = config
        self._device = device
        self._method = device.linear_method(dtype, quantization)
        self._kernels = device.layer_kernels(dtype)

    def head_and_table(self) -> tuple[Linear, Tensor | None]:
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._counted(self._method.head(self._numbers(shape))), self._numbers(shape)

    def linear(self, prefix: str, linear: LayerLinear, activation: Activation = Activation.SILU) -> Linear:
        weight = self._numbers(linear.shape)
        if linear.gated:
            return self._counted(self._method.gated(weight, None, self._kernels, activation))
        return self._counted(self._method.linear(weight, None))

    def tensor(self, name: str, *, is_exact: bool = False) -> Tensor:
        shape = tensor_shapes(self._config)[name]
        return torch.ones(shape, dtype=torch.float32 if is_exact else self.dtype, device=self._device.torch_device)

    def layer_is_complete(self) -> None:
        pass

    def _numbers(self, shape: tuple[int, ...]) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self._device.torch_device)
        return made.normal_(std=shape[-1] ** -0.5)

    def _counted(self, linear: Linear) -> Linear:
        self.num_bytes += linear.num_bytes
        return linear


@dataclass(frozen=True, slots=True)
class Limits:
    """Best of the device itself: bytes read a second, and operations a second (two for a multiply-add)."""

    bandwidth: float
    peak: float


class Clock:
    """Times of work on a device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], object], repeats: int) -> list[float]:
        """Return the seconds of each repeat, after two that are not counted."""
        found = []
        for number in range(repeats + 2):
            self._device.synchronize()
            began = time.perf_counter()
            work()
            self._device.synchronize()
            if number > 1:
                found.append(time.perf_counter() - began)
        return found


def measure_limits(device: Device, dtype: torch.dtype, plan: Plan) -> Limits:
    """Measure reading, by reductions over a large buffer, and the product of two square matrices."""
    clock, place = Clock(device), device.torch_device
    buffer = torch.ones(plan.buffer_bytes // 4, dtype=torch.float32, device=place)
    readers: list[Callable[[], object]] = [buffer.sum, buffer.amax]
    bandwidth = max(plan.buffer_bytes / min(clock.seconds(reader, 8)) for reader in readers)
    del buffer, readers
    one = torch.ones(plan.edge, plan.edge, dtype=dtype, device=place)
    peak = 2 * plan.edge**3 / min(clock.seconds(lambda: one @ one, 8))
    return Limits(bandwidth, peak)


class Bench:
    """A model, its pool and its runner."""

    def __init__(self, device: Device, dtype: torch.dtype, plan: Plan, quantization: str = "none") -> None:
        self.plan = plan
        self.device = device
        self._clock = Clock(device)
        config = config_of(plan)
        self.model: CausalLM = build_model(config, RandomWeights(config, device, dtype, quantization), device)
        size = device.block_size(None)
        self._blocks_each = -(-(plan.context + 2 * plan.steps + 8) // size)
        most = max(plan.batches)
        blocks = max(most * self._blocks_each, -(-(plan.prompt + 1) // size), self._blocks_of_requests(size))
        heads = (self.model.num_kv_heads, config.head_dim)
        self.graphs = graphs = device.graph_capture()
        self.kv = KVCachePool(
            config.num_layers, blocks, size, *heads, dtype, device.torch_device, has_scrap=graphs is not None
        )
        self.runner = ModelRunner(
            self.model, self.kv, kernels=device.sampling_kernels(), graphs=graphs, most_captured_rows=most
        )

    def _blocks_of_requests(self, size: int) -> int:
        return self.plan.requests * -(-sum(self.plan.request_tokens) // size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a decode step reads: all but the embedding's table."""
        return self.model.num_bytes

    def kv_bytes(self, batch: int) -> float:
        """Bytes of keys and values that a decode step of `batch` sequences reads, on average over the steps."""
        length = self.plan.context + self.plan.steps / 2
        return batch * length * self.kv.bytes_per_block / self.kv.block_size

    def operations(self, rows: int, *, heads: int) -> float:
        """Operations of the linear layers for `rows` rows; `heads` of them go through the head."""
        facts = self.model.config
        head = facts.vocab_size * facts.hidden_size
        return 2.0 * (rows * (facts.num_parameters - 2 * head) + heads * head)

    def decoding(self, batch: int, params: SamplingParams | None = None) -> Iterator[Callable[[], None]]:
        """Yield one call that runs the next decode step of `batch` sequences; release them afterwards."""
        params = params or SamplingParams(2 * self.plan.steps + 8)
        each, length = self._blocks_each, self.plan.context
        sequences = [
            TokenSequence(
                seq_id=number,
                index=0,
                params=params,
                seed=number,
                token_ids=[1 + number % 64] * length,
                num_prompt_tokens=length,
                block_table=list(range(number * each, (number + 1) * each)),
            )
            for number in range(batch)
        ]

        def step() -> None:
            # Keys and values of the context are zeros: they cost as much as any.
            entries = tuple(ScheduledSequence(one, len(one.token_ids) - 1, 1, (one,)) for one in sequences)
            sampled = self.runner.execute(SchedulerOutput(entries)).sampled
            for one in sequences:
                one.token_ids.append(sampled[one.seq_id].token_id)

        yield step
        self.runner.release([one.seq_id for one in sequences])

    def decode_seconds(self, batch: int) -> float:
        """Return the median seconds of a decode step."""
        for step in self.decoding(batch):
            return statistics.median(self._clock.seconds(step, self.plan.steps))
        raise AssertionError

    def prompt_seconds(self) -> float:
        """Return the median seconds of a step with one prompt, first token included."""
        return statistics.median(self._clock.seconds(lambda: self.runner.run_prompt(self.plan.prompt), 5))

    def request_seconds(self) -> float:
        """Return the seconds in which the engine answers all requests, which come at once."""
        prompt, answer = self.plan.request_tokens
        config = EngineConfig(
            num_blocks=self.kv.num_blocks,
            block_size=self.kv.block_size,
            max_context_tokens=prompt + answer,
            max_batch_tokens=max(2 * self.plan.requests, 2048),
            max_running_sequences=self.plan.requests,
        )
        found = []
        for turn in range(2):
            engine = Engine(config, self.runner, None)
            for number in range(self.plan.requests):
                params = SamplingParams(max_new_tokens=answer, ignore_eos=True)
                engine.add(Request(f"{turn}-{number}", prompt_of(number, prompt), params, 0.0))
            began = time.perf_counter()
            while engine.has_work:
                engine.step()
            found.append(time.perf_counter() - began)
        return min(found)


def prompt_of(number: int, length: int) -> list[int]:
    """Return a prompt that shares no beginning with another."""
    return [2 + (number * 131 + place * 7) % 300 for place in range(length)]


def transformers_seconds(plan: Plan, device: Device, dtype: torch.dtype) -> float:
    """Return the seconds in which transformers' own continuous batching answers the same requests: the better of two
    turns; in the second everything is warm."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    made = {name: value for name, value in plan.config.items() if name not in ("architectures", "model_type")}
    with torch.device(device.torch_device):
        config = LlamaConfig(**made, attn_implementation="sdpa")
        model = cast(Any, LlamaForCausalLM(config)).to(dtype).eval()
    prompt, answer = plan.request_tokens
    options = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    inputs = [prompt_of(number, prompt) for number in range(plan.requests)]
    found = []
    for _ in range(2):
        device.synchronize()
        began = time.perf_counter()
        outputs = model.generate_batch(inputs, generation_config=options, progress_bar=False, persistent_manager=True)
        device.synchronize()
        found.append(time.perf_counter() - began)
        lengths = {len(output.generated_tokens) for output in outputs.values()}
        if len(outputs) != plan.requests or lengths != {answer}:
            raise RuntimeError(f"transformers answered {len(outputs)} requests with {sorted(lengths)} tokens")
    model.destroy_cached_continuous_batching_manager()
    return min(found)


@dataclass(frozen=True, slots=True)
class Trace:
    """Waits and allocations that the profiler saw in steady decode steps, and memory that they took from the device."""

    waits: float
    allocations: int
    new_segments: int
    names: Mapping[str, int]


def trace(bench: Bench, batch: int, params: SamplingParams | None = None) -> Trace:
    """Profile steady decode steps."""
    is_gpu = bench.device.torch_device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if is_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def segments() -> int:
        return int(torch.cuda.memory_stats()["segment.all.allocated"]) if is_gpu else 0

    for step in bench.decoding(batch, params):
        for _ in range(4):
            step()
        before = segments()
        with torch.profiler.profile(activities=activities) as profiler, torch.profiler.record_function(_TRACED):
            for _ in range(bench.plan.steps):
                step()
        # The profiler waits for the device at its own end, which is no step's.
        events = profiler.events()
        traced = next(event.time_range for event in events if event.name == _TRACED)
        counts = Counter(event.name for event in events if event.time_range.start < traced.end)
        taken = segments() - before
    waits = sum(count for name, count in counts.items() if is_wait(name))
    allocations = sum(count for name, count in counts.items() if name.startswith(_ALLOCATING))
    shown = {name: count for name, count in counts.items() if is_wait(name) or name.startswith(_ALLOCATING)}
    return Trace(waits / bench.plan.steps, allocations, taken, shown)


def is_wait(name: str) -> bool:
    """True for a call of CUDA's that returns when queued work is done."""
    return name.startswith("cuda") and ("Synchronize" in name or name == "cudaMemcpy")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    title: str
    seconds: float
    # A second.
    tokens: float
    share: float
    # Least share; 0: none.
    promised: float


def rows_of(bench: Bench, limits: Limits) -> Iterator[Row]:
    """Yield a row for each batch, and one for the prompt."""
    for batch in bench.plan.batches:
        seconds = bench.decode_seconds(batch)
        read = (bench.weight_bytes + bench.kv_bytes(batch)) / limits.bandwidth
        computed = bench.operations(batch, heads=batch) / limits.peak
        promised = LEAST_SHARE if batch == 1 else 0.0
        yield Row(f"decode, {batch} sequences", seconds, batch / seconds, max(read, computed) / seconds, promised)
    seconds = bench.prompt_seconds()
    tokens = bench.plan.prompt
    computed = bench.operations(tokens, heads=1) / limits.peak
    read = bench.weight_bytes / limits.bandwidth
    yield Row(f"prompt of {tokens} tokens", seconds, tokens / seconds, max(read, computed) / seconds, 0.0)


def run(device: Device, dtype: torch.dtype, plan: Plan, quantizations: Sequence[str]) -> bool:
    """Measure and print. Return True where every promise holds."""
    holds = True
    limits = measure_limits(device, dtype, plan)
    print(f"Limits measured: {limits.bandwidth / 1e9:.0f} GB/s read, {limits.peak / 1e12:.2f} Top/s in {dtype}.\n")
    print("| | ms | tokens/s | share of the limit |\n|---|---|---|---|")
    for quantization in quantizations:
        bench = Bench(device, dtype, plan, quantization)
        name = "" if quantization == "none" else f"{quantization}: "
        for row in rows_of(bench, limits):
            is_kept = row.share >= row.promised or bool(name)
            holds &= is_kept
            mark = "" if is_kept else f" **below {row.promised:.0%}**"
            figures = f"{row.seconds * 1e3:.2f} | {row.tokens:.0f} | {row.share:.0%}{mark}"
            print(f"| {name}{row.title} | {figures} |", flush=True)
        if quantization == "none":
            holds &= print_traces(bench)
            ours = bench.request_seconds()
        del bench
        _free()
    theirs = transformers_seconds(plan, device, dtype)
    holds &= theirs >= LEAST_RATIO * ours
    tokens = plan.requests * plan.request_tokens[1]
    print(f"\n{plan.requests} requests at once, {plan.request_tokens[0]} + {plan.request_tokens[1]} tokens each:")
    print(f"Penstock {tokens / ours:.0f} tokens/s, transformers' continuous batching {tokens / theirs:.0f}", end="")
    print(f": {theirs / ours:.1f} times{'' if theirs >= LEAST_RATIO * ours else f' **below {LEAST_RATIO}**'}.")
    return holds


def print_traces(bench: Bench) -> bool:
    """Print what steady steps waited for and took. Return True where that is no more than promised."""
    holds = True
    print()
    sampled = SamplingParams(2 * bench.plan.steps + 8, do_sample=True, temperature=0.8, top_k=40)
    for title, params in (("greedy", None), ("sampled", sampled)):
        seen = trace(bench, max(bench.plan.batches), params)
        is_kept = seen.waits <= WAITS_A_STEP and not seen.allocations and not seen.new_segments
        holds &= is_kept
        print(
            f"Steady {title} steps: {seen.waits:.2f} waits a step, {seen.allocations} allocations, "
            f"{seen.new_segments} new segments of memory {dict(seen.names)}{'' if is_kept else ' **too many**'}\n"
        )
    return holds


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantizations", default="none", help="as for penstock serve, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the calls")
    parser.add_argument("--layers", type=int, help="fewer layers, for a small GPU")
    options = parser.parse_args(arguments)
    plan = TINY if options.tiny else FULL
    if options.layers:
        plan = replace(plan, config={**plan.config, "num_hidden_layers": options.layers})
    device = open_device(options.device)
    device.start(kernels="torch")
    print(f"{device.describe()}, torch {torch.__version__}\n")
    return 0 if run(device, named_dtype(options.dtype), plan, options.quantizations.split(",")) else 1


if __name__ == "__main__":
    raise SystemExit(main())
