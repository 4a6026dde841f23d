"""Write protos/conformance/v1.json, the vectors that every client passes; `--check` only compares.

python tools/make_conformance.py [--check]

protos/conformance/README.md describes the file. Expected values are written by hand: they are promises, and no code of
ours makes them from the messages.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from penstock.v1 import common_pb2, generation_pb2, text_pb2

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "protos" / "conformance" / "v1.json"
EOS, STRING, LENGTH = (
    common_pb2.FINISH_REASON_STOP_EOS,
    common_pb2.FINISH_REASON_STOP_STRING,
    common_pb2.FINISH_REASON_LENGTH,
)
TOOLS = common_pb2.FINISH_REASON_TOOL_CALLS


def started(**fields: Any) -> text_pb2.ChatResponse:
    return text_pb2.ChatResponse(started=generation_pb2.Started(request_id="r", seed=7, prompt_tokens=3, **fields))


def delta(seq: int, text: str = "", *, index: int = 0, **fields: Any) -> text_pb2.ChatResponse:
    return text_pb2.ChatResponse(delta=text_pb2.ChatDelta(seq=seq, index=index, text=text, **fields))


def finished(*results: common_pb2.SequenceResult, last_seq: int = 0) -> text_pb2.ChatResponse:
    usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=sum(result.token_count for result in results))
    return text_pb2.ChatResponse(finished=generation_pb2.Finished(sequences=results, usage=usage, last_seq=last_seq))


def result(reason: int, count: int, *, index: int = 0, **fields: Any) -> common_pb2.SequenceResult:
    return common_pb2.SequenceResult(index=index, finish_reason=reason, token_count=count, **fields)


def call(index: int, **fields: str) -> text_pb2.ToolCallDelta:
    return text_pb2.ToolCallDelta(index=index, **fields)


def stream(name: str, note: str, messages: list[text_pb2.ChatResponse], **expect: str) -> dict[str, Any]:
    """A Chat's messages, and what a client makes of them."""
    return {
        "name": name,
        "kind": "stream",
        "note": note,
        "messages": [message.SerializeToString(deterministic=True).hex() for message in messages],
        "expect": {key.replace("_", "."): value for key, value in expect.items()},
    }


def request(name: str, note: str, message: text_pb2.ChatRequest, tail: str = "", **expect: str) -> dict[str, Any]:
    """A ChatRequest that a client reads and writes again; it may keep or drop what `tail` adds."""
    wire = message.SerializeToString(deterministic=True).hex()
    return {"name": name, "kind": "request", "note": note, "messages": [wire + tail], "expect": expect}


def error(name: str, note: str, code: int, message: str, *details: Any, **expect: str) -> dict[str, Any]:
    """Bytes of grpc-status-details-bin, and what a client tells of them."""
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    wire = status.SerializeToString(deterministic=True).hex()
    known = {"code": str(code), "message": message}
    return {"name": name, "kind": "error", "note": note, "messages": [wire], "expect": {**known, **expect}}


def info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain="penstock", metadata=metadata)


def bad(field: str, description: str) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    return error_details_pb2.BadRequest(field_violations=[violation])


def retry(milliseconds: int) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(milliseconds)
    return error_details_pb2.RetryInfo(retry_delay=delay)


def streams() -> list[dict[str, Any]]:
    """Streams that end well."""
    return [
        stream(
            "text-joins",
            "The text is the deltas' texts, joined without anything between.",
            [started(), delta(0, "The"), delta(1, " cat"), delta(2, "\n"), finished(result(EOS, 3), last_seq=2)],
            text_0="The cat\n",
            finish_0="STOP_EOS",
            count_0="3",
        ),
        stream(
            "split-utf8",
            "Tokens that are parts of a character have no text; the last one brings the whole character.",
            [
                started(),
                delta(0, "", token_ids=[240]),
                delta(1, "", token_ids=[159, 142]),
                delta(2, "🎉", token_ids=[137]),
                delta(3, "é漢", token_ids=[201]),
                finished(result(EOS, 5), last_seq=3),
            ],
            text_0="🎉é漢",
            ids_0="240,159,142,137,201",
            finish_0="STOP_EOS",
            count_0="5",
        ),
        stream(
            "combining",
            "A character and its accent may come in two deltas: texts are joined, never normalised.",
            [started(), delta(0, "e"), delta(1, "\u0301"), delta(2, "\u200d"), finished(result(EOS, 3), last_seq=2)],
            text_0="e\u0301\u200d",
            finish_0="STOP_EOS",
            count_0="3",
        ),
        stream(
            "stop-string",
            "Text that may begin a stop string is held back; the stop string itself is not in the text.",
            [
                started(),
                delta(0, "one E", token_ids=[1, 2]),
                delta(1, "N", token_ids=[3, 4]),
                finished(result(STRING, 6, stop_string="END"), last_seq=1),
            ],
            text_0="one EN",
            ids_0="1,2,3,4",
            finish_0="STOP_STRING",
            stop_0="END",
            count_0="6",
        ),
        stream(
            "stop-token",
            "A stop token is told by its id, 0 too.",
            [started(), delta(0, "x"), finished(result(common_pb2.FINISH_REASON_STOP_TOKEN, 1, stop_token_id=0))],
            text_0="x",
            finish_0="STOP_TOKEN",
            stop_0="0",
            count_0="1",
        ),
        stream(
            "several-answers",
            "Answers of n > 1 are told apart by index; seq counts all deltas of the stream.",
            [
                started(),
                delta(0, "a", index=1),
                delta(1, "b"),
                delta(2, "c", index=1),
                finished(result(EOS, 1), result(LENGTH, 2, index=1), last_seq=2),
            ],
            text_0="b",
            text_1="ac",
            finish_0="STOP_EOS",
            finish_1="LENGTH",
            count_0="1",
            count_1="2",
        ),
        stream(
            "reasoning-and-tools",
            "Pieces of a tool call belong together by index; arguments are joined.",
            [
                started(),
                delta(0, reasoning="Let me"),
                delta(1, reasoning=" look."),
                delta(2, tool_calls=[call(0, id="c1", name="find")]),
                delta(3, tool_calls=[call(0, arguments='{"q":')]),
                delta(4, tool_calls=[call(0, arguments='"ü"}'), call(1, id="c2", name="add", arguments="{}")]),
                finished(result(TOOLS, 9), last_seq=4),
            ],
            text_0="",
            reasoning_0="Let me look.",
            tools_0='c1|find|{"q":"ü"}\nc2|add|{}',
            finish_0="TOOL_CALLS",
            count_0="9",
        ),
        stream(
            "no-text",
            "An answer may be empty: no delta at all.",
            [started(), finished(result(EOS, 0))],
            text_0="",
            finish_0="STOP_EOS",
            count_0="0",
        ),
    ]


