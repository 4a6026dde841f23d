"""Spans of a request at the router: an attempt at a backend, and the facts of its call's own span.

Attributes have OpenTelemetry's names (https://opentelemetry.io/docs/specs/semconv/gen-ai/) or begin with `penstock.`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.common.tracing import Attribute, Span, SpanKind, current_span
from penstock.v1 import common_pb2, config_pb2, generation_pb2

if TYPE_CHECKING:
    from penstock.router.requests.request_state import RequestState

# Option -> attribute; options not given are absent.
_OPTIONS = {
    "max_new_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "num_return_sequences": "gen_ai.request.choice.count",
}
# The conventions' words for ends of sequences; other ends keep their own.
_REASONS = {
    common_pb2.FINISH_REASON_STOP_EOS: "stop",
    common_pb2.FINISH_REASON_STOP_TOKEN: "stop",
    common_pb2.FINISH_REASON_STOP_STRING: "stop",
}


def describe_request(operation: str, model: str, adapter: str, config: config_pb2.GenerationConfig) -> None:
    """Put the model and the common options on the span of the call. `operation`: "chat" or "text_completion"."""
    span = current_span.get()
    if span is None or not span.context.is_sampled:
        return
    options = {
        attribute: getattr(config, name)
        for name, attribute in _OPTIONS.items()
        if config.HasField(name)  # type: ignore[arg-type]
    }
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": model,
        **options,
    }
    if adapter:
        attributes["penstock.adapter"] = adapter
    span.set(attributes)


def describe_answer(state: RequestState, finished: generation_pb2.Finished) -> None:
    """Put usage and ends on the span of the call, and add the time from the first text to the last."""
    span = current_span.get()
    if span is None or not span.context.is_sampled:
        return
    usage, now = finished.usage, time.monotonic()
    attributes: dict[str, Attribute] = {
        "gen_ai.response.model": state.spec.model,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": [reason_name(result.finish_reason) for result in finished.sequences],
        "penstock.attempts": finished.attempts,
        "penstock.moves": state.moves,
    }
    first = state.timings.first_token_at
    if first is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first - state.timings.received_at
        # Text comes step by step: the span covers its whole time, `busy_seconds` is the work.
        span.add("detokenize", first, now, {"penstock.busy_seconds": state.detokenize_seconds})
    span.set(attributes)


def reason_name(reason: common_pb2.FinishReason.ValueType) -> str:
    """Return the conventions' word for a finish reason."""
    return _REASONS.get(reason) or common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def begin_attempt(request: generation_pb2.GenerateRequest, backend: str, resumed_tokens: int) -> Span | None:
    """Begin the span of an attempt, and name it in the request, so that the backend's spans are its children.

    None without a kept trace; a trace that is not kept is still passed on.
    """
    span = current_span.get()
    if span is None:
        return None
    if span.context.is_sampled:
        number = request.attempt_epoch + 1
        attributes: dict[str, Attribute] = {
            "server.address": backend,
            "penstock.attempt": number,
            "penstock.resumed_tokens": resumed_tokens,
        }
        span = span.start(f"attempt {number}", SpanKind.CLIENT, attributes)
    request.traceparent, request.tracestate = span.context.traceparent, span.context.state
    return span if span.context.is_sampled else None
