"""Configuration of the router: one home for each default. It imports nothing heavy, since the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from penstock.common.config import ChannelConfig, ServerConfig, metrics_port_option
from penstock.common.errors import StartupError
from penstock.common.options import option
from penstock.common.ports import GENERATION_PORT, ROUTER_METRICS_PORT, ROUTER_PORT, TOKENIZER_PORT
from penstock.database.transactions import TEMPORARY
from penstock.router.backend_targets import check_target
from penstock.router.key_options import KeyOptions

CHATS = "Tool calls and reasoning"
SERVICES, ADMISSION, ROUTING, FAILURE = "Other services", "Admission", "Routing", "Failure handling"
STREAMING, MODELS = "Streaming", "Several models"


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServerConfig, ChannelConfig, KeyOptions):
    """Configuration of `penstock serve router`."""

    port: int = option(ROUTER_PORT, "gRPC port; 0 takes a free one.", group="Network", minimum=0, maximum=65535)
    usual_metrics_port: ClassVar[int] = ROUTER_METRICS_PORT
    metrics_port: int | None = metrics_port_option(ROUTER_METRICS_PORT)
    processes: int = option(
        1,
        "Worker processes that share the port (Linux). Connections are spread over them, and one that dies is "
        "replaced. Each admits requests, and remembers prefixes and sessions, on its own.",
        group="Processes",
        minimum=1,
        maximum=256,
    )

    tokenizer: tuple[str, ...] = option(
        (f"127.0.0.1:{TOKENIZER_PORT}",),
        "host:port of the tokenizer. With several, the first that answers is used; the others stand by.",
        group=SERVICES,
        metavar="HOST:PORT,…",
    )
    backend: tuple[str, ...] = option(
        (f"127.0.0.1:{GENERATION_PORT}",),
        "host:port of each generation backend; a name with several addresses is one backend per address. "
        "vllm://host:port is a vLLM (`vllm serve --grpc`), sglang://host:port an SGLang. "
        "k8s://NAMESPACE/SERVICE:PORT has the ready endpoints of a Kubernetes service, vllm+k8s:// those of vLLMs.",
        group=SERVICES,
        metavar="HOST:PORT,…",
    )
    models: str | None = option(
        None,
        "File of models (TOML), in place of --tokenizer and --backend: several models, each with its tokenizer, "
        "aliases, weights between versions, models that are loaded on demand. It is read again when it changes.",
        group=MODELS,
        metavar="FILE",
    )
    max_models: int = option(64, "Models of one file.", group=MODELS, minimum=1)
    models_interval_seconds: float = option(
        5.0, "Interval between looks at the file of models, for changes.", group=MODELS, minimum=0.05
    )
    model_idle_seconds: float = option(
        600.0,
        "A model on demand that no request used for this long is unloaded; 0: only when another one needs its place.",
        group=MODELS,
        minimum=0.0,
    )
    model_turn_seconds: float = option(
        30.0,
        "Time that a model on demand keeps its place while requests use it and others wait for theirs. Then it "
        "finishes its requests and leaves.",
        group=MODELS,
        minimum=0.0,
    )
    model_load_seconds: float = option(
        600.0, "Time for a model on demand to find a place, and to load.", group=MODELS, minimum=0.1
    )
    max_model_waiting: int = option(
        256, "Requests that wait for one model on demand to load; more are refused.", group=MODELS, minimum=1
    )
    engine_poll_seconds: float = option(
        0.5, "Interval between questions to a vLLM or SGLang for its health and load.", group=SERVICES, minimum=0.01
    )
    engine_silence_seconds: float = option(
        120.0,
        "A vLLM or SGLang is lost when it has requests and sends no token for this long, although it tells that it is "
        "healthy. It sends no heartbeats: keep this above the time of its longest prefill.",
        group=SERVICES,
        minimum=0.05,
    )
    max_tokenizer_bytes: int = option(
        256 << 20, "Largest tokenizer files that a vLLM or SGLang may send.", group=SERVICES, minimum=1024
    )
    admin_token_file: str | None = option(
        None,
        "Callers of GenerationAdminService and ModelService (both are forwarded to a backend) and of "
        "RouterAdminService must send one of the bearer tokens in this file; no other token is accepted. Without this "
        "file, a loopback address checks these calls against --auth-token-file, and any other address refuses them.",
        group="TLS and authentication",
        metavar="FILE",
    )
    model_token_file: str | None = option(
        None,
        "Callers of the ModelService calls that open the model (Forward, Sample and the like) must send one of the "
        "bearer tokens in this file; no other token is accepted. Without this file, a loopback address checks these "
        "calls as it checks GetModelInfo, and any other address refuses them.",
        group="TLS and authentication",
        metavar="FILE",
    )
    resolve_interval_seconds: float = option(
        5.0, "Interval between DNS lookups of the names in --backend.", group=SERVICES, minimum=0.05
    )
    kubernetes_api: str | None = option(
        None,
        "Kubernetes API that k8s:// backends are read from: https://HOST:PORT, or http:// of a proxy on this machine "
        "(kubectl proxy). By default that of the cluster that the router runs in.",
        group=SERVICES,
        metavar="URL",
    )
    kubernetes_account: str = option(
        "/var/run/secrets/kubernetes.io/serviceaccount",
        "Folder with token, ca.crt and namespace of the service account that reads endpoints.",
        group=SERVICES,
        metavar="DIR",
    )
    kubernetes_watch_seconds: float = option(
        60.0, "Length of one watch of a service's endpoints; the next one follows.", group=SERVICES, minimum=1.0
    )
    kubernetes_retry_seconds: float = option(
        15.0,
        "Longest wait before the Kubernetes API is asked again; waits double up to this.",
        group=SERVICES,
        minimum=0.001,
    )
    max_endpoints_bytes: int = option(
        8 << 20, "Largest list of a service's endpoints that the Kubernetes API may send.", group=SERVICES, minimum=1024
    )
    start_timeout_seconds: float = option(
        120.0,
        "Time for the tokenizer and one backend to become ready; then the router gives up.",
        group=SERVICES,
        minimum=0.1,
    )
    connect_timeout_seconds: float = option(
        5.0, "Time for one attempt to connect to a service.", group=SERVICES, minimum=0.05
    )
    reconnect_min_seconds: float = option(0.1, "First wait before connecting again.", group=SERVICES, minimum=0.001)
    reconnect_max_seconds: float = option(
        1.0, "Longest wait before connecting again; waits double up to this.", group=SERVICES, minimum=0.001
    )

    max_live_requests: int = option(1024, "Requests streaming at once; more wait.", group=ADMISSION, minimum=1)
    max_waiting_requests: int = option(
        1024, "Requests waiting for a place; more are refused at once.", group=ADMISSION, minimum=0
    )
    tenant_share: float = option(
        0.75,
        "Share of --max-live-requests that one tenant may have, where --auth-token-file or --keys-file tells tenants "
        "apart.",
        group=ADMISSION,
        minimum=0.01,
        maximum=1.0,
    )
    idle_share: float = option(
        0.25,
        "Share of --max-live-requests that requests of idle capacity may have; others come before them.",
        group=ADMISSION,
        minimum=0.01,
        maximum=1.0,
    )
    retry_after_seconds: float = option(
        1.0, "Shortest wait that a refused caller is told.", group=ADMISSION, minimum=0.0
    )
    max_request_id_chars: int = option(128, "Longest request_id.", group=ADMISSION, minimum=1)
    max_session_id_chars: int = option(256, "Longest session_id or cache_salt.", group=ADMISSION, minimum=1)
    max_options_bytes: int = option(
        1 << 20,
        "Largest options of one request (config, stop, output and constraint; the negative prompt does not count).",
        group=ADMISSION,
        minimum=1024,
    )
    max_request_bytes: int = option(
        4 << 20,
        "Largest request of a client. Parsing a request holds up every stream of the process; a hostile one of 16 MiB "
        "takes over a second. Raise it to send more text in one Score or Embed (up to --max-message-bytes).",
        group=ADMISSION,
        minimum=1024,
    )
    max_items: int = option(
        256,
        "Most items of one Score, or texts of one Embed, Tokenize or Detokenize. Backends have their own limit.",
        group=ADMISSION,
        minimum=1,
    )
    kserve_stream_requests: int = option(
        64,
        "Requests of one ModelStreamInfer that are served at once; more wait in the connection.",
        group=ADMISSION,
        minimum=1,
    )
    allow_control_tokens_in_text: bool = option(
        False,
        "Encode a control token (<|im_end|>) that is spelled out in Generate's text as that token, as transformers "
        "does.",
        group=ADMISSION,
    )

    load_interval_seconds: float = option(
        0.1, "Shortest interval between load reports of a backend.", group=ROUTING, minimum=0.01
    )
    affinity_slack: float = option(
        4.0,
        "A backend with the cached prefix is preferred while it has at most this many requests more than "
        "--affinity-factor times the load of the idlest backend.",
        group=ROUTING,
        minimum=0.0,
    )
    affinity_factor: float = option(
        1.5, "Multiple of the idlest backend's load; see --affinity-slack.", group=ROUTING, minimum=1.0
    )
    max_prefix_blocks: int = option(512, "Blocks at the head of a prompt that are compared.", group=ROUTING, minimum=0)
    prefix_reports: bool = option(
        True,
        "Let backends tell which prefixes they have cached. Without, and of backends that do not tell, the router "
        "knows only what it sent there itself.",
        group=ROUTING,
    )
    max_known_blocks: int = option(
        65536,
        "Blocks remembered for each backend: of those that it told, and of those that were sent there.",
        group=ROUTING,
        minimum=1,
    )
    max_compared_backends: int = option(
        8,
        "Backends that are compared for a request, taken in turn from more; beside them that of its session, and "
        "those that got a prefix of its prompt or told of it.",
        group=ROUTING,
        minimum=2,
    )
    max_sessions: int = option(65536, "session_ids remembered.", group=ROUTING, minimum=1)
    adapter_loading: bool = option(
        False,
        "Ask a backend to load the adapter of a request when no usable backend has it. The folder, below the backend's "
        "--adapter-root, is the one that another backend loaded the adapter from, or the one with the adapter's name. "
        "With this option, callers choose what is loaded.",
        group=ROUTING,
    )
    adapter_load_seconds: float = option(
        60.0, "Time for such a load, over all backends that are tried.", group=ROUTING, minimum=0.01
    )
    max_adapter_loads: int = option(
        8,
        "Such loads at once, each of a different adapter; a request for one more is refused.",
        group=ROUTING,
        minimum=1,
    )

    max_attempts: int = option(3, "Backends tried before the first token.", group=FAILURE, minimum=1)
    max_moves: int = option(
        2, "Times that a stream may move to another backend after it has begun.", group=FAILURE, minimum=0
    )
    retry_budget_ratio: float = option(
        0.1, "Retries before the first token, as a share of requests.", group=FAILURE, minimum=0.0
    )
    retry_budget_burst: int = option(
        100, "Retries allowed in a burst, such as when a backend dies.", group=FAILURE, minimum=0
    )
    failover_wait_seconds: float = option(
        30.0,
        "Time that a lost request waits for another backend. It waits for --start-timeout-seconds where a backend's "
        "process is there but does not serve yet, or where another request was to blame.",
        group=FAILURE,
        minimum=0.0,
    )
    return_wait_seconds: float = option(
        5.0,
        "Time that new requests wait where the last ready backend of their model went, as in a rolling restart. After "
        "it they are refused at once until one is ready. 0: no wait.",
        group=FAILURE,
        minimum=0.0,
    )
    stall_timeout_seconds: float = option(
        30.0,
        "A backend is lost when a session with requests is silent for this long, or when calls wait this long while "
        "its engine makes no progress. It reports progress every --heartbeat-seconds, even during a long step.",
        group=FAILURE,
        minimum=0.05,
    )
    death_verdict_seconds: float = option(
        2.0,
        "A backend that lost its connection and cannot be reached for this long counts as crashed; a request may be "
        "to blame.",
        group=FAILURE,
        minimum=0.01,
    )
    isolation_wait_seconds: float = option(
        5.0,
        "Time that a request lost with its backend waits for a backend of its own, apart from the other requests that "
        "ran there; then it moves to one with them. 0: it moves at once.",
        group=FAILURE,
        minimum=0.0,
    )
    isolation_tokens: int = option(
        4, "The next such request follows when the backend has survived this many tokens.", group=FAILURE, minimum=1
    )
    quarantine_wait_seconds: float = option(
        30.0,
        "How long a request waits for its probation, apart from others that ran on the same crashed backends, while "
        "none of them gets on.",
        group=FAILURE,
        minimum=0.0,
    )
    quarantine_tokens: int = option(
        32, "Tokens after which such a probation is passed, if the backend lives.", group=FAILURE, minimum=1
    )
    eject_consecutive_failures: int = option(
        5, "Failures in a row after which a backend is ejected; 0: never.", group=FAILURE, minimum=0
    )
    eject_failure_share: float = option(
        0.3,
        "A backend is ejected when its share of failures exceeds that of its peers by this; 0: never.",
        group=FAILURE,
        minimum=0.0,
        maximum=1.0,
    )
    eject_min_requests: int = option(
        10, "Attempts within the window below which the share of failures does not count.", group=FAILURE, minimum=1
    )
    eject_window_seconds: float = option(10.0, "Window in which failures are counted.", group=FAILURE, minimum=0.1)
    eject_seconds: float = option(
        5.0,
        "Length of the first ejection, give or take a fifth; each further one is twice as long.",
        group=FAILURE,
        minimum=0.01,
    )
    eject_max_seconds: float = option(
        30.0,
        "Longest ejection: a backend that has recovered may get no requests for this long.",
        group=FAILURE,
        minimum=0.01,
    )
    eject_max_share: float = option(
        0.5,
        "Share of a model's ready backends that may be ejected at once; one always may, the last never.",
        group=FAILURE,
        minimum=0.0,
        maximum=1.0,
    )
    probe_timeout_seconds: float = option(
        10.0,
        "Time for a request that probes an ejected backend to begin.",
        group=FAILURE,
        minimum=0.01,
    )
    probes: int = option(3, "Probes, one at a time, that a backend must pass to come back.", group=FAILURE, minimum=1)
    tokenizer_wait_seconds: float = option(
        30.0,
        "Time that requests wait for a lost tokenizer, its silence before that included. They wait for "
        "--start-timeout-seconds where the tokenizer's process is there but does not serve yet.",
        group=FAILURE,
        minimum=0.0,
    )
    tokenizer_stall_seconds: float = option(
        5.0,
        "A tokenizer is lost when it leaves a message of a stream unanswered for this long, or a call, if it does not "
        "answer pings either. Keep this below --tokenizer-wait-seconds: the rest of that time is for another one.",
        group=FAILURE,
        minimum=0.05,
    )

    tool_format: Literal[
        "auto",
        "harmony",
        "gemma4",
        "deepseek_v4",
        "deepseek_v32",
        "deepseek_v3",
        "deepseek_v31",
        "kimi_k3",
        "kimi_k2",
        "minimax_m2",
        "seed_oss",
        "glm4",
        "qwen3_coder",
        "mistral",
        "phi4",
        "lfm2",
        "granite",
        "llama4",
        "llama3",
        "hermes",
    ] = option("auto", "Format of the model's tool calls; auto: as its chat template has it.", group=CHATS)
    reasoning_format: Literal[
        "auto",
        "none",
        "gemma",
        "mistral",
        "seed",
        "kimi_k3",
        "kimi",
        "granite",
        "think",
    ] = option(
        "auto",
        "Format of the model's reasoning; auto: as its chat template has it; none: it stays in the text.",
        group=CHATS,
    )

    effort_minimal_tokens: int = option(
        512,
        "Budget of thinking of reasoning_effort minimal, where the chat template does not read the effort; 0: none.",
        group=CHATS,
        minimum=0,
    )
    effort_low_tokens: int = option(2048, "The same of reasoning_effort low; 0: none.", group=CHATS, minimum=0)
    effort_medium_tokens: int = option(8192, "The same of reasoning_effort medium; 0: none.", group=CHATS, minimum=0)
    effort_high_tokens: int = option(0, "The same of reasoning_effort high; 0: none.", group=CHATS, minimum=0)

    hold_tool_calls: bool = option(
        True,
        "Hold the calls that a model chooses to make to a grammar, from their first marker on: names of the request's "
        "tools, arguments that are JSON, or obey the schema of a strict tool.",
        group=CHATS,
    )

    max_buffered_bytes: int = option(
        256 << 10,
        "Output kept for a slow reader; a reader that falls further behind is cut off.",
        group=STREAMING,
        minimum=1024,
    )
    max_buffered_tensor_bytes: int = option(
        64 << 20,
        "The same for streams with output_scores, output_logits, output_hidden_states or output_attentions, and for "
        "log-probabilities that come in bursts (beams, stream_interval).",
        group=STREAMING,
        minimum=1024,
    )
    detokenize: Literal["auto", "tokenizer"] = option(
        "auto",
        "auto: the router decodes ids with the tokenizer's table where the decoder is one (byte-level BPE, byte "
        "fallback); tokenizer: the tokenizer always decodes them.",
        group=STREAMING,
    )
    max_outstanding_messages: int = option(
        8192, "Messages that the tokenizer may leave unanswered.", group=STREAMING, minimum=16
    )
    slow_reader_grace_seconds: float = option(
        30.0,
        "A reader is disconnected when its request is over and it takes no message for this long.",
        group=STREAMING,
        minimum=0.0,
    )
    writes_per_turn: int = option(
        16, "Deltas written before backends are read again; the others are merged.", group=STREAMING, minimum=1
    )
    max_gather_seconds: float = option(
        0.1,
        "Longest time for which a stream's tokens are gathered for one message while the event loop is behind. 0: they "
        "are sent as they come.",
        group=STREAMING,
        minimum=0.0,
    )
    max_tool_calls: int = option(32, "Tool calls of one answer; one more ends it.", group=STREAMING, minimum=1)
    max_sequences: int = option(64, "Returned sequences of one request.", group=STREAMING, minimum=1)
    max_token_texts: int = option(65536, "Token texts that are remembered for logprobs.", group=STREAMING, minimum=64)

    @property
    def effort_budgets(self) -> dict[str, int | None]:
        """Budgets of thinking of the efforts; None: the effort has none."""
        return {
            "none": 0,
            "minimal": self.effort_minimal_tokens or None,
            "low": self.effort_low_tokens or None,
            "medium": self.effort_medium_tokens or None,
            "high": self.effort_high_tokens or None,
        }

    @property
    def receive_limit_bytes(self) -> int:
        """Largest message of clients, in bytes; backends and tokenizer send up to max_message_bytes."""
        return min(self.max_request_bytes, self.max_message_bytes)

    def validate(self) -> None:
        """Raises StartupError naming the flag."""
        super().validate()
        if self.models is not None and self.processes > 1:
            raise StartupError(
                "--models needs --processes 1: each process would load and unload models on its own. Run several "
                "routers with files of their own for more",
                flag="--models",
            )
        if self.keys_file is not None and self.processes > 1 and self.ledger == TEMPORARY:
            raise StartupError(
                "--processes with --keys-file needs --ledger: without it each process would count a key's day on its "
                "own",
                flag="--ledger",
            )
        for flag, targets in (("--tokenizer", self.tokenizer), ("--backend", self.backend)):
            if not targets and self.models is None:
                raise StartupError(f"{flag} needs at least one host:port", flag=flag)
            for target in targets:
                check_target(target, flag, has_schemes=flag == "--backend")
