"""Lies of a backend, as data: each changes what a scripted backend tells about a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from factories.servers.emitting_backend import EmittingBackend, count_up
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from penstock.v1 import common_pb2, config_pb2
from penstock.v1.generation_pb2 import SessionEvent, SessionResponse

TOKENS = 12
LAST = TOKENS - 1
IDS: Sequence[int] = count_up(TOKENS)(None)  # type: ignore[arg-type]
EOS = IDS[LAST]
# Longer than the answer, so that it ends by its own end.
BUDGET = 20

Tell = Callable[[SessionResponse], SessionResponse]
Edit = Callable[[SessionEvent], Iterable[SessionEvent]]


@dataclass(frozen=True)
class Lie:
    """A lie. `tell` gets every message; with `of_rows` after plain tokens were put into rows."""

    name: str
    tell: Tell = lambda message: message
    # Fields of `config`, `stop` and `output` of the request that it is told about.
    config: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    # Attributes of the lying backend.
    knobs: dict[str, Any] = field(default_factory=dict)
    of_rows: bool = False
    # It adds to a true answer what nobody takes.
    is_harmless: bool = False
    # It shows that tokens before it were wrong: the answer cannot end well.
    is_fatal: bool = False
    # In place of `tell`: bytes sent instead of the message with this frame.
    raw: bytes | None = None

    def backend(self, **knobs: Any) -> EmittingBackend:
        """Make a backend that tells it."""
        knobs = {"script": count_up(TOKENS), "eos_token_ids": (EOS,), **knobs, **self.knobs}
        liar = EmittingBackend(**knobs)
        if self.raw is not None:
            raw = self.raw
            liar.serialize = lambda message: raw if _has_seq(message, 3) else message.SerializeToString()
        elif self.of_rows:
            liar.serialize = lambda message: self.tell(message).SerializeToString()
        else:
            liar.distort = self.tell
        return liar

    def options(self) -> dict[str, Any]:
        """Return the fields of the request."""
        return {
            "config": config_pb2.GenerationConfig(**{"max_new_tokens": BUDGET, **self.config}),
            "stop": config_pb2.StopConfig(**self.stop),
            "output": config_pb2.OutputConfig(return_token_ids=True, **self.output),
        }


def _has_seq(message: SessionResponse, seq: int) -> bool:
    return any(seq in event.tokens.seqs or (seq and event.delta.seq == seq) for event in message.events)


def _each(kind: str, edit: Edit, *seqs: int) -> Tell:
    """Replace the events of a kind, of deltas those with these numbers, by what `edit` makes of them."""

    def lie(message: SessionResponse) -> SessionResponse:
        told = SessionResponse(step=message.step)
        for event in message.events:
            if event.WhichOneof("event") == kind and (not seqs or event.delta.seq in seqs):
                told.events.extend(edit(event))
            else:
                told.events.append(event)
        return told

    return lie


def _all(*tells: Tell) -> Tell:
    def lie(message: SessionResponse) -> SessionResponse:
        for one in tells:
            message = one(message)
        return message

    return lie


def _changed(change: Callable[[SessionEvent], Any]) -> Edit:
    def edit(event: SessionEvent) -> Iterable[SessionEvent]:
        copy = SessionEvent()
        copy.CopyFrom(event)
        change(copy)
        return (copy,)

    return edit


def _followed(change: Callable[[SessionEvent], Any]) -> Edit:
    changed = _changed(change)
    return lambda event: (event, *changed(event))


def _drop(_: SessionEvent) -> Iterable[SessionEvent]:
    return ()


def _set(path: str, value: Any) -> Callable[[SessionEvent], None]:
    """Make a change that sets the field of this path."""
    *parents, name = path.split(".")

    def change(event: Any) -> None:
        for parent in parents:
            event = event[int(parent)] if parent.isdigit() else getattr(event, parent)
        if isinstance(value, list):
            getattr(event, name)[:] = value
        else:
            setattr(event, name, value)

    return change


def _delta(seq: int, path: str, value: Any) -> Tell:
    return _each("delta", _changed(_set(f"delta.{path}", value)), seq)


def _finished(path: str, value: Any) -> Tell:
    return _each("finished", _changed(_set(f"finished.{path}", value)))


def _started(path: str, value: Any) -> Tell:
    return _each("started", _changed(_set(f"started.{path}", value)))


def _error(**fields: Any) -> Tell:
    return _each("delta", _changed(lambda event: event.error.CopyFrom(type(event.error)(**fields))), 4)


def _noise_within(code: int) -> bytes:
    """Return a status that can be read, one of whose details cannot."""
    noise = any_pb2.Any()
    noise.Pack(error_details_pb2.ErrorInfo())
    noise.value = b"\xff"
    return status_pb2.Status(code=code, details=[noise]).SerializeToString()


def _end(reason: Any, tokens: int = TOKENS, **fields: Any) -> Tell:
    """End after `tokens` by `reason`, in a way that agrees with itself."""

    def end(result: common_pb2.SequenceResult, index: int = 0) -> None:
        result.CopyFrom(common_pb2.SequenceResult(index=index, finish_reason=reason, token_count=tokens, **fields))

    def finish(event: SessionEvent) -> None:
        end(event.finished.sequences[0])
        event.finished.last_seq = tokens - 1
        event.finished.usage.completion_tokens = tokens

    return _all(
        *(_each("delta", _drop, seq) for seq in range(tokens, TOKENS)),
        _each("delta", _changed(lambda event: end(event.delta.finished)), tokens - 1),
        _each("finished", _changed(finish)),
    )


def _lose(*seqs: int) -> Tell:
    """Leave deltas out, and number the others as if nothing were missing."""

    def renumber(event: SessionEvent) -> None:
        event.delta.seq -= sum(seq < event.delta.seq for seq in seqs)

    return _all(
        _each("delta", _drop, *seqs),
        _each("delta", _changed(renumber)),
        _finished("last_seq", LAST - len(seqs)),
    )


def _rows(change: Callable[[Any], Any], seq: int) -> Tell:
    def change_row(event: SessionEvent) -> Iterable[SessionEvent]:
        if seq in event.tokens.seqs:
            change(event.tokens)
        return (event,)

    return _each("tokens", change_row)


def _swap(message: SessionResponse) -> SessionResponse:
    return _each("delta", _changed(lambda event: _set("delta.seq", {4: 5, 5: 4}[event.delta.seq])(event)), 4, 5)(
        message
    )


def _stale(event: SessionEvent) -> None:
    event.attempt_epoch += 7
    event.delta.token_ids[:] = [999]


_PAIR = {"config": {"num_return_sequences": 2, "do_sample": True}}
_LOGPROBS = {"output": {"top_logprobs": 1}}
_HUGE = 2**32 - 1

LIES: tuple[Lie, ...] = (
    # Frames that are missing, twice, or out of order.
    Lie("the first frame is missing", _each("delta", _drop, 0)),
    Lie("a frame in the middle is missing", _each("delta", _drop, 5)),
    Lie("two frames at the end are missing", _each("delta", _drop, 9, 10)),
    Lie("two frames at the end are missing and unnumbered", is_fatal=True, tell=_lose(9, 10)),
    Lie("frames in the middle are missing and unnumbered", is_fatal=True, tell=_lose(4, 5)),
    Lie("the last frame is missing", _each("delta", _drop, LAST)),
    Lie("the last frames are missing, Finished comes alone", _each("delta", _drop, 8, 9, 10, LAST)),
    Lie(
        "the last frame is missing, Finished agrees", _all(_each("delta", _drop, LAST), _finished("last_seq", LAST - 1))
    ),
    Lie("a frame comes twice", _each("delta", _followed(lambda _: None), 5)),
    Lie("a number goes back", _delta(6, "seq", 2)),
    Lie("two frames have changed places", _swap),
    Lie("a number is huge", _delta(5, "seq", 2**64 - 1)),
    Lie("a number is skipped", _delta(5, "seq", 6)),
    Lie("rows lose one of their columns", _rows(lambda rows: rows.seqs.pop(), 4), of_rows=True),
    Lie("a row has the handle of nobody", _rows(lambda rows: _set("handles", [99])(rows), 4), of_rows=True),
    # Other requests and attempts.
    Lie("frames of another epoch come beside", _each("delta", _followed(_stale)), is_harmless=True),
    Lie("frames of nobody's request come beside", _each("delta", _followed(_set("request_id", "x"))), is_harmless=True),
    Lie("a frame has another epoch", _each("delta", _changed(_set("attempt_epoch", 3)), 5)),
    Lie("a frame has another request's id", _each("delta", _changed(_set("request_id", "x")), 5)),
    # Tokens.
    Lie("a token is outside the vocabulary", _delta(5, "token_ids", [4096])),
    Lie("a token is huge", _delta(5, "token_ids", [_HUGE])),
    Lie("a row's token is huge", _rows(lambda rows: _set("token_ids", [_HUGE])(rows), 5), of_rows=True),
    Lie("more tokens than asked for", config={"max_new_tokens": 8}, knobs={"obeys_budget": False}),
    Lie(
        "more tokens than asked for, at once",
        config={"max_new_tokens": 8},
        knobs={"obeys_budget": False, "tokens_per_step": TOKENS},
    ),
    Lie("goes on after an end of the model", knobs={"script": count_up(BUDGET + 5), "obeys_budget": False}),
    Lie("sequence 7 of one", _delta(5, "index", 7)),
    Lie("sequence 4294967295 of one", _delta(5, "index", _HUGE)),
    # What comes with tokens.
    Lie(
        "fewer log-probabilities than tokens",
        _each("delta", _changed(lambda event: event.delta.ClearField("logprobs")), 5),
        **_LOGPROBS,
    ),
    Lie("a log-probability of another token", _delta(5, "logprobs.0.chosen.token_id", 7), **_LOGPROBS),
    Lie("a log-probability that is not a number", _delta(5, "logprobs.0.chosen.logprob", math.nan), **_LOGPROBS),
    Lie(
        "a log-probability of an alternative that is no token",
        _each("delta", _changed(lambda event: event.delta.logprobs[0].top.add(token_id=_HUGE, rank=1)), 5),
        **_LOGPROBS,
    ),
    Lie("a log-probability above zero", _delta(5, "logprobs.0.chosen.logprob", 3.0), **_LOGPROBS),
    # Started.
    Lie("no Started", _each("started", _drop)),
    Lie("Started twice", _each("started", _followed(lambda _: None))),
    Lie("Started with another seed", _started("seed", 12345)),
    Lie("Started of another model", _started("model", "another")),
    Lie("Started with another prompt's length", _started("prompt_tokens", _HUGE)),
    Lie("Started of another request", _started("request_id", "another")),
    Lie("more tokens cached than there are", _started("cached_tokens", _HUGE)),
    Lie("a text of the prompt's that nobody asked to heal", _started("healed_text", "Hurrah! ")),
    Lie(
        "log-probabilities of a prompt that nobody asked for",
        _each("started", _changed(lambda event: event.started.prompt_logprobs.add())),
    ),
    # Finished, and ends of sequences.
    Lie(
        "Finished at once",
        _each(
            "started",
            lambda event: (
                event,
                SessionEvent(request_id=event.request_id, attempt_epoch=event.attempt_epoch, finished={}),
            ),
        ),
    ),
    Lie("Finished twice", _each("finished", _followed(lambda _: None)), is_harmless=True),
    Lie(
        "tokens after Finished",
        _each(
            "finished",
            lambda event: (
                event,
                SessionEvent(
                    request_id=event.request_id,
                    attempt_epoch=event.attempt_epoch,
                    delta={"seq": TOKENS, "token_ids": [7]},
                ),
            ),
        ),
        is_harmless=True,
    ),
    Lie(
        "tokens after the end of a sequence",
        _each(
            "delta",
            _followed(lambda event: (event.delta.ClearField("finished"), _set("delta.seq", TOKENS)(event))),
            LAST,
        ),
    ),
    Lie("a sequence ends twice", _each("delta", _followed(_set("delta.seq", TOKENS)), LAST)),
    Lie("the end is another sequence's", _delta(LAST, "finished.index", 3)),
    Lie("one token more counted", _delta(LAST, "finished.token_count", TOKENS + 1), is_fatal=True),
    Lie("all tokens of the world counted", _delta(LAST, "finished.token_count", _HUGE), is_fatal=True),
    Lie("Finished counts another number", _finished("sequences.0.token_count", 3)),
    Lie("Finished has another reason", _finished("sequences.0.finish_reason", common_pb2.FINISH_REASON_LENGTH)),
    Lie("Finished has no sequence", _each("finished", _changed(lambda event: event.finished.ClearField("sequences")))),
    Lie(
        "Finished has a sequence more", _each("finished", _changed(lambda event: event.finished.sequences.add(index=1)))
    ),
    Lie(
        "Finished has one sequence twice",
        _each("finished", _changed(lambda event: _set("finished.sequences.1.index", 0)(event))),
        **_PAIR,
    ),
    Lie("last_seq is one more", _finished("last_seq", LAST + 1)),
    Lie("last_seq is one less", _finished("last_seq", LAST - 1)),
    Lie("last_seq is absent", _each("finished", _changed(lambda event: event.finished.ClearField("last_seq")))),
    Lie("usage counts another number", _finished("usage.completion_tokens", 2)),
    Lie("usage has another prompt", _finished("usage.prompt_tokens", 0)),
    Lie("usage has more cached than there is", _finished("usage.cached_tokens", _HUGE)),
    Lie("usage has more drafts accepted than tokens", _finished("usage.accepted_draft_tokens", _HUGE)),
    Lie("a negative time", _finished("timings.decode_seconds", -1.0)),
    Lie("a time that is not a number", _finished("timings.queue_seconds", math.nan)),
    Lie("a sum that is not a number", _delta(LAST, "finished.cumulative_logprob", math.nan)),
    # Reasons, with everything there and with tokens missing.
    *(
        Lie(f"{name} with status OK", _end(reason))
        for name, reason in (("ERROR", 9), ("UNSPECIFIED", 0), ("TOOL_CALLS", 7), ("an unknown reason", 42))
    ),
    Lie("ABORTED with status OK", _end(common_pb2.FINISH_REASON_ABORTED)),
    Lie(
        "an operator's abort",
        _all(*(_each("delta", _drop, seq) for seq in range(9, TOKENS)), _end(common_pb2.FINISH_REASON_ABORTED, 9)),
    ),
    *(
        Lie(f"cut short as {common_pb2.FinishReason.Name(reason)}", _end(reason, 9, **fields))
        for reason, fields in (
            (common_pb2.FINISH_REASON_STOP_EOS, {}),
            (common_pb2.FINISH_REASON_STOP_STRING, {"stop_string": "zzz"}),
            (common_pb2.FINISH_REASON_STOP_TOKEN, {"stop_token_id": IDS[8]}),
            (common_pb2.FINISH_REASON_LENGTH, {}),
            (common_pb2.FINISH_REASON_MAX_TIME, {}),
            (common_pb2.FINISH_REASON_CONSTRAINT_DONE, {}),
            (common_pb2.FINISH_REASON_ABORTED, {}),
            (common_pb2.FINISH_REASON_ERROR, {}),
        )
    ),
    Lie(
        "cut short by max_time before its time", _end(common_pb2.FINISH_REASON_MAX_TIME, 9), config={"max_time": 3600.0}
    ),
    Lie(
        "cut short by a stop string that the text has not",
        _end(common_pb2.FINISH_REASON_STOP_STRING, 9, stop_string="zzz"),
        stop={"stop_strings": ["zzz"]},
    ),
    Lie(
        "cut short by a stop token that was not drawn",
        _end(common_pb2.FINISH_REASON_STOP_TOKEN, 9, stop_token_id=7),
        stop={"stop_token_ids": [{"ids": [7]}]},
    ),
    Lie(
        "an end of the model where it shall be ignored",
        stop={"ignore_eos": True},
        config={"max_new_tokens": TOKENS},
        knobs={"obeys_budget": False},
    ),
    # Errors.
    Lie("an error whose code is OK", _error(code=0, message="fine")),
    Lie("an error with a code that there is not", _error(code=99, message="?")),
    Lie("an error with a negative code", _error(code=-5, message="?")),
    Lie("an error whose details have another code", _error(code=14, message="?", status_details=b"\x08\x03")),
    Lie("an error whose details are noise", _error(code=14, message="?", status_details=b"\xff")),
    Lie("an error one of whose details is noise", _error(code=14, message="?", status_details=_noise_within(14))),
    Lie("a deadline that nobody has", _error(code=4, message="late")),
    Lie("an event of no kind", _each("delta", _changed(lambda event: event.ClearField("delta")), 4)),
    # Bytes.
    Lie("bytes that are no message", raw=b"\xff\xff\xff\xff"),
    Lie("a message larger than allowed", raw=b"\x0a\x80\x80\x80\x10" + bytes(32 << 20)),
)
