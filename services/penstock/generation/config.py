"""Configuration of the generation service. It is light, since the command line imports it for --help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.common.config import (
    GENERATION_METRICS_PORT,
    GENERATION_PORT,
    ServerConfig,
    is_loopback,
    option,
    parse_size_or_auto,
)
from penstock.common.environment import usable_cores
from penstock.common.errors import StartupError
from penstock.common.options import values_of
from penstock.generation.adapters.limits import ADAPTERS, AdapterLimits, AdapterOptions
from penstock.generation.core.model_config import ROUTES, ModelRoute
from penstock.generation.devices import KERNELS
from penstock.generation.engine.config import BATCHING, INSIDE, MEMORY, PREEMPTIONS, SWAP, EngineOptions
from penstock.generation.engine.failpoints import Failpoint
from penstock.generation.grammar.limits import GrammarLimits, JsonBounds
from penstock.generation.host.memory import parse_memory
from penstock.generation.layers.linear import FP8, QUANTIZATIONS
from penstock.generation.options.limits import REQUESTS, RequestBounds, RequestLimits

MODEL, LOADING = "Model", "Loading by call"
CONSTRAINTS, GRAPHS = "Structured output", "The model as graphs"
KV_CACHE_DTYPES = ("auto", "int8")


def _batch_tokens(text: str) -> int | None:
    """Parse a number of tokens; None for `auto`. Raises ValueError."""
    if text.strip().lower() == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number or auto") from None


def _sizes(text: str) -> tuple[int, ...]:
    """Parse whole numbers above 0, with commas between them. Raises ValueError."""
    try:
        sizes = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError("expected whole numbers with commas between them") from None
    if not sizes or min(sizes) < 1:
        raise ValueError("expected numbers of at least 1")
    return sizes


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a start: model, adapters and memory."""

    model: str | None = option(None, "Folder or hub id of the model; the embedded one when left out.", group=MODEL)
    served_model_name: tuple[str, ...] = option(
        (),
        "Name that callers use; by default the folder's own. Of several the first one stands in answers.",
        group=MODEL,
        metavar="NAME",
    )
    tokenizer_path: str | None = option(
        None, "Folder or hub id of the tokenizer that belongs to MODEL, where it has none itself.", group=MODEL
    )
    load_tokenizer: bool = option(
        True,
        "Read the tokenizer, which stop strings, token healing and structured output need; without it they are "
        "refused.",
        group=MODEL,
    )
    model_config: str | None = option(
        None,
        "JSON file with MindIE's dictionary model_config (docs/guide/in-your-process.md). Other flags go before it.",
        group=MODEL,
        metavar="FILE",
    )
    device: str = option(
        "auto",
        "Where the model runs: cpu, npu or npu:NUMBER (an Ascend NPU, of those that are visible), or auto: an NPU "
        "where there is one and torch-npu is installed, else the CPU.",
        group=MODEL,
    )
    dtype: str = option(
        "auto", "float32, bfloat16, float16, or auto: the checkpoint's where it runs well.", group=MODEL
    )
    quantization: str = option(
        "auto",
        "Weights of the linear layers, quantised at load: faster, less exact. int4: smallest, and fastest for a "
        "stream or two; int8: more exact, and faster than int4 with several streams and for prompts; none: as "
        "--dtype; fp8: on GPUs that have it; auto: as `penstock pack` wrote MODEL, otherwise none.",
        group=MODEL,
    )
    model_route: str = option(
        "auto",
        "Code that runs the model: native is Penstock's own, fallback transformers' modules on the same scheduler and "
        "KV pool; auto: native where the model type is (docs/guide/models.md).",
        group=MODEL,
    )
    trust_remote_code: bool = option(
        False,
        "Run Python code that MODEL's folder brings (auto_map of its config.json), with all the rights of this "
        "process, where transformers runs the model.",
        group=MODEL,
    )
    self_check: bool = option(
        True,
        "Compare a model that transformers' modules run with its own attention at the start, and refuse one whose "
        "answers would differ.",
        group=MODEL,
    )
    threads: int | None = option(
        None, "Threads of the model's kernels; all cores when left out.", group=MODEL, minimum=1
    )
    tensor_parallel: int = option(
        1,
        "Processes of this machine that share the model: each has a part of every layer's heads and widths, of the "
        "vocabulary, and of the threads; on NPUs each has one, from --device on. Native models without experts.",
        group=MODEL,
        minimum=1,
        maximum=64,
    )
    compute_nice: int = option(
        0,
        "Added to the niceness of these threads (Linux): the other services, where they share its cores, and its own "
        "messages go first then; so does any other work of the machine.",
        group=MODEL,
        minimum=0,
        maximum=19,
    )

    kernels: str = option(
        "auto",
        "C++ kernels of `penstock build-kernels` or penstock-kernels: auto uses them if they are there, native "
        "insists, torch never.",
        group=MODEL,
    )

    prefault_weights: bool = option(
        True,
        "Take the memory of the weights from the system while libraries are imported, instead of when it is written "
        "(Linux, C++ kernels, MODEL a folder): a faster start.",
        group=MODEL,
    )

    defer_imports: bool = option(
        True,
        "Load parts of torch that serving has no use for (optimizers, export, shapes without data) only when something "
        "asks for them (CPU): 25 MiB less, and a faster start.",
        group=MODEL,
    )

    map_embeddings: bool = option(
        True,
        "Use the table that ids are looked up in where the page cache has MODEL's file, if it is apart from the head "
        "and stored as --dtype (CPU): less memory, and the file must be replaced, never written into.",
        group=MODEL,
    )
    weights_check_seconds: float = option(
        1.0,
        "How often to look whether somebody wrote into a file that weights are mapped from, which ends the process; "
        "0: never.",
        group=MODEL,
        minimum=0,
    )

    assistant_model: str | None = option(
        None, "Folder or hub id of a draft model, for requests that ask for assisted generation by it.", group=MODEL
    )

    logits_processor: tuple[str, ...] = option(
        (),
        "Logits processors that requests may name: NAME=MODULE:CLASS, importable here; transformers' signature.",
        group=MODEL,
    )
    stopping_criteria: tuple[str, ...] = option(
        (),
        "Stopping criteria that requests may name: NAME=MODULE:CLASS, importable here; transformers' signature.",
        group=MODEL,
    )

    empty: bool = option(
        False,
        "Start without a model: LoadModel (`penstock models load`) brings one. Health is NOT_SERVING until then.",
        group=LOADING,
    )
    model_root: str | None = option(
        None,
        "Folder below which LoadModel may load from a path; without it models come as bytes only.",
        group=LOADING,
        metavar="FOLDER",
    )
    model_upload_folder: str | None = option(
        None,
        "Where files of a model that comes as bytes are kept while it is loaded; the system's temporary folder when "
        "left out.",
        group=LOADING,
        metavar="FOLDER",
    )
    max_model_bytes: int | None = option(
        None,
        "Most bytes of a model that comes as bytes; auto: what memory and disk have free.",
        group=LOADING,
        minimum=1,
        metavar="SIZE|auto",
        parse=parse_size_or_auto,
    )
    max_model_files: int = option(1024, "Most files of a model that comes as bytes.", group=LOADING, minimum=1)
    max_model_text_bytes: int = option(
        128 << 20,
        "Largest of its JSON and text files, and of a header of its weights: they are parsed as a whole.",
        group=LOADING,
        minimum=1024,
    )
    receive_idle_seconds: float = option(
        60.0, "A load whose next bytes do not come for so long is given up.", group=LOADING, minimum=0.05
    )

    lora: tuple[str, ...] = option(
        (),
        "LoRA adapters to load at start: NAME=FOLDER, as PEFT saves them; requests choose one by `adapter`.",
        group=ADAPTERS,
        metavar="NAME=FOLDER",
    )
    adapter_root: str | None = option(
        None,
        "Folder below which LoadAdapter may load adapters; without it none are loaded while the service runs.",
        group=ADAPTERS,
        metavar="FOLDER",
    )
    adapter_memory: str = option(
        "1GiB", "Memory of all LoRA adapters together, in all processes of --tensor-parallel.", group=ADAPTERS
    )

    kv_memory: str = option(
        "auto",
        "Memory of the KV pool, such as 2GiB; auto: a share of what is left; -1: what is left of 80 % of all of it.",
        group=MEMORY,
    )
    host_kv_memory: str = option(
        "0",
        "Memory of the host pool, where blocks of preempted requests and evicted prefixes go: as --kv-memory; 0: none.",
        group=MEMORY,
    )
    assistant_kv_memory: str = option(
        "auto", "Memory of the draft model's own KV pool; auto: for as many tokens as the other holds.", group=MEMORY
    )
    kv_cache_dtype: str = option(
        "auto",
        "How keys and values are kept: auto as the model's dtype, int8 with a scale per token and head.",
        group=MEMORY,
    )
    block_size: int | None = option(
        None,
        "Tokens of one KV block; default: by the device, 16 on the CPU and 128 on an NPU.",
        group=MEMORY,
        minimum=1,
        maximum=1024,
    )
    max_context: int | None = option(
        None, "Longest prompt and output together; by default the model's.", group=MEMORY, minimum=2
    )
    state_snapshots: int = option(
        32,
        "States of recurrent layers that are kept for equal prompt beginnings, each as large as that of a running "
        "sequence; 0: such models have no prefix cache.",
        group=MEMORY,
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class GenerationServiceConfig(ServerConfig, ModelOptions, AdapterOptions, EngineOptions, RequestBounds):
    """One model on one device, behind one gRPC server: the options of its parts, and those of the service."""

    port: int = option(GENERATION_PORT, "gRPC port; 0 takes a free one.", group="Network", minimum=0, maximum=65535)
    metrics_port: int = option(
        GENERATION_METRICS_PORT,
        "Port of the Prometheus endpoint; 0 takes a free one, -1 has none.",
        group="Network",
        minimum=-1,
        maximum=65535,
    )

    max_batch_tokens: int | None = option(
        None,
        "Tokens computed in one engine step; auto: measured at start, as few as have nearly the best throughput.",
        group=BATCHING,
        minimum=1,
        metavar="INT|auto",
        parse=_batch_tokens,
    )
    target_step_seconds: float = option(
        0.5,
        "Longest step that --max-batch-tokens auto lets prompts make: what sequences that decode beside them wait.",
        group=BATCHING,
        minimum=0.001,
    )
    tune_seconds: float = option(
        1.5,
        "Time at start that --max-batch-tokens auto may take; 0: nothing is measured, and it means 512.",
        group=BATCHING,
        minimum=0,
    )
    capture_steps: bool = option(
        True,
        "Decode steps are captured graphs of the device, where it has such (CUDA, NPU): a step is one call. Without: "
        "to look for a fault, or for the memory that graphs take.",
        group=BATCHING,
    )
    max_warm_up_steps: int = option(
        64, "Decode steps of one WarmUp at most; its prompts are a step's at most.", group=BATCHING, minimum=1
    )
    max_pending_messages: int = option(
        1024, "Messages that wait for a stream's reader; past that it is cut off.", group=BATCHING, minimum=1
    )

    max_items_in_flight: int = option(
        32,
        "Items of one Score or Embed that are in the engine at once; the others follow as these end.",
        group=REQUESTS,
        minimum=1,
    )

    max_watermark_calls: int = option(
        8, "DetectWatermark calls at once: one is computed, the others wait.", group=REQUESTS, minimum=1
    )
    max_live_embeds_bytes: int = option(
        256 << 20,
        "inputs_embeds of all requests that wait or run, in the model's dtype; more are refused.",
        group=REQUESTS,
        minimum=0,
    )

    max_constraint_bytes: int = option(
        GrammarLimits.max_bytes, "Longest source of a constraint.", group=CONSTRAINTS, minimum=1
    )
    max_constraint_choices: int = option(
        GrammarLimits.max_choices, "Most values of a choice.", group=CONSTRAINTS, minimum=1
    )
    constraint_compile_seconds: float = option(
        GrammarLimits.compile_seconds, "Longest compilation of a constraint.", group=CONSTRAINTS, minimum=0.01
    )
    constraint_compile_memory_bytes: int = option(
        GrammarLimits.compile_memory_bytes,
        "Memory that one compilation may take.",
        group=CONSTRAINTS,
        minimum=1 << 20,
    )
    constraint_processes: int = option(
        GrammarLimits.compile_processes,
        "Processes that try constraints; the first starts with the first constraint.",
        group=CONSTRAINTS,
        minimum=1,
    )
    max_queued_constraints: int = option(
        GrammarLimits.max_queued, "Constraints waiting for a process; more are refused.", group=CONSTRAINTS, minimum=1
    )
    constraint_cache: int = option(
        GrammarLimits.cache_entries, "Compiled constraints that are kept.", group=CONSTRAINTS, minimum=1
    )
    max_json_digits: int = option(
        JsonBounds.digits,
        "Digits of integers that a JSON schema leaves open; numbers that may have a point have at most 15, and 9 "
        "behind it; 0: any number of them.",
        group=CONSTRAINTS,
        minimum=0,
        maximum=19,
    )
    max_json_keys: int = option(
        JsonBounds.keys,
        "Keys of an object besides those that its JSON schema names; 0: any number of them.",
        group=CONSTRAINTS,
        minimum=0,
    )
    max_json_depth: int = option(
        JsonBounds.depth,
        "Values within values where a JSON schema allows anything, and of a definition within itself; 0: any number "
        "of them.",
        group=CONSTRAINTS,
        minimum=0,
        maximum=32,
    )
    max_json_items: int = option(
        JsonBounds.items,
        "Items of arrays whose JSON schema has no maxItems; 0: no bound.",
        group=CONSTRAINTS,
        minimum=0,
    )
    max_json_characters: int = option(
        JsonBounds.characters,
        "Characters of texts whose JSON schema has no maxLength; 0: no bound.",
        group=CONSTRAINTS,
        minimum=0,
    )
    mask_threads: int = option(
        GrammarLimits.mask_threads, "Threads that compute token masks beside the model.", group=CONSTRAINTS, minimum=1
    )

    model_access: Literal["off", "local", "all"] = option(
        "local",
        "Forward, Sample, LoadModel and the other calls of ModelService that open the model: local: where the service "
        "listens on loopback; all: anywhere, on other addresses with --model-access-token-file; off: nowhere.",
        group=GRAPHS,
    )
    model_access_token_file: str | None = option(
        None,
        "Callers of these must send one of the bearer tokens in this file, and no other; a router sends its "
        "--channel-token-file's.",
        group=GRAPHS,
        metavar="FILE",
    )
    graph_lengths: tuple[int, ...] = option(
        (512, 2048),
        "Sequence lengths of the graphs' stages, up to the context; shapes in between are taken as well.",
        group=GRAPHS,
        metavar="INT,INT",
        parse=_sizes,
    )
    graph_batches: tuple[int, ...] = option(
        (1, 4), "Sequences at once of the graphs' stages.", group=GRAPHS, metavar="INT,INT", parse=_sizes
    )
    graph_kv_tokens: int = option(
        4096,
        "Tokens of the KV pool for named sequences, beside those of --kv-memory; their memory is taken as they are "
        "used.",
        group=GRAPHS,
        minimum=0,
    )
    graph_share: float = option(
        0.5,
        "Share of the engine's time that graphs may take while there are requests.",
        group=GRAPHS,
        minimum=0.01,
        maximum=1.0,
    )
    max_graph_streams: int = option(8, "Forward streams that are open at once.", group=GRAPHS, minimum=1)
    max_graph_call_bytes: int = option(
        64 << 20, "Inputs, and outputs, of one call of a graph in messages.", group=GRAPHS, minimum=1024
    )
    max_graph_tensors: int = option(1024, "Tensors that stay at the server; 0: none do.", group=GRAPHS, minimum=0)
    max_graph_tensor_bytes: int = option(256 << 20, "Bytes of all of them.", group=GRAPHS, minimum=0)
    max_graph_leases: int = option(64, "Leases at once, which own them.", group=GRAPHS, minimum=1)
    graph_lease_seconds: float = option(
        60.0,
        "How long a lease that nobody uses lives, by default; 1h at most.",
        group=GRAPHS,
        minimum=0.01,
        maximum=3600.0,
    )

    status_seconds: float = option(
        10.0,
        "How often the log gets a line on load and throughput, while there is something to tell; 0: never.",
        group=INSIDE,
        minimum=0,
    )
    trace_steps: str | None = option(
        None,
        "Write a line on every engine step there, for tools/replay.py; %p is the process id.",
        group=INSIDE,
        metavar="FILE",
    )
    trace_bytes: int = option(256 << 20, "Where that file ends.", group=INSIDE, minimum=1024)
    failpoints: tuple[str, ...] = option(
        (),
        "Faults that a test orders (docs/learn/testing.md); refused without --allow-failpoints.",
        group=INSIDE,
        metavar="NAME[@WHEN],…",
        hidden=True,
    )
    allow_failpoints: bool = option(False, "This process may be broken by --failpoints.", group=INSIDE, hidden=True)

    def validate(self) -> None:
        """Check the options together. Raises StartupError."""
        super().validate()
        for flag, value, allowed in (
            ("--kernels", self.kernels, KERNELS),
            ("--quantization", self.quantization, ("auto", *QUANTIZATIONS, FP8)),
            ("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
            ("--model-route", self.model_route, ROUTES),
            ("--preemption", self.preemption, PREEMPTIONS),
        ):
            if value not in allowed:
                raise StartupError(f"{flag} must be one of {', '.join(allowed)}", flag=flag)
        self._check_ranks()
        if self.empty and self.model is not None:
            raise StartupError("--empty starts without a model: leave MODEL out", flag="--empty")
        if self.empty and not self.is_model_open:
            raise StartupError(
                "--empty needs --model-access: nothing could ever be loaded on this address", flag="--model-access"
            )
        if self.model_access == "all" and self.model_access_token_file is None and not is_loopback(self.host):
            raise StartupError(
                f"--model-access all on {self.host} needs --model-access-token-file: who may look into the model",
                flag="--model-access-token-file",
            )
        if 0.0 < self.tenant_slowdown <= 1.0:
            raise StartupError("--tenant-slowdown must be 0 or above 1", flag="--tenant-slowdown")
        self.failpoint_orders()
        self.adapter_limits()
        self.adapters_to_load()
        self.adapter_folder()
        parse_memory(self.kv_memory)
        parse_memory(self.assistant_kv_memory, flag="--assistant-kv-memory")
        if parse_memory(self.host_kv_memory, flag="--host-kv-memory") == 0 and self.preemption == SWAP:
            raise StartupError(
                "--preemption swap needs a host pool: give it memory by --host-kv-memory", flag="--preemption"
            )
        if self.max_batch_tokens is not None and self.max_batch_tokens < self.max_running_sequences:
            raise StartupError(
                f"--max-batch-tokens {self.max_batch_tokens} is less than --max-running-sequences "
                f"{self.max_running_sequences}: every running sequence needs a token a step",
                flag="--max-batch-tokens",
            )

    @property
    def rank_threads(self) -> int | None:
        """Threads of each process that computes; None: all cores."""
        if self.tensor_parallel == 1:
            return self.threads
        return max(1, (self.threads or usable_cores()) // self.tensor_parallel)

    def _check_ranks(self) -> None:
        """Refuse what a model of several processes does not do. Raises StartupError."""
        if self.tensor_parallel == 1:
            return
        if self.threads is not None and self.threads < self.tensor_parallel:
            raise StartupError(
                f"--threads {self.threads} is less than --tensor-parallel {self.tensor_parallel}: a thread each",
                flag="--threads",
            )

    @property
    def route(self) -> ModelRoute:
        """Choice of the code that runs the model."""
        return ModelRoute(self.model_route, self.trust_remote_code, self.self_check)

    @property
    def is_model_open(self) -> bool:
        """True when callers may run the model's graphs."""
        return self.model_access == "all" or (self.model_access == "local" and is_loopback(self.host))

    def failpoint_orders(self) -> tuple[Failpoint, ...]:
        """Return the faults that a test orders. Raises StartupError unless they are allowed."""
        if self.failpoints and not self.allow_failpoints:
            raise StartupError("--failpoints break this process: tests add --allow-failpoints", flag="--failpoints")
        try:
            return tuple(map(Failpoint.parse, self.failpoints))
        except ValueError as error:
            raise StartupError(f"--failpoints: {error}", flag="--failpoints") from error

    def adapter_limits(self) -> AdapterLimits:
        """Return the bounds on adapters. Raises StartupError."""
        size = parse_memory(self.adapter_memory, flag="--adapter-memory")
        if size is None:
            raise StartupError("--adapter-memory must be a size such as 512MiB", flag="--adapter-memory")
        return AdapterLimits(**values_of(AdapterOptions, self), max_bytes=size)

    def adapters_to_load(self) -> dict[str, str]:
        """Return name -> folder of --lora. Raises StartupError."""
        found: dict[str, str] = {}
        for text in self.lora:
            name, _, folder = text.partition("=")
            if not name or not folder:
                raise StartupError(f"--lora {text!r}: expected NAME=FOLDER", flag="--lora")
            if name in found:
                raise StartupError(f"--lora has the name {name} twice", flag="--lora")
            found[name] = folder
        return found

    def adapter_folder(self) -> Path | None:
        """Return the folder of --adapter-root. Raises StartupError when it is none."""
        if self.adapter_root is None:
            return None
        root = Path(self.adapter_root).expanduser().absolute()
        if not root.is_dir():
            raise StartupError(f"--adapter-root {self.adapter_root}: is no folder", flag="--adapter-root")
        return root

    def grammar_limits(self) -> GrammarLimits:
        """Return the limits on constraints."""
        return GrammarLimits(
            max_bytes=self.max_constraint_bytes,
            max_choices=self.max_constraint_choices,
            compile_seconds=self.constraint_compile_seconds,
            compile_memory_bytes=self.constraint_compile_memory_bytes,
            compile_processes=self.constraint_processes,
            max_queued=self.max_queued_constraints,
            cache_entries=self.constraint_cache,
            mask_threads=self.mask_threads,
            json=JsonBounds(
                self.max_json_digits,
                self.max_json_keys,
                self.max_json_depth,
                self.max_json_items,
                self.max_json_characters,
            ),
        )

    def request_limits(self) -> RequestLimits:
        """Return the limits that requests are checked against."""
        bounds = values_of(RequestBounds, self)
        for name in ("max_return_sequences", "max_beams"):
            bounds[name] = min(bounds[name], self.max_running_sequences)
        return RequestLimits(**bounds, remembers_outputs=self.ngram_memory_tenants > 0)
