"""`penstock debug trace`: spans of a file as a tree, in the terminal and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from penstock.cli.trace import choose, in_tree, read_spans, run_trace, to_svg
from penstock.common.errors import StartupError

ONE, TWO = "a" * 32, "b" * 32


def line(service: str, *spans: dict[str, Any]) -> str:
    """One line of OTLP/JSON."""
    name = [{"key": "service.name", "value": {"stringValue": service}}]
    return json.dumps({"resourceSpans": [{"resource": {"attributes": name}, "scopeSpans": [{"spans": list(spans)}]}]})


def span(trace: str, number: int, parent: int, name: str, begin: int, end: int, **more: Any) -> dict[str, Any]:
    """One span; times in milliseconds."""
    times = {"startTimeUnixNano": str(begin * 10**6), "endTimeUnixNano": str(end * 10**6)}
    ids = {"traceId": trace, "spanId": f"{number:016x}", "parentSpanId": f"{parent:016x}"}
    return {**ids, "name": name, **times, **more}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two traces; the later one of two services, its spans out of order, below a caller's span."""
    lost = {"status": {"code": 2}, "attributes": [{"key": "error.type", "value": {"stringValue": "BACKEND_LOST"}}]}
    tokens = {"attributes": [{"key": "gen_ai.usage.output_tokens", "value": {"intValue": "12"}}]}
    made = tmp_path / "traces.jsonl"
    lines = [
        line("penstock-router", span(ONE, 1, 0, "penstock.v1.TextService/Generate", 0, 5)),
        line("penstock-generation", span(TWO, 12, 11, "generate", 35, 90, **tokens)),
        line(
            "penstock-router",
            span(TWO, 11, 9, "attempt 2", 30, 95),
            span(TWO, 10, 9, "attempt 1", 12, 30, **lost),
            span(TWO, 9, 7, "penstock.v1.TextService/Chat <&>", 10, 100),
        ),
    ]
    made.write_text("\n".join(lines) + "\n")
    return made


def test_children_stand_below_their_parents_in_order(path: Path) -> None:
    tree = in_tree(choose(read_spans(str(path)), None, str(path)))
    assert [(depth, one.name) for depth, one in tree] == [
        (0, "penstock.v1.TextService/Chat <&>"),
        (1, "attempt 1"),
        (1, "attempt 2"),
        (2, "generate"),
    ]


def test_the_terminal_shows_times_and_facts(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_trace({"path": str(path)})
    shown = capsys.readouterr().out
    assert f"trace {TWO}: 4 spans, 90.0 ms" in shown
    assert "BACKEND_LOST" in shown


def test_a_trace_is_found_by_the_beginning_of_its_id(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_trace({"path": str(path), "trace_id": "AAA"})
    assert f"trace {ONE}: 1 spans" in capsys.readouterr().out
    with pytest.raises(StartupError, match="no trace"):
        run_trace({"path": str(path), "trace_id": "c"})


def test_the_picture_has_a_bar_for_each_span(path: Path, tmp_path: Path) -> None:
    svg = tmp_path / "trace.svg"
    run_trace({"path": str(path), "svg": str(svg)})
    picture = ElementTree.fromstring(svg.read_text())
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "TextService/Chat <&>" in texts
    assert "55.0 ms  tokens 12" in texts
    # The page, two services, four spans.
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}rect"))) == 7
    assert to_svg(choose(read_spans(str(path)), TWO, "")) == svg.read_text()


@pytest.mark.parametrize("text", ["{", "{}", '{"resourceSpans": [{}]}', "[]", "\udcff"])
def test_a_file_that_has_no_traces_is_told_by_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StartupError, match=r"line 1 is not traces|not text"):
        read_spans(str(path))


def test_a_file_that_is_not_there_or_empty_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        run_trace({"path": str(tmp_path / "none")})
    (tmp_path / "empty").touch()
    with pytest.raises(StartupError, match="no traces"):
        run_trace({"path": str(tmp_path / "empty")})