def broken_streams() -> list[dict[str, Any]]:
    """Streams that a client refuses: nothing else of them is expected."""
    end = finished(result(EOS, 2), last_seq=1)
    protocol = {"error": "PROTOCOL"}
    return [
        stream("gap", "seq is gapless.", [started(), delta(0, "a"), delta(2, "c"), end], **protocol),
        stream("twice", "seq never repeats.", [started(), delta(0, "a"), delta(0, "a"), end], **protocol),
        stream("not-from-zero", "seq begins at 0.", [started(), delta(1, "b"), end], **protocol),
        stream("after-finished", "Finished is last.", [started(), delta(0, "a"), end, delta(1, "b")], **protocol),
        stream(
            "truncated",
            "OK without Finished is no answer.",
            [started(), delta(0, "a"), delta(1, "b")],
            error="TRUNCATED_STREAM",
        ),
    ]


def requests() -> list[dict[str, Any]]:
    """Requests with set fields and large numbers that must survive."""
    plain = text_pb2.ChatRequest()
    plain.messages.add(role="user", content="Grüße 👋")
    zero = text_pb2.ChatRequest(model="m")
    zero.config.temperature, zero.config.top_k, zero.config.do_sample = 0.0, 0, False
    large = text_pb2.ChatRequest()
    large.config.seed = 2**63 - 1
    return [
        request(
            "unset-is-not-zero",
            "Options that are unset stay so: the server's default holds.",
            plain,
            content="Grüße 👋",
            temperature="unset",
            top_k="unset",
            do_sample="unset",
            seed="unset",
        ),
        request(
            "zero-is-a-value",
            "Options that are set to zero are sent.",
            zero,
            content="",
            temperature="0",
            top_k="0",
            do_sample="false",
            seed="unset",
        ),
        request(
            "large-seed",
            "64 bits, which are more than a double holds.",
            large,
            content="",
            temperature="unset",
            top_k="unset",
            do_sample="unset",
            seed="9223372036854775807",
        ),
        request(
            "unknown-field",
            "A field of a later release is no error (number 2000, a varint).",
            plain,
            # (2000 << 3 | 0) as a varint, then 1.
            "807d01",
            content="Grüße 👋",
            temperature="unset",
            top_k="unset",
            do_sample="unset",
            seed="unset",
        ),
    ]


def errors() -> list[dict[str, Any]]:
    """Details of statuses."""
    return [
        error(
            "bad-field",
            "BadRequest names the field.",
            3,
            "config.top_p: must be in (0, 1]",
            info("INVALID_FIELD"),
            bad("config.top_p", "must be in (0, 1]"),
            reason="INVALID_FIELD",
            field="config.top_p",
            description="must be in (0, 1]",
            retry_ms="",
        ),
        error(
            "retry",
            "RetryInfo tells how long to wait.",
            8,
            "too many requests wait",
            info("QUEUE_FULL"),
            retry(1500),
            reason="QUEUE_FULL",
            field="",
            description="",
            retry_ms="1500",
        ),
        error(
            "reason-alone",
            "ErrorInfo is always there; its domain is penstock.",
            10,
            "the stream was lost",
            info("BACKEND_LOST", last_seq="41"),
            reason="BACKEND_LOST",
            field="",
            description="",
            retry_ms="",
        ),
        error(
            "unknown-detail",
            "A detail of a type that a client does not know is no error.",
            5,
            "model: no backend serves it",
            error_details_pb2.Help(links=[error_details_pb2.Help.Link(description="d", url="u")]),
            info("MODEL_NOT_FOUND"),
            bad("model", "no backend serves it"),
            reason="MODEL_NOT_FOUND",
            field="model",
            description="no backend serves it",
            retry_ms="",
        ),
    ]


def content() -> str:
    """The file."""
    vectors = [*streams(), *broken_streams(), *requests(), *errors()]
    return json.dumps({"package": "penstock.v1", "vectors": vectors}, ensure_ascii=False, indent=1) + "\n"


def main() -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    wanted = content()
    if arguments.check:
        if TARGET.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{TARGET.relative_to(ROOT)} differs: run python tools/make_conformance.py", file=sys.stderr)
        return 1
    TARGET.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
