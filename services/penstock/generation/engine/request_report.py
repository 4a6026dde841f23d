"""Report on one request to its caller: events in order, numbers without gaps, one last event."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from penstock.generation.core.request import (
    Emission,
    FinishedOutput,
    PositionLogprobs,
    Purpose,
    RequestOutput,
    RequestTimings,
    SequenceFinish,
    StartedOutput,
)

if TYPE_CHECKING:
    from penstock.common.errors import PenstockError
    from penstock.generation.core.request import Request


class RequestReport:
    """Collector of a request's events; the engine takes them at the end of a step."""

    def __init__(
        self,
        request: Request,
        clock: Callable[[], float],
        preset_events: Iterable[Emission] = (),
        weights_version: Callable[[], int] = lambda: 0,
    ) -> None:
        """`preset_events` are known from the start (a resumed sequence had ended) and sent with the first others.
        `weights_version` returns the present version of the model's weights."""
        self.request = request
        self._weights_version = weights_version
        self.scheduled_at: float | None = None
        self.next_seq = 0
        self._clock = clock
        self._preset_events = list(preset_events)
        self._first_token_at: float | None = None
        self._cached_tokens = 0
        self._started = False
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._finishes: dict[int, SequenceFinish] = {}
        self._new_started: StartedOutput | None = None
        self._new_deltas: list[Emission] = []
        self._finished: FinishedOutput | None = None
        self.accepted_drafts = 0
        self.rejected_drafts = 0
        self.embedding: bytes | None = None
        self.healed: tuple[int, str] | None = None

    @property
    def num_generated(self) -> int:
        """Tokens of the returned sequences that have ended."""
        return sum(finish.num_tokens for finish in self._finishes.values())

    @property
    def next_logprob_row(self) -> int | None:
        """First row that gives a missing prompt logprob; None: no more are wanted."""
        if self.request.params.prompt_logprobs is None or self._started:
            return None
        return self._first_logprob_row + len(self._prompt_logprobs)

    @property
    def first_needed_row(self) -> int | None:
        """First row that is still needed; None: only the last one."""
        # Rows that were scored before a preemption are not needed again.
        fixed = None if self.request.purpose is Purpose.SCORE else self.request.first_needed_row
        rows = [row for row in (self.next_logprob_row, fixed) if row is not None]
        return min(rows, default=None)

    @property
    def _first_logprob_row(self) -> int:
        request = self.request
        return request.first_needed_row or 0 if request.purpose is Purpose.SCORE else 0

    def scheduled(self, cached_tokens: int) -> bool:
        """Note that work on the request begins. False: it had begun before."""
        if self.scheduled_at is not None:
            return False
        self.scheduled_at = self._clock()
        self._cached_tokens = cached_tokens
        return True

    def add_prompt_logprobs(self, logprobs: Iterable[PositionLogprobs]) -> None:
        """Take the logprobs of `next_logprob_row` and of the rows after it."""
        self._prompt_logprobs.extend(logprobs)

    def emit(self, emissions: Iterable[Emission]) -> None:
        """Number emissions and report them. The first time, report also that the prompt is computed."""
        if not self._started:
            self._started = True
            self._new_started = StartedOutput(self._cached_tokens, self._whole_prompt(), self.healed)
            self._prompt_logprobs.clear()
        if self._preset_events:
            emissions = [*self._preset_events, *emissions]
            self._preset_events = []
        for emission in emissions:
            if self._first_token_at is None and emission.token_ids:
                self._first_token_at = self._clock()
            emission.seq = self.next_seq
            self.next_seq += 1
            self._new_deltas.append(emission)
            if emission.finish is not None:
                self._finishes[emission.index] = emission.finish

    def finish(self, unfinished: Iterable[SequenceFinish] = (), error: PenstockError | None = None) -> None:
        """Report the last event. `unfinished` are the sequences that were cut off."""
        preset = (emission.finish for emission in self._preset_events if emission.finish is not None)
        self._finishes.update({finish.index: finish for finish in (*preset, *unfinished)})
        finishes = tuple(self._finishes[index] for index in sorted(self._finishes))
        self._finished = FinishedOutput(
            sequences=finishes,
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=sum(finish.num_tokens for finish in finishes),
            cached_tokens=self._cached_tokens,
            timings=self._timings(),
            last_seq=self.next_seq - 1 if self.next_seq else None,
            accepted_draft_tokens=self.accepted_drafts,
            rejected_draft_tokens=self.rejected_drafts,
            embedding=self.embedding,
            weights_versions=(self.request.weights_version, self._weights_version()),
            error=error,
        )

    def take(self) -> RequestOutput:
        """Return everything reported since the last call."""
        output = RequestOutput(self.request, self._new_started, tuple(self._new_deltas), self._finished)
        self._new_started = None
        self._new_deltas.clear()
        return output

    def _whole_prompt(self) -> tuple[PositionLogprobs, ...]:
        """Return one entry per prompt token; none when not asked for, or when max_time ended before the prompt did.

        Scoring: one entry per token of the continuation.
        """
        request, known = self.request, tuple(self._prompt_logprobs)
        wanted = len(request.prompt_token_ids) - 1 - self._first_logprob_row
        if request.params.prompt_logprobs is None or len(known) != wanted:
            return ()
        # Nothing is known about the first prompt token.
        return known if request.purpose is Purpose.SCORE else (PositionLogprobs(None), *known)

    def _timings(self) -> RequestTimings:
        now, arrival = self._clock(), self.request.arrival_time
        scheduled, first = self.scheduled_at, self._first_token_at
        return RequestTimings(
            queue=None if scheduled is None else scheduled - arrival,
            prefill=None if scheduled is None or first is None else first - scheduled,
            decode=None if first is None else now - first,
            time_to_first_token=None if first is None else first - arrival,
            total=now - arrival,
        )


def refusal(request: Request, error: PenstockError) -> RequestOutput:
    """Return the only event of a request that failed on its way into the engine."""
    report = RequestReport(request, lambda: request.arrival_time)
    report.finish((), error)
    return report.take()
