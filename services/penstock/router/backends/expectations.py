"""Expectations of one attempt: what its frames must keep to, whichever backend sends them.

A backend that breaks one is not believed: the attempt is given up and goes on elsewhere. What a plain token costs is a
few comparisons of integers in the session; all of this is looked at once an attempt, or where a sequence or the request
ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.router.requests.prompt_length import num_prompt_tokens
from penstock.router.requests.request_state import RequestSpec
from penstock.v1 import common_pb2, config_pb2, generation_pb2, model_pb2

# A sequence is never longer: the number of tokens is a uint32.
NO_LIMIT = 1 << 32
# A log-probability may be above 0 by rounding.
_MAX_LOGPROB = 0.01
# A process may measure max_time a little shorter than another.
_TIME_SLACK_SECONDS = 0.1
# Ids per byte of a stop string that are decoded first; then all of them.
_IDS_PER_BYTE, _MORE_IDS = 4, 32
_STAGES = ("queue_seconds", "prefill_seconds", "decode_seconds")

# (ids) -> their text, or None where this process does not decode.
TextOf = Callable[[Sequence[int]], str | None]


class BrokenPromise(Exception):
    """Proof that a backend does not keep to the protocol. The text names no token and no text of a request."""


class WrongTokens(BrokenPromise):
    """Proof that tokens are missing among those that were taken, or were added: nothing can go on after them."""


@dataclass(slots=True)
class Expectations:
    """Expectations of one attempt. Every method raises BrokenPromise."""

    spec: RequestSpec
    request_id: str
    prompt_tokens: int
    resumed_tokens: int
    # Most tokens of a sequence, those of earlier attempts included.
    budget: int = NO_LIMIT
    # Only a sequence of that length ends by LENGTH.
    is_exact: bool = False
    # It names criteria of the server's owner, which may end it anywhere.
    ends_by_criteria: bool = False
    # Ids of the vocabulary are below it.
    vocab_size: int = NO_LIMIT
    # None: not known.
    eos_ids: frozenset[int] | None = None
    stop_ids: tuple[tuple[int, ...], ...] | None = None
    stop_strings: tuple[str, ...] | None = None
    # time.monotonic() from which a sequence may end by MAX_TIME; None: it may not.
    max_time_at: float | None = None
    ends_by_constraint: bool = False
    # Whole sequences come at their end, and constraints may lead a beam past an end.
    is_beamed: bool = False
    heals: bool = False
    # Ends of sequences in this attempt, by index.
    ends: dict[int, common_pb2.SequenceResult] = field(default_factory=dict)

    def check_started(self, started: generation_pb2.Started) -> None:
        """Check the first event."""
        if started.request_id != self.request_id:
            raise BrokenPromise("Started of another request")
        if started.seed != self.spec.template.seed:
            raise BrokenPromise("another seed")
        if self.spec.model and started.model != self.spec.model:
            raise BrokenPromise("another model")
        self._check_prompt(started.prompt_tokens, started.cached_tokens)
        if (started.healed_text or started.healed_token_ids) and not self.heals:
            raise BrokenPromise("a healed prompt that was not asked for")
        logprobs = len(started.prompt_logprobs)
        if logprobs and not (
            self.spec.template.output.HasField("prompt_logprobs") and logprobs == started.prompt_tokens
        ):
            raise BrokenPromise("log-probabilities of another prompt")
        for position in started.prompt_logprobs:
            self._check_alternatives(position)

    def check_tokens(self, token_ids: Sequence[int], total: int, *, is_last: bool) -> None:
        """Check the ids of a delta; with them its sequence has `total`. `is_last`: it ends the sequence."""
        if total > self.budget:
            raise BrokenPromise("more tokens than were asked for")
        if token_ids and max(token_ids) >= self.vocab_size:
            raise BrokenPromise("an id of no token")
        if (
            self.eos_ids
            and not self.is_beamed
            and not self.eos_ids.isdisjoint(token_ids[:-1] if is_last else token_ids)
        ):
            raise BrokenPromise("tokens after the end of their sequence")

    def check_extras(self, delta: generation_pb2.TokenDelta, token_ids: Sequence[int]) -> None:
        """Check log-probabilities and tensors of a delta, where they were asked for."""
        if self.spec.wants_logprobs:
            if len(delta.logprobs) != len(token_ids):
                raise BrokenPromise("not one log-probability a token")
            for position, token_id in zip(delta.logprobs, token_ids, strict=True):
                chosen = position.chosen
                # NaN fails the comparison.
                if chosen.token_id != token_id or not chosen.logprob <= _MAX_LOGPROB:
                    raise BrokenPromise("a log-probability that is none of its token")
                self._check_alternatives(position)
        if self.spec.wants_tensors and len(delta.tensors) not in (0, len(token_ids)):
            raise BrokenPromise("not one set of tensors a token")

    def _check_alternatives(self, position: common_pb2.PositionLogprobs) -> None:
        # Their texts are asked for, and an id of no token would be held against the client's request.
        for one in position.top:
            if one.token_id >= self.vocab_size:
                raise BrokenPromise("an alternative of no token")

    def check_end(
        self, result: common_pb2.SequenceResult, token_ids: Sequence[int], now: float, text_of: TextOf
    ) -> None:
        """Check the end of a sequence. `token_ids`: all of its tokens."""
        if result.token_count != len(token_ids):
            raise WrongTokens("not as many tokens as it counted")
        self._check_reason(result, token_ids, now, text_of)
        if result.HasField("stop_token_id") and not (token_ids and token_ids[-1] == result.stop_token_id):
            raise BrokenPromise("a stop that is not the last token")
        if math.isnan(result.cumulative_logprob):
            raise BrokenPromise("a sum that is not a number")

    def check_finished(self, finished: generation_pb2.Finished, num_frames: int) -> None:
        """Check the last event of an attempt that sent `num_frames` deltas."""
        if sorted(result.index for result in finished.sequences) != list(range(self.spec.num_sequences)):
            raise BrokenPromise("finished other sequences than were asked for")
        for result in finished.sequences:
            end = self.ends.get(result.index)
            if end is not None and not _same_end(end, result):
                raise BrokenPromise("two ends of one sequence")
        if (finished.last_seq + 1 if finished.HasField("last_seq") else 0) != num_frames:
            raise BrokenPromise("frames are missing at the end")
        usage = finished.usage
        self._check_prompt(usage.prompt_tokens, usage.cached_tokens)
        if usage.completion_tokens != sum(result.token_count for result in finished.sequences):
            raise BrokenPromise("other tokens counted than sent")
        if usage.accepted_draft_tokens > usage.completion_tokens:
            raise BrokenPromise("more drafts accepted than tokens sent")
        for stage in _STAGES:
            seconds: float = getattr(finished.timings, stage)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise BrokenPromise("a time that is none")

    def _check_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        if prompt_tokens != self.prompt_tokens:
            raise BrokenPromise("another prompt's length")
        if cached_tokens > self.prompt_tokens + self.resumed_tokens:
            raise BrokenPromise("more tokens cached than there are")

    def _check_reason(
        self, result: common_pb2.SequenceResult, token_ids: Sequence[int], now: float, text_of: TextOf
    ) -> None:
        reason = result.finish_reason
        if reason == common_pb2.FINISH_REASON_STOP_EOS:
            holds = self.eos_ids is None or (bool(token_ids) and token_ids[-1] in self.eos_ids)
        elif reason == common_pb2.FINISH_REASON_STOP_STRING:
            holds = self._stopped_by_text(result, token_ids, text_of)
        elif reason == common_pb2.FINISH_REASON_STOP_TOKEN:
            holds = self.stop_ids is None or any(tuple(token_ids[-len(ids) :]) == ids for ids in self.stop_ids)
        elif reason == common_pb2.FINISH_REASON_LENGTH:
            holds = not self.is_exact or len(token_ids) == self.budget
        elif reason == common_pb2.FINISH_REASON_MAX_TIME:
            holds = self.max_time_at is not None and now >= self.max_time_at
        elif reason == common_pb2.FINISH_REASON_CONSTRAINT_DONE:
            holds = self.ends_by_constraint
        elif reason == common_pb2.FINISH_REASON_STOP_CRITERIA:
            holds = self.ends_by_criteria
        else:
            # ABORTED, ERROR, none at all, TOOL_CALLS, which only the router knows of, or one that nobody knows.
            raise BrokenPromise("ended by no reason that a finished answer has")
        if not holds:
            raise BrokenPromise("ended by a reason that does not hold")

    def _stopped_by_text(self, result: common_pb2.SequenceResult, token_ids: Sequence[int], text_of: TextOf) -> bool:
        stop = result.stop_string
        if not stop or (self.stop_strings is not None and stop not in self.stop_strings):
            return False
        prefix = self.spec.decode_options.prefix_token_ids
        tail = token_ids[-_IDS_PER_BYTE * len(stop.encode()) - _MORE_IDS :]
        for ids in (tail, [*prefix, *token_ids]):
            text = text_of(ids)
            if text is None or stop in text:
                return True
        return False


def expectations_of(
    spec: RequestSpec,
    request: generation_pb2.GenerateRequest,
    info: model_pb2.GetModelInfoResponse | None,
    now: float,
) -> Expectations:
    """Make the expectations of an attempt that sends `request` at `now` to a backend with this model."""
    info = info or model_pb2.GetModelInfoResponse()
    config, prompt = request.config, num_prompt_tokens(request, len(request.prompt_token_ids))
    expected = Expectations(
        spec=spec,
        request_id=request.request_id,
        prompt_tokens=prompt,
        resumed_tokens=sum(len(one.ids) for one in request.resumed_token_ids),
        vocab_size=info.vocab_size or NO_LIMIT,
        ends_by_constraint=request.HasField("constraint") or bool(config.constraints or config.force_words_ids),
        ends_by_criteria=bool(config.stopping_criteria),
        heals=bool(_value(config, info.default_config, "token_healing")),
    )
    expected.budget, expected.is_exact = _budget(request, info)
    expected.is_beamed = _value(config, info.default_config, "num_beams") > 1
    # What a grammar holds is closed before the limit of tokens.
    may_be_closed = request.HasField("constraint") or request.HasField("calls")
    expected.is_exact = expected.is_exact and not expected.is_beamed and not may_be_closed
    max_time = _value(config, info.default_config, "max_time")
    if max_time:
        expected.max_time_at = now + max_time - _TIME_SLACK_SECONDS
    _add_stops(expected, request, info)
    return expected


def _budget(request: generation_pb2.GenerateRequest, info: model_pb2.GetModelInfoResponse) -> tuple[int, bool]:
    """Return the most tokens of a sequence, as the generation service resolves them, and True when it is exact."""
    config, default = request.config, info.default_config
    prompt = num_prompt_tokens(request, len(request.prompt_token_ids))
    room = NO_LIMIT
    if info.limits.max_context_tokens:
        # The unconditional branch has to fit the context, too; without guidance there is none.
        negative = len(config.negative_prompt_ids.ids) if _is_guided(config, default) else 0
        room = info.limits.max_context_tokens - max(prompt, negative)
    if config.HasField("max_new_tokens"):
        return min(config.max_new_tokens, room), True
    if config.HasField("max_length"):
        return min(config.max_length - prompt, room), True
    # The pool may have less room than the model's own limit, and then ends a sequence earlier.
    if default.HasField("max_new_tokens"):
        return min(default.max_new_tokens, room), False
    if default.max_length > prompt:
        return min(default.max_length - prompt, room), False
    return room, False


def _is_guided(config: config_pb2.GenerationConfig, default: config_pb2.GenerationConfig) -> bool:
    has_scale = config.HasField("guidance_scale") or default.HasField("guidance_scale")
    return has_scale and _value(config, default, "guidance_scale") != 1


def _add_stops(
    expected: Expectations, request: generation_pb2.GenerateRequest, info: model_pb2.GetModelInfoResponse
) -> None:
    stop, default = request.stop, info.default_stop
    own = request.eos_token_ids or request.config.eos_token_id
    if stop.ignore_eos:
        expected.eos_ids = frozenset()
    elif own or info.eos_token_ids:
        expected.eos_ids = frozenset(own or info.eos_token_ids)
    if not info.HasField("default_stop"):
        # A service of the last release does not tell them.
        expected.stop_ids = _id_runs(stop) if stop.stop_token_ids else None
        expected.stop_strings = tuple(stop.stop_strings) or None
        return
    runs = () if stop.ignore_eos or own else _id_runs(default)
    expected.stop_ids = _id_runs(stop) + runs
    expected.stop_strings = tuple(stop.stop_strings or default.stop_strings)


def _id_runs(stop: config_pb2.StopConfig) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(one.ids) for one in stop.stop_token_ids if one.ids)


def _value(config: config_pb2.GenerationConfig, default: config_pb2.GenerationConfig, name: str) -> bool | float:
    source = config if config.HasField(name) else default  # type: ignore[arg-type]
    found: bool | float = getattr(source, name)
    return found


def _same_end(one: common_pb2.SequenceResult, other: common_pb2.SequenceResult) -> bool:
    return (
        one.finish_reason == other.finish_reason
        and one.token_count == other.token_count
        and one.WhichOneof("matched_stop") == other.WhichOneof("matched_stop")
        and one.stop_token_id == other.stop_token_id
        and one.stop_string == other.stop_string
    )
