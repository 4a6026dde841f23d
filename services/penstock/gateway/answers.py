"""Parts that OpenAI's answers share: ids, reasons, usage, log-probabilities, and bytes of events."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from penstock_client import Choice, Delta, LogprobEntry, Timings, Usage

from penstock.gateway.unread_fields import noted_fields

# Names of FinishReason -> OpenAI's. `stop_reason` beside it has the string or id.
_REASONS: Mapping[str, str] = {
    "LENGTH": "length",
    "MAX_TIME": "length",
    "ABORTED": "length",
    "TOOL_CALLS": "tool_calls",
}
# Fields of the message with the seconds of each stage.
_STAGES = tuple(name for name in Timings.__dataclass_fields__ if name != "proto")
DONE = b"data: [DONE]\n\n"
# json.dumps makes an encoder for each call with anything but its defaults.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dumps(value: Any) -> bytes:
    """JSON as bytes. A lone surrogate, which UTF-8 cannot hold, becomes `?`."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def quoted(text: str) -> bytes:
    """A text as JSON: `dumps` of it. The per-token path."""
    return bytes(encode_basestring(text), "utf-8", "replace")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


def named_event(name: str, value: Mapping[str, Any]) -> bytes:
    """One server-sent event with a name, which is also its object's type."""
    return f"event: {name}\n".encode() + event({"type": name, **value})


def merged(deltas: list[Delta]) -> list[Delta]:
    """Deltas that have come; successive ones of text alone are joined.

    So a reader that keeps up gets an event for each, and a slower one gets fewer, larger events.
    """
    if len(deltas) < 2:
        return deltas
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        # Reasoning precedes text in an event, so it is not joined to earlier text.
        if (
            last is not None
            and last.index == delta.index
            and _is_text(last)
            and _is_text(delta)
            and not (last.text and delta.reasoning)
        ):
            found[-1] = Delta(delta.seq, last.index, last.text + delta.text, last.reasoning + delta.reasoning)
        else:
            found.append(delta)
    return found


def _is_text(delta: Delta) -> bool:
    return not (delta.tool_calls or delta.logprobs or delta.token_ids or delta.tensors)


def finish_reason(choice: Choice) -> str:
    """OpenAI's word for the end of a sequence."""
    return _REASONS.get(choice.finish_reason or "", "stop")


def stop_reason(choice: Choice) -> str | int | None:
    """The stop string or id that ended it, as in vLLM: None for an end-of-sequence token, also behind tool calls."""
    if choice.finish_reason in ("STOP_EOS", "TOOL_CALLS"):
        return choice.stop_string
    return choice.stop_string if choice.stop_string is not None else choice.stop_token_id


class AnswerHead:
    """Fields at the start of every answer and chunk of one request."""

    def __init__(self, prefix: str, kind: str, request_id: str, model: str) -> None:
        self.fields: dict[str, Any] = {
            "id": f"{prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def with_(self, **more: Any) -> dict[str, Any]:
        """The fields, and more."""
        return {**self.fields, **more}


def usage_of(usages: Iterable[Usage], *, no_output: bool = False) -> dict[str, Any]:
    """OpenAI's usage of several requests together. `no_output`: the generated tokens are not part of the answer."""
    prompt = completion = cached = reasoning = accepted = rejected = 0
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        cached += usage.cached_tokens
        reasoning += usage.reasoning_tokens
        accepted += usage.accepted_draft_tokens
        rejected += usage.rejected_draft_tokens
    if no_output:
        completion = 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def extras(started: Any, finished: Any) -> dict[str, Any]:
    """Penstock's own part of an answer: the seconds of every stage, the seed, and warnings."""
    timings = finished.timings
    return {
        "timings": {name: round(getattr(timings, name), 6) for name in _STAGES if timings.HasField(name)},
        "seed": started.seed,
        "warnings": [*started.warnings, *noted_fields()],
    }


def chat_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    """Log-probabilities of a chat answer."""
    return {
        "content": [
            {**_chat_token(entry), "top_logprobs": [_chat_token(other) for other in entry.top]} for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(entry: LogprobEntry) -> dict[str, Any]:
    text = _escaped(entry.raw) if entry.raw else entry.text
    return {"token": text, "logprob": entry.logprob, "bytes": list(entry.token_bytes)}


def _escaped(raw: bytes) -> str:
    r"""Bytes in OpenAI's notation for a part of a character: `\xe4\xb8`."""
    return "".join(chr(byte) if 32 <= byte < 127 and byte != 92 else f"\\x{byte:02x}" for byte in raw)


def _name(entry: LogprobEntry) -> str:
    """A token's name in a completion, as OpenAI's: its text, or its bytes if they are not text."""
    return f"bytes:{_escaped(entry.raw)}" if entry.raw else entry.text


def _names(entry: LogprobEntry) -> dict[int, str]:
    """Names of a position's tokens by id, all different: of tokens with equal text, the most likely has the text and
    the others have their ids, as in vLLM."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for one in (*entry.top, entry):
        if one.token_id not in names:
            name = _name(one)
            names[one.token_id] = name if name not in taken else f"token_id:{one.token_id}"
            taken.add(name)
    return names


class TextLogprobs:
    """Log-probabilities of a completion: four lists of equal length."""

    def __init__(self, offset: int = 0) -> None:
        """Begin at character `offset` of the text."""
        self._offset = offset
        # Counts the characters of tokens that are parts of them.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def lists(self, entries: Iterable[LogprobEntry]) -> dict[str, Any]:
        """The lists of the next tokens. A prompt's first token has no log-probability: null."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            names = _names(entry)
            tokens.append(names[entry.token_id])
            # Ranks begin at 1: without one nothing was chosen.
            logprobs.append(entry.logprob if entry.rank else None)
            top = {names[other.token_id]: other.logprob for other in reversed(entry.top)}
            tops.append(top if entry.rank else None)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.token_bytes))
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}


def tool_call_pieces(delta: Delta) -> list[dict[str, Any]]:
    """Pieces of tool calls as OpenAI streams them: id, type and name come once, with the first piece.

    One entry for each call: OpenAI's client takes a second entry with the same index for another call.
    """
    pieces: dict[int, dict[str, Any]] = {}
    for piece in delta.tool_calls:
        made = pieces.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
        if piece.name:
            made |= {"id": piece.id, "type": "function", "function": {"name": piece.name, **made["function"]}}
        made["function"]["arguments"] += piece.arguments
    return list(pieces.values())
