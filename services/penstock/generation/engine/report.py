"""What the caller hears about one request: events in order, gapless numbers, one last word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from penstock.generation.engine.request import (
    DeltaOutput,
    FinishedOutput,
    PositionLogprobs,
    RequestOutput,
    RequestTimings,
    SequenceFinish,
    StartedOutput,
)

if TYPE_CHECKING:
    from penstock.common.errors import PenstockError
    from penstock.generation.engine.decoding.base import Emission
    from penstock.generation.engine.request import Request


class RequestReport:
    """Collects a request's events until the engine takes them at the end of the step."""

    def __init__(self, request: Request, clock: Callable[[], float], settled: Iterable[Emission] = ()) -> None:
        """`settled`: the first emissions, known from the start and sent with the first others."""
        self.request = request
        self.scheduled_at: float | None = None
        self.next_seq = 0
        self._clock = clock
        self._settled = list(settled)
        self._first_token_at: float | None = None
        self._cached_tokens = 0
        self._started = False
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._finishes: dict[int, SequenceFinish] = {}
        self._new_started: StartedOutput | None = None
        self._new_deltas: list[DeltaOutput] = []
        self._finished: FinishedOutput | None = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are still to be computed and sent."""
        return self.request.params.prompt_logprobs is not None and not self._started

    def scheduled(self, cached_tokens: int) -> bool:
        """Work on it begins; False when it had begun before."""
        if self.scheduled_at is not None:
            return False
        self.scheduled_at = self._clock()
        self._cached_tokens = cached_tokens
        return True

    def preempted(self) -> None:
        """Its prompt will be computed again."""
        self._prompt_logprobs.clear()

    def add_prompt_logprobs(self, logprobs: Iterable[PositionLogprobs]) -> None:
        """The next prompt positions'."""
        if self.wants_prompt_logprobs:
            self._prompt_logprobs.extend(logprobs)

    def emit(self, emissions: Iterable[Emission]) -> None:
        """Tell the caller; the first time, that the prompt is computed as well."""
        if not self._started:
            self._started = True
            self._new_started = StartedOutput(self._cached_tokens, self._whole_prompt())
            self._prompt_logprobs.clear()
        for emission in (*self._settled, *emissions):
            if emission.token_ids and self._first_token_at is None:
                self._first_token_at = self._clock()
            delta = DeltaOutput(self.next_seq, emission.index, emission.token_ids, emission.logprobs, emission.finish)
            self.next_seq += 1
            self._new_deltas.append(delta)
            if emission.finish is not None:
                self._finishes[emission.index] = emission.finish
        self._settled.clear()

    def finish(self, unfinished: Iterable[SequenceFinish] = (), error: PenstockError | None = None) -> None:
        """The last word. `unfinished` are the sequences that were cut off."""
        settled = (emission.finish for emission in self._settled if emission.finish is not None)
        self._finishes.update({finish.index: finish for finish in (*settled, *unfinished)})
        finishes = tuple(self._finishes[index] for index in sorted(self._finishes))
        self._finished = FinishedOutput(
            sequences=finishes,
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=sum(finish.num_tokens for finish in finishes),
            cached_tokens=self._cached_tokens,
            timings=self._timings(),
            last_seq=self.next_seq - 1 if self.next_seq else None,
            error=error,
        )

    def take(self) -> RequestOutput:
        """What happened since the last call."""
        output = RequestOutput(self.request, self._new_started, tuple(self._new_deltas), self._finished)
        self._new_started = None
        self._new_deltas.clear()
        return output

    def _whole_prompt(self) -> tuple[PositionLogprobs, ...]:
        """One entry per prompt token, or none: nobody asked, or max_time was over before the prompt was computed."""
        request = self.request
        known = len(self._prompt_logprobs) + 1
        if request.params.prompt_logprobs is None or known != len(request.prompt_token_ids):
            return ()
        # Nothing is known about the first prompt token.
        return (PositionLogprobs(None), *self._prompt_logprobs)

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
    """The only word on a request that failed on its way into the engine."""
    report = RequestReport(request, lambda: request.arrival_time)
    report.finish((), error)
    return report.take()
