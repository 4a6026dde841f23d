"""Many prompts at once: some in the engine, the others after them, answers in order, failures apart."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.common.errors import PenstockError

R = TypeVar("R")
# Failures that an error's text names.
_MOST_NAMED = 3
# Answers that may wait for an earlier one, per prompt that is in the engine.
_WAITING_SHARE = 8


class BatchFailed(Exception):
    """Error after a batch in which some prompts failed. Nothing is lost: `results` has every other answer.

    `results` are in the prompts' order, None for one that failed; `errors` has these by their index.
    """

    def __init__(self, results: list[Any], errors: Mapping[int, Exception]) -> None:
        named = [f"prompts[{index}]: {error}" for index, error in list(errors.items())[:_MOST_NAMED]]
        more = len(errors) - len(named)
        rest = f" and {more} more" if more else ""
        super().__init__(f"{len(errors)} of {len(results)} prompts failed: {'; '.join(named)}{rest}")
        self.results = results
        self.errors = dict(errors)


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Progress of a batch. `total` None: the prompts come from an iterator."""

    done: int
    failed: int
    total: int | None
    # Tokens that answers have so far.
    tokens: int


class OrderedBatch(Generic[R]):
    """Iterator over answers in the prompts' order: each is the result, or the exception that the prompt ended with.

    At most `most` prompts are in the engine, and a few times as many answers wait for one before them, so that an
    iterator of any length takes bounded memory. `close` ends what is in the engine.
    """

    def __init__(
        self,
        prompts: Iterable[Any],
        begin: Callable[[Any], tuple[Future[None], Callable[[], R]]],
        most: int,
        on_done: Callable[[R | Exception], None],
    ) -> None:
        """`begin` starts a prompt, and returns its future and what makes its result, once it is done, in the caller's
        thread. What either raises is that prompt's answer. `on_done` is called for each end."""
        self._prompts = iter(prompts)
        self._begin = begin
        self._most = most
        self._on_done = on_done
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._running: dict[int, tuple[Future[None], Callable[[], R]]] = {}
        self._answers: dict[int, R | Exception] = {}
        self._next_in = self._next_out = 0
        self._is_exhausted = False

    def __iter__(self) -> Iterator[R | Exception]:
        return self

    def __next__(self) -> R | Exception:
        try:
            while self._next_out not in self._answers:
                self._fill()
                if self._next_out in self._answers:
                    break
                if not self._running:
                    raise StopIteration
                self._take(self._ended.get())
        except BaseException:
            self.close()
            raise
        self._next_out += 1
        return self._answers.pop(self._next_out - 1)

    def close(self) -> None:
        """End the prompts that are in the engine; no further one begins."""
        self._is_exhausted = True
        for future, _ in self._running.values():
            future.cancel()
        self._running.clear()

    def ended(self) -> Iterator[tuple[int, R | Exception]]:
        """Yield (index, answer) as prompts end, in any order; in place of iterating."""
        try:
            while True:
                self._fill()
                if not self._answers:
                    if not self._running:
                        return
                    self._take(self._ended.get())
                for index in list(self._answers):
                    yield index, self._answers.pop(index)
        finally:
            self.close()

    def _fill(self) -> None:
        """Begin prompts while there is room for them."""
        while not self._is_exhausted and len(self._running) < self._most:
            if len(self._answers) + len(self._running) >= _WAITING_SHARE * self._most:
                return
            try:
                prompt = next(self._prompts)
            except StopIteration:
                self._is_exhausted = True
                return
            index, self._next_in = self._next_in, self._next_in + 1
            try:
                future, finish = self._begin(prompt)
            except (PenstockError, TypeError, ValueError) as error:
                self._answer(index, error)
                continue
            self._running[index] = future, finish
            future.add_done_callback(lambda _, index=index: self._ended.put(index))  # type: ignore[misc]

    def _take(self, index: int) -> None:
        running = self._running.pop(index, None)
        if running is None:
            return
        future, finish = running
        try:
            future.result()
            answer: R | Exception = finish()
        except CancelledError:
            raise
        except Exception as error:
            answer = error
        self._answer(index, answer)

    def _answer(self, index: int, answer: R | Exception) -> None:
        self._answers[index] = answer
        self._on_done(answer)
