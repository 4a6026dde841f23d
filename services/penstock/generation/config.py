"""Configuration of the generation service. It is light, since the command line imports it for --help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from penstock.common.config import ServerConfig, is_loopback, metrics_port_option
from penstock.common.dtypes import DTYPE_NAMES
from penstock.common.environment import may_have_gpu, num_npus, usable_cores
from penstock.common.errors import DoesNotFit, StartupError
from penstock.common.named_models import MODEL_HELP
from penstock.common.options import option, values_of
from penstock.common.ports import GENERATION_METRICS_PORT, GENERATION_PORT
from penstock.common.units import format_size, parse_size, parse_size_or_auto
from penstock.generation.adapters.adapter_limits import ADAPTERS, AdapterLimits, AdapterOptions
from penstock.generation.adapters.adapter_source import AllowedStores
from penstock.generation.core.graph_options import GRAPHS, GraphOptions
from penstock.generation.core.model_config import ROUTES, ModelRoute
from penstock.generation.devices import COMPACT_WEIGHTS, DEVICE_NAME, DEVICE_WORDS, KERNELS
from penstock.generation.engine.config import BATCHING, INSIDE, MEMORY, PREEMPTIONS, SWAP, EngineOptions
from penstock.generation.engine.failpoints import Failpoint
from penstock.generation.grammar.grammar_limits import GrammarLimits, GrammarOptions, JsonBounds
from penstock.generation.host.memory import host_memory, parse_memory
from penstock.generation.layers.linear import FP8, QUANTIZATIONS
from penstock.generation.options.request_limits import REQUESTS, RequestBounds, RequestLimits
from penstock.generation.weights.update_options import WeightUpdateOptions

MODEL, LOADING = "Model", "Loading by call"
KV_CACHE_DTYPES = ("auto", "int8")
_COMPUTE_NICE = 4


def _batch_tokens(text: str) -> int | None:
    """Parse a number of tokens; None for `auto`. Raises ValueError."""
    if text.strip().lower() == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number or auto") from None


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a start: model, adapters and memory."""

    model: str | None = option(None, MODEL_HELP, group=MODEL)
    served_model_name: tuple[str, ...] = option(
        (),
        "Name that callers use; by default the folder's own. Answers carry the first of several.",
        group=MODEL,
        metavar="NAME",
    )
    tokenizer_path: str | None = option(None, "Folder or hub id of MODEL's tokenizer, if MODEL has none.", group=MODEL)
    load_tokenizer: bool = option(
        True,
        "Read the tokenizer. Without it, stop strings, token healing and structured output are refused.",
        group=MODEL,
    )
    cached_vocabularies: int = option(
        8,
        "Tables of large tokenizers that are kept in the user's cache folder, a few MB each: a later start does not "
        "read tokenizer.json again. 0 keeps and uses none.",
        group=MODEL,
        minimum=0,
    )
    model_config: str | None = option(
        None,
        "JSON file with MindIE's dictionary model_config (docs/guide/in-your-process.md). Other flags override it.",
        group=MODEL,
        metavar="FILE",
    )
    device: str = option(
        "auto",
        "Device of the model: cpu, cuda, npu, or one of several by its number, as cuda:1 or npu:1; auto: an Ascend NPU "
        "if torch-npu sees one, else a GPU, else the CPU.",
        group=MODEL,
    )
    dtype: str = option(
        "auto", "float32, bfloat16, float16, or auto: the checkpoint's if the device runs it well.", group=MODEL
    )
    quantization: str = option(
        "auto",
        "Quantise the weights of the linear layers at load: faster, less exact. int4: smallest, and fastest for one or "
        "two streams; int8: more exact, and faster than int4 for several streams and for prompts; int8-groups: nearer "
        "to float32 than int8, slower, on the CPU's C++ kernels; none: --dtype; fp8: on GPUs that support it; auto: as "
        "`penstock pack` wrote MODEL, otherwise none.",
        group=MODEL,
    )
    model_route: str = option(
        "auto",
        "Code that runs the model: native is Penstock's own, fallback is transformers' modules on the same scheduler "
        "and KV pool; auto: native if it knows the model type (docs/guide/models.md).",
        group=MODEL,
    )
    trust_remote_code: bool = option(
        False,
        "Run Python code from MODEL's folder (auto_map of its config.json) with all the rights of this process, if "
        "transformers runs the model.",
        group=MODEL,
    )
    self_check: bool = option(
        True,
        "At start, compare a model of transformers' modules with its own attention, and refuse it if the answers "
        "differ.",
        group=MODEL,
    )
    threads: int | None = option(
        None, "Threads of the model's kernels; all cores when left out.", group=MODEL, minimum=1
    )
    tensor_parallel: int = option(
        1,
        "Processes of this machine that share the model. Each has a part of every layer's heads and widths, of the "
        "vocabulary, and of the threads; on NPUs each has one NPU, from --device on. Native models without experts.",
        group=MODEL,
        minimum=1,
        maximum=64,
    )
    compute_nice: int | None = option(
        None,
        "Added to the niceness of these threads (Linux): the event loops of this service, and of others in its cgroup, "
        "go first, and so does all other work there. 4 on a CPU when left out, 0 on an accelerator or with "
        "--tensor-parallel.",
        group=MODEL,
        minimum=0,
        maximum=19,
    )

    kernels: str = option(
        "auto",
        "C++ kernels of `penstock build-kernels` or penstock-kernels: auto uses them if they are there, native "
        "requires them, torch never uses them.",
        group=MODEL,
    )

    compact_weights: str = option(
        "auto",
        "Keep weights in bfloat16 in some three quarters of their bytes, without loss: a faster step of few sequences, "
        "and the same ids (C++ kernels). auto: on with AVX-512 (steps of eight and more sequences may become slower "
        "by a twentieth), off with AVX2, where they lose more, and with AMX and on Arm, where it is not measured. A "
        "folder of `penstock pack` is read as it is.",
        group=MODEL,
    )

    prefault_weights: bool = option(
        True,
        "Allocate the memory of the weights while libraries are imported, not when it is written (Linux, C++ kernels, "
        "MODEL a folder): a faster start.",
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
        "Map the embedding table from MODEL's file instead of copying it, if it is apart from the head and stored as "
        "--dtype (CPU): less memory. To change the file, replace it; never write into it.",
        group=MODEL,
    )
    weights_check_seconds: float = option(
        1.0,
        "Interval of the check that nobody wrote into a file of mapped weights; such a write ends the process. 0: no "
        "check.",
        group=MODEL,
        minimum=0,
    )

    assistant_model: str | None = option(
        None, "Folder or hub id of a draft model, for requests with assisted generation.", group=MODEL
    )
    draft_head: str | None = option(
        None,
        "Folder or hub id of a draft head (EAGLE-3, DFlash) that was trained for MODEL, for requests with assisted "
        "generation; checkpoint: the layers for drafts that MODEL carries; demo: the head of the embedded model.",
        group=MODEL,
        metavar="FOLDER|checkpoint|demo",
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
        "Folder that LoadModel may load paths from; without it models come as bytes only.",
        group=LOADING,
        metavar="FOLDER",
    )
    model_upload_folder: str | None = option(
        None,
        "Folder for the files of a model that comes as bytes, while it loads; the system's temporary folder when left "
        "out.",
        group=LOADING,
        metavar="FOLDER",
    )
    max_model_bytes: int | None = option(
        None,
        "Largest model that may come as bytes; auto: the free memory and disk.",
        group=LOADING,
        minimum=1,
        metavar="SIZE|auto",
        parse=parse_size_or_auto,
    )
    max_model_files: int = option(1024, "Most files of a model that comes as bytes.", group=LOADING, minimum=1)
    max_model_text_bytes: int = option(
        128 << 20,
        "Largest JSON or text file of such a model, and largest header of its weights: each is parsed as a whole.",
        group=LOADING,
        minimum=1024,
    )
    receive_idle_seconds: float = option(
        60.0, "A load ends when its next bytes take longer than this.", group=LOADING, minimum=0.05
    )

    lora: tuple[str, ...] = option(
        (),
        "LoRA adapters to load at start: NAME=FOLDER, as PEFT saves them; requests choose one by `adapter`.",
        group=ADAPTERS,
        metavar="NAME=FOLDER",
    )
    adapter_root: str | None = option(
        None,
        "Folder that LoadAdapter may load adapters from; without it none are loaded while the service runs.",
        group=ADAPTERS,
        metavar="FOLDER",
    )
    adapter_store: tuple[str, ...] = option(
        (),
        "Store that LoadAdapter may take adapters from, into --adapter-root: hub (Hugging Face's), hub://OWNER, "
        "s3://BUCKET or s3://BUCKET/PREFIX. Credentials are those of the environment (HF_TOKEN, AWS_ACCESS_KEY_ID).",
        group=ADAPTERS,
        metavar="STORE",
    )
    adapter_disk: str = option(
        "10GiB",
        "Bytes of the adapters of stores below --adapter-root; the least recently used one that no request uses makes "
        "room for another, and its name is forgotten.",
        group=ADAPTERS,
    )
    adapter_fetch_seconds: float = option(
        600.0, "Time for an adapter to come from a store.", group=ADAPTERS, minimum=1.0
    )
    adapter_memory: str = option(
        "1GiB", "Memory of all LoRA adapters together, in all processes of --tensor-parallel.", group=ADAPTERS
    )

    kv_memory: str = option(
        "auto",
        "Memory of the KV pool, such as 2GiB; auto: a share of the free memory; -1: the rest of 80 % of all memory.",
        group=MEMORY,
    )
    host_kv_memory: str = option(
        "0",
        "Memory of the host pool, for blocks of preempted requests and evicted prefixes; like --kv-memory; 0: none.",
        group=MEMORY,
    )
    kv_disk: str | None = option(
        None,
        "File that keeps prefixes which leave the pools: processes of this host share it, and it survives restarts. "
        "%b is the bytes of a block: models with blocks of different sizes then have a file each.",
        group=MEMORY,
        metavar="FILE",
    )
    kv_disk_size: int = option(
        8 << 30,
        "Largest size of that file; what was used the longest ago gives way.",
        group=MEMORY,
        minimum=1,
        metavar="SIZE",
        parse=parse_size,
    )
    kv_disk_buffer: int = option(
        256 << 20,
        "Memory that blocks pass on their way to and from --kv-disk, where there is no --host-kv-memory.",
        group=MEMORY,
        minimum=1,
        metavar="SIZE",
        parse=parse_size,
    )
    assistant_kv_memory: str = option(
        "auto",
        "Memory of the draft model's or draft head's own KV pool; auto: room for as many tokens as the main pool.",
        group=MEMORY,
    )
    kv_cache_dtype: str = option(
        "auto",
        "Type of stored keys and values: auto is the model's dtype, int8 has a scale per token and head.",
        group=MEMORY,
    )
    block_size: int | None = option(
        None,
        "Tokens per KV block; default: by the device, 16 on the CPU and 128 on an NPU.",
        group=MEMORY,
        minimum=1,
        maximum=1024,
    )
    max_context: int | None = option(
        None, "Longest prompt and output together; by default the model's.", group=MEMORY, minimum=2
    )
    kv_groups: bool = option(
        True,
        "Layers with a sliding window or chunks keep only what they read, beside layers that keep whole contexts. Off: "
        "all layers of such a model keep whole contexts, as they do with several processes and where decode steps are "
        "captured.",
        group=MEMORY,
    )
    state_snapshots: int = option(
        32,
        "Snapshots of recurrent layers' states, kept for equal prompt prefixes; each is as large as the state of a "
        "running sequence. 0: models with such layers have no prefix cache.",
        group=MEMORY,
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Options that open the model to callers."""

    model_access: Literal["off", "local", "all"] = option(
        "local",
        "Who may call Forward, Sample, LoadModel and the other calls of ModelService that open the model: local: "
        "callers of a service on loopback; all: also callers of other addresses, with --model-access-token-file; off: "
        "nobody.",
        group=GRAPHS,
    )
    model_access_token_file: str | None = option(
        None,
        "Callers of these must send one of the bearer tokens in this file; a router sends the one in its "
        "--channel-token-file.",
        group=GRAPHS,
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class GenerationServiceConfig(
    ServerConfig,
    ModelOptions,
    AdapterOptions,
    EngineOptions,
    RequestBounds,
    GrammarOptions,
    JsonBounds,
    AccessOptions,
    GraphOptions,
    WeightUpdateOptions,
):
    """One model on one device, behind one gRPC server: the options of its parts, and those of the service."""

    port: int = option(GENERATION_PORT, "gRPC port; 0 takes a free one.", group="Network", minimum=0, maximum=65535)
    usual_metrics_port: ClassVar[int] = GENERATION_METRICS_PORT
    metrics_port: int | None = metrics_port_option(GENERATION_METRICS_PORT)
    vllm_engine: bool = option(
        False,
        "Serve vLLM's gRPC protocol (VllmEngine), too, and the metrics that endpoint pickers read, by vLLM's names: "
        "gateways that route to `vllm serve --grpc`, such as smg, then route here.",
        group="Network",
    )

    max_batch_tokens: int | None = option(
        None,
        "Tokens computed in one engine step; auto: the fewest with nearly the best throughput, measured at start.",
        group=BATCHING,
        minimum=1,
        metavar="INT|auto",
        parse=_batch_tokens,
    )
    target_step_seconds: float = option(
        0.5,
        "Longest step that --max-batch-tokens auto allows prompts; decoding sequences in the same step wait for it.",
        group=BATCHING,
        minimum=0.001,
    )
    tune_seconds: float = option(
        1.5,
        "Longest measurement of --max-batch-tokens auto at start; 0: no measurement, 512 tokens.",
        group=BATCHING,
        minimum=0,
    )
    capture_steps: bool = option(
        True,
        "Capture decode steps as graphs of the device, if it has such (CUDA, NPU): a step is one call. Turn it off to "
        "look for a fault, or to save the memory of the graphs.",
        group=BATCHING,
    )
    max_warm_up_steps: int = option(
        64, "Most decode steps of one WarmUp; its prompts fit one step.", group=BATCHING, minimum=1
    )
    max_pending_messages: int = option(
        1024, "Messages that wait for a stream's reader; with more, the stream is cut off.", group=BATCHING, minimum=1
    )

    max_items_in_flight: int = option(
        32,
        "Items of one Score or Embed in the engine at once; the others follow as these end.",
        group=REQUESTS,
        minimum=1,
    )

    max_watermark_calls: int = option(
        8, "DetectWatermark calls at once: one is computed, the others wait.", group=REQUESTS, minimum=1
    )
    max_live_embeds_bytes: int = option(
        256 << 20,
        "Bytes of inputs_embeds of all waiting and running requests, in the model's dtype; more are refused.",
        group=REQUESTS,
        minimum=0,
    )

    status_seconds: float = option(
        10.0,
        "Interval of the log line on load and throughput, while there is any; 0: none.",
        group=INSIDE,
        minimum=0,
    )
    trace_steps: str | None = option(
        None,
        "File to write a line to on every engine step, for tools/replay.py; %p is the process id.",
        group=INSIDE,
        metavar="FILE",
    )
    trace_bytes: int = option(256 << 20, "Largest size of that file.", group=INSIDE, minimum=1024)
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
            ("--compact-weights", self.compact_weights, COMPACT_WEIGHTS),
            ("--dtype", self.dtype, ("auto", *DTYPE_NAMES)),
            ("--quantization", self.quantization, ("auto", *QUANTIZATIONS, FP8)),
            ("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
            ("--model-route", self.model_route, ROUTES),
            ("--preemption", self.preemption, PREEMPTIONS),
        ):
            if value not in allowed:
                raise StartupError(f"{flag} must be one of {', '.join(allowed)}", flag=flag)
        if DEVICE_NAME.fullmatch(self.device) is None:
            raise StartupError(f"--device must be {DEVICE_WORDS}", flag="--device")
        self._check_ranks()
        if self.empty and self.model is not None:
            raise StartupError("--empty starts without a model: leave MODEL out", flag="--empty")
        if self.empty and not self.is_model_open:
            raise StartupError(
                "--empty needs --model-access: nothing could ever be loaded on this address", flag="--model-access"
            )
        if self.model_access == "all" and self.model_access_token_file is None and not is_loopback(self.host):
            raise StartupError(
                f"--model-access all on {self.host} needs --model-access-token-file, which says who may call",
                flag="--model-access-token-file",
            )
        if 0.0 < self.tenant_slowdown <= 1.0:
            raise StartupError("--tenant-slowdown must be 0 or above 1", flag="--tenant-slowdown")
        self.failpoint_orders()
        self.adapter_limits()
        self.write_weights_bytes()
        self.adapters_to_load()
        self.adapter_folder()
        self.allowed_stores()
        self.adapter_disk_bytes()
        self._check_kv_memory()
        parse_memory(self.assistant_kv_memory, flag="--assistant-kv-memory")
        if self.draft_head is not None and self.assistant_model is not None:
            raise StartupError(
                "--draft-head and --assistant-model: one of them drafts, so leave the other out", flag="--draft-head"
            )
        if parse_memory(self.host_kv_memory, flag="--host-kv-memory") == 0 and self.preemption == SWAP:
            raise StartupError(
                "--preemption swap needs a host pool: give it memory by --host-kv-memory", flag="--preemption"
            )
        self._check_kv_disk()
        if self.max_batch_tokens is not None and self.max_batch_tokens < self.max_running_sequences:
            raise StartupError(
                f"--max-batch-tokens {self.max_batch_tokens} is less than --max-running-sequences "
                f"{self.max_running_sequences}: every running sequence needs a token a step",
                flag="--max-batch-tokens",
            )

    def _check_kv_memory(self) -> None:
        """Refuse a pool that this machine can never hold; the rest is known once there are weights.

        Raises StartupError.
        """
        memory = parse_memory(self.kv_memory)
        is_host = self.device == "cpu" or (self.device == "auto" and not (may_have_gpu() or num_npus()))
        if memory is not None and is_host and memory > (total := host_memory()[0]):
            raise DoesNotFit(
                f"--kv-memory {format_size(memory)} is more than the {format_size(total)} of memory that this machine "
                "has",
                flag="--kv-memory",
            )

    def _check_kv_disk(self) -> None:
        """Refuse a file of blocks where nothing could come to it. Raises StartupError."""
        if self.kv_disk is None:
            return
        for is_wrong, flag in (
            (self.tensor_parallel > 1, "--tensor-parallel"),
            (not self.prefix_cache, "--no-prefix-cache"),
            (not self.host_prefix_cache, "--no-host-prefix-cache"),
        ):
            if is_wrong:
                raise StartupError(f"--kv-disk does not go with {flag}: leave one of them out", flag="--kv-disk")

    def niceness(self, *, on_cpu: bool) -> int:
        """Niceness to add to the threads that compute. `on_cpu`: the model is there.

        Where all cores are busy, an event loop that has to wait for one of them delays every answer and every refusal
        at once.
        """
        if self.compute_nice is not None:
            return self.compute_nice
        return _COMPUTE_NICE if on_cpu and self.tensor_parallel == 1 else 0

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

    def write_weights_bytes(self) -> int | None:
        """Return the most bytes of one WriteWeights; None: what memory holds. Raises StartupError."""
        return parse_memory(self.max_write_weights_memory, flag="--max-write-weights-memory")

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
            raise StartupError(f"--adapter-root {self.adapter_root}: not a folder", flag="--adapter-root")
        return root

    def allowed_stores(self) -> AllowedStores:
        """Return the stores of --adapter-store. Raises StartupError."""
        stores = AllowedStores(self.adapter_store)
        if stores and self.adapter_root is None:
            raise StartupError("--adapter-store needs --adapter-root", flag="--adapter-root")
        return stores

    def adapter_disk_bytes(self) -> int:
        """Return the most bytes of adapters of stores on disk. Raises StartupError."""
        size = parse_memory(self.adapter_disk, flag="--adapter-disk")
        if size is None or size < 0:
            raise StartupError("--adapter-disk must be a size such as 10GiB", flag="--adapter-disk")
        return size

    def grammar_limits(self) -> GrammarLimits:
        """Return the limits on constraints."""
        return GrammarLimits(**values_of(GrammarOptions, self), json=JsonBounds(**values_of(JsonBounds, self)))

    def request_limits(self) -> RequestLimits:
        """Return the limits that requests are checked against."""
        bounds = values_of(RequestBounds, self)
        for name in ("max_return_sequences", "max_beams"):
            bounds[name] = min(bounds[name], self.max_running_sequences)
        return RequestLimits(**bounds, remembers_outputs=self.ngram_memory_tenants > 0)
