"""Configuration of the generation service. Light: the command line imports it for --help."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.config import GENERATION_METRICS_PORT, GENERATION_PORT, ServerConfig, option
from penstock.common.errors import StartupError
from penstock.generation.devices.memory import parse_memory
from penstock.generation.engine.config import EngineConfig
from penstock.generation.requested import RequestLimits

MODEL, MEMORY, BATCHING, REQUESTS = "Model", "KV memory", "Batching", "Limits of a request"


@dataclass(frozen=True, kw_only=True)
class GenerationServiceConfig(ServerConfig):
    """One model on one device, behind one gRPC server."""

    port: int = option(GENERATION_PORT, "gRPC port; 0 takes a free one.", group="Network", minimum=0, maximum=65535)
    metrics_port: int = option(
        GENERATION_METRICS_PORT,
        "Port of the Prometheus endpoint; 0 takes a free one, -1 has none.",
        group="Network",
        minimum=-1,
        maximum=65535,
    )

    model: str | None = option(None, "Folder or hub id of the model; the embedded one when left out.", group=MODEL)
    served_model_name: str | None = option(None, "Name that callers use; by default the folder's own.", group=MODEL)
    device: str = option("auto", "Where the model runs: auto or cpu.", group=MODEL)
    dtype: str = option(
        "auto", "float32, bfloat16, float16, or auto: the checkpoint's where it runs well.", group=MODEL
    )
    threads: int | None = option(
        None, "Threads of the model's kernels; all cores when left out.", group=MODEL, minimum=1
    )

    kv_memory: str = option("auto", "Memory of the KV pool, such as 2GiB; auto: a share of what is left.", group=MEMORY)
    block_size: int = option(16, "Tokens of one KV block.", group=MEMORY, minimum=1, maximum=1024)
    max_context: int | None = option(
        None, "Longest prompt and output together; by default the model's.", group=MEMORY, minimum=2
    )
    prefix_cache: bool = option(EngineConfig.prefix_cache, "Share the blocks of equal prompt beginnings.", group=MEMORY)

    max_batch_tokens: int = option(
        EngineConfig.max_batch_tokens, "Tokens computed in one engine step.", group=BATCHING, minimum=1
    )
    max_running_sequences: int = option(
        EngineConfig.max_running_sequences, "Sequences computed in one engine step.", group=BATCHING, minimum=1
    )
    max_queued_requests: int = option(
        EngineConfig.max_queued_requests,
        "Requests waiting to be scheduled; more are refused.",
        group=BATCHING,
        minimum=1,
    )
    max_pending_messages: int = option(
        1024, "Messages that wait for a stream's reader; past that it is cut off.", group=BATCHING, minimum=1
    )

    max_return_sequences: int = option(
        RequestLimits.max_return_sequences,
        "Most sequences of one request; never more than run.",
        group=REQUESTS,
        minimum=1,
    )
    max_stop_strings: int = option(
        RequestLimits.max_stop_strings, "Most stop strings of one request.", group=REQUESTS, minimum=0
    )
    max_stop_string_chars: int = option(
        RequestLimits.max_stop_string_chars, "Longest stop string.", group=REQUESTS, minimum=1
    )
    max_stop_token_sequences: int = option(
        RequestLimits.max_stop_token_sequences, "Most stop id sequences of one request.", group=REQUESTS, minimum=0
    )
    max_logit_bias: int = option(RequestLimits.max_logit_bias, "Most entries of logit_bias.", group=REQUESTS, minimum=0)

    def validate(self) -> None:
        """Raises StartupError for options that do not go together."""
        super().validate()
        parse_memory(self.kv_memory)
        if self.max_batch_tokens < self.max_running_sequences:
            raise StartupError(
                f"--max-batch-tokens {self.max_batch_tokens} is less than --max-running-sequences "
                f"{self.max_running_sequences}: every running sequence needs a token a step",
                flag="--max-batch-tokens",
            )

    def request_limits(self) -> RequestLimits:
        """Bounds that requests are checked against."""
        return RequestLimits(
            max_return_sequences=min(self.max_return_sequences, self.max_running_sequences),
            max_stop_strings=self.max_stop_strings,
            max_stop_string_chars=self.max_stop_string_chars,
            max_stop_token_sequences=self.max_stop_token_sequences,
            max_logit_bias=self.max_logit_bias,
        )
