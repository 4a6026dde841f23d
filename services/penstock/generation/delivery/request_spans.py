"""Spans of a request at the generation service. Its stages become spans when it ends, from the times of its report."""

from __future__ import annotations

from penstock.common.errors import PenstockError
from penstock.common.tracing import Attribute, Span, SpanKind, TraceContext, Tracer
from penstock.generation.core.request import FinishedOutput, FinishReason, Request

# Finish reasons by the words of OpenTelemetry's conventions; others keep their own.
_REASONS = {FinishReason.STOP_EOS: "stop", FinishReason.STOP_TOKEN: "stop", FinishReason.STOP_STRING: "stop"}
_NAME = "generate"


def begin_in_session(tracer: Tracer | None, parent: TraceContext | None) -> Span | None:
    """Begin the span of a request that came on a session; None: it belongs to no sampled trace."""
    if tracer is None or parent is None or not parent.is_sampled:
        return None
    return tracer.start(_NAME, SpanKind.SERVER, parent)


def begin_in_call(call: Span | None) -> Span | None:
    """Begin the span of a request that has a call of its own."""
    return call.start(_NAME) if call is not None and call.context.is_sampled else None


def end_refused(span: Span | None, error: PenstockError | None) -> None:
    """End the span of a request that was refused, or left unfinished. None: its reader left."""
    if span is not None:
        span.fail_by(error)
        span.end()


def end_finished(request: Request, model: str, finished: FinishedOutput) -> None:
    """End the span of a request by its last event, with a child for each stage that it reached."""
    span = request.span
    if span is None:
        return
    arrival, timings = request.arrival_time, finished.timings
    at = end = arrival + timings.total
    if timings.queue is None:
        span.add("queue", arrival, end)
    else:
        at = arrival + timings.queue
        span.add("queue", arrival, at)
        prefill = {
            "gen_ai.usage.input_tokens": finished.prompt_tokens,
            "penstock.cached_tokens": finished.cached_tokens,
        }
        if timings.prefill is None:
            span.add("prefill", at, end, prefill)
        else:
            first = at + timings.prefill
            span.add("prefill", at, first, prefill)
            span.add("decode", first, end, {"gen_ai.usage.output_tokens": finished.completion_tokens})
    attributes: dict[str, Attribute] = {
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": finished.prompt_tokens,
        "gen_ai.usage.output_tokens": finished.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": finished.cached_tokens,
        "gen_ai.response.finish_reasons": [
            _REASONS.get(one.reason, one.reason.name.lower()) for one in finished.sequences
        ],
        "penstock.attempt": request.attempt_epoch + 1,
    }
    if finished.accepted_draft_tokens or finished.rejected_draft_tokens:
        attributes["penstock.accepted_draft_tokens"] = finished.accepted_draft_tokens
        attributes["penstock.rejected_draft_tokens"] = finished.rejected_draft_tokens
    if request.adapter is not None:
        attributes["penstock.adapter"] = request.adapter.name
    span.set(attributes)
    if finished.error is not None:
        span.fail_by(finished.error)
    span.end(end)
