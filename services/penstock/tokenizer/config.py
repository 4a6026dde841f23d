"""Configuration of the tokenizer service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.common.config import ServerConfig, metrics_port_option
from penstock.common.named_models import MODEL_HELP
from penstock.common.options import option
from penstock.common.ports import TOKENIZER_METRICS_PORT, TOKENIZER_PORT

MODEL, WORKERS, TEMPLATES, LIMITS = "Model", "Workers", "Chat templates", "Limits"


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(ServerConfig):
    """Configuration of the tokenizer process, which holds no model weights and never imports torch."""

    port: int = option(TOKENIZER_PORT, "gRPC port; 0 takes a free one.", group="Network", minimum=0, maximum=65535)
    usual_metrics_port: ClassVar[int] = TOKENIZER_METRICS_PORT
    metrics_port: int | None = metrics_port_option(TOKENIZER_METRICS_PORT)
    processes: int = option(
        1,
        "Worker processes that share the port (Linux). Connections are spread over them, and one that dies is "
        "replaced. A connection uses the threads and template processes of one of them.",
        group="Processes",
        minimum=1,
        maximum=256,
    )
    model: str | None = option(None, MODEL_HELP, group=MODEL)
    served_model_name: tuple[str, ...] = option(
        (), "Name, or several names, that requests use; MODEL's own when left out.", group=MODEL, metavar="NAME"
    )
    allow_control_tokens_in_content: bool = option(
        False, "Encode a control token that is spelled out in text as that token, as transformers does.", group=MODEL
    )
    load_timeout_seconds: float = option(120.0, "Time that loading the tokenizer may take.", group=MODEL, minimum=1)
    cached_tokenizers: int = option(
        8,
        "Large tokenizers, as they were read, that are kept in the user's cache folder, some 15 MB each: a later start "
        "does not read them again. 0 keeps and uses none.",
        group=MODEL,
        minimum=0,
    )

    workers: int = option(2, "Threads that encode and decode; each has a tokenizer.", group=WORKERS, minimum=1)
    large_workers: int = option(1, "Threads for large texts, so that small ones never wait.", group=WORKERS, minimum=1)
    large_text_bytes: int = option(16 << 10, "Requests of this size or more are large.", group=WORKERS, minimum=1)
    inline_encode_bytes: int = option(
        2 << 10,
        "Encode and ApplyChatTemplate encode texts up to this size on the event loop: handing them to a thread takes "
        "longer.",
        group=WORKERS,
        minimum=0,
    )
    inline_decode_bytes: int = option(
        32 << 10, "DecodeStream messages up to this size are handled on the event loop.", group=WORKERS, minimum=0
    )

    template_processes: int = option(2, "Processes that render chat templates.", group=TEMPLATES, minimum=1)
    template_pipeline: int = option(
        4, "Requests that one of these processes may hold before it has answered the first.", group=TEMPLATES, minimum=1
    )
    template_timeout_seconds: float = option(
        2.0, "A template that runs longer is killed, and the request refused.", group=TEMPLATES, minimum=0.05
    )
    template_memory_bytes: int = option(
        256 << 20, "Memory that rendering may take beyond that of the idle process.", group=TEMPLATES, minimum=1 << 20
    )

    max_queued_requests: int = option(1024, "Requests waiting for a worker; more are refused.", group=LIMITS, minimum=1)
    max_text_bytes: int = option(2 << 20, "Size of one request's texts together.", group=LIMITS, minimum=1)
    max_batch: int = option(256, "Texts or id lists in one request.", group=LIMITS, minimum=1)
    max_messages: int = option(4096, "Messages in one conversation.", group=LIMITS, minimum=1)
    max_decode_ids: int = option(1 << 20, "Ids in one Decode request.", group=LIMITS, minimum=1)
    max_sequences: int = option(4096, "Sequences being decoded on one DecodeStream.", group=LIMITS, minimum=1)
    max_stop_strings: int = option(32, "Stop strings of one sequence.", group=LIMITS, minimum=0)
    max_stop_string_chars: int = option(256, "Length of one stop string.", group=LIMITS, minimum=1)
