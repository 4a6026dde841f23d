"""Trace context of W3C headers, and spans that cost nothing where there is no trace."""

from __future__ import annotations

import subprocess
import sys

import pytest
from penstock.common.tracing import current_span, exemplar, outgoing, parse_context, stage

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True), ("fe", False)])
def test_a_traceparent_names_trace_span_and_decision(flags: str, is_sampled: bool) -> None:
    context = parse_context(f"00-{TRACE}-{SPAN}-{flags}", "vendor=1")
    assert context is not None
    assert (context.trace_id, context.span_id, context.is_sampled) == (TRACE, SPAN, is_sampled)
    assert context.state == "vendor=1"
    assert context.traceparent == f"00-{TRACE}-{SPAN}-0{int(is_sampled)}"


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_a_malformed_traceparent_is_as_none(value: object) -> None:
    assert parse_context(value) is None


def test_a_later_version_may_have_more_fields() -> None:
    assert parse_context(f"01-{TRACE}-{SPAN}-01-more") is not None


@pytest.mark.parametrize("state", ["a" * 513, "a=\n", "ä=1", b"a=1"])
def test_a_tracestate_that_is_long_or_odd_is_dropped(state: object) -> None:
    context = parse_context(f"00-{TRACE}-{SPAN}-01", state)
    assert context is not None
    assert context.state == ""


def test_without_a_trace_a_stage_makes_no_span_and_calls_carry_nothing() -> None:
    with stage("admission") as span:
        assert span is None
        assert current_span.get() is None
    assert outgoing() == ()
    assert exemplar() == ""


@pytest.mark.parametrize(
    "module", ["penstock.router.app", "penstock.tokenizer.app", "penstock.generation.delivery.hub"]
)
def test_services_do_not_import_opentelemetry(module: str) -> None:
    code = f"import {module}, sys; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
