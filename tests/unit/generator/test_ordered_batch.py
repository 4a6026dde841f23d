"""Batches of prompts: order, the bound on what runs, failures by index, and progress. Without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from penstock.common.errors import InvalidArgument, Unavailable
from penstock.generator.ordered_batch import BatchFailed, BatchProgress, OrderedBatch
from penstock.generator.progress_bar import BatchReport


class Runs:
    """Prompts that end when a test says so; a prompt is its own answer."""

    def __init__(self) -> None:
        self.futures: dict[int, Future[None]] = {}
        self.ended: list[int | Exception] = []

    def begin(self, prompt: int) -> tuple[Future[None], Callable[[], int]]:
        if prompt < 0:
            raise InvalidArgument("prompt", "must not be negative")
        self.futures[prompt] = Future()
        return self.futures[prompt], lambda: prompt

    @property
    def num_running(self) -> int:
        return sum(not future.done() for future in self.futures.values())

    def batch(self, prompts: Iterator[int] | range | list[int], most: int) -> OrderedBatch[int]:
        return OrderedBatch(prompts, self.begin, most, self.ended.append)


def test_answers_come_in_order_and_no_more_run_than_may() -> None:
    runs, most, count = Runs(), 4, 30
    batch = runs.batch(range(count), most)
    peak = 0
    while len(runs.ended) < count:
        batch._fill()
        peak = max(peak, runs.num_running)
        # The newest ends first.
        newest = max(prompt for prompt, future in runs.futures.items() if not future.done())
        runs.futures[newest].set_result(None)
        batch._take(batch._ended.get())
    assert runs.ended != [*range(count)]
    assert list(batch) == [*range(count)]
    assert peak == most


def test_answers_come_as_prompts_end_where_order_is_not_asked_for() -> None:
    runs = Runs()
    ended = runs.batch([5, -1, 6, 7], 2).ended()
    index, failed = next(ended)
    assert index == 1
    assert isinstance(failed, InvalidArgument)
    assert sorted(runs.futures) == [5, 6]
    runs.futures[6].set_result(None)
    assert next(ended) == (2, 6)
    # The place that it left is taken when the next one is asked for.
    assert sorted(runs.futures) == [5, 6]
    runs.futures[5].set_result(None)
    assert next(ended) == (0, 5)
    assert sorted(runs.futures) == [5, 6, 7]
    ended.close()
    assert runs.futures[7].cancelled()


def test_an_iterator_is_read_no_further_than_there_is_room() -> None:
    runs = Runs()
    read: list[int] = []

    def endless() -> Iterator[int]:
        number = 0
        while True:
            read.append(number)
            yield number
            number += 1

    batch = runs.batch(endless(), 2)
    batch._fill()
    # The first never ends: all others wait behind it.
    for number in range(1, 1000):
        if number not in runs.futures:
            break
        runs.futures[number].set_result(None)
        batch._take(batch._ended.get())
        batch._fill()
    assert len(read) <= 8 * 2 + 1
    runs.futures[0].set_result(None)
    assert next(batch) == 0
    batch.close()
    assert all(future.done() for future in runs.futures.values())


def test_a_failure_is_told_by_index_and_the_others_are_answered() -> None:
    runs = Runs()
    batch = runs.batch([0, -1, 2, 3], 8)
    batch._fill()
    runs.futures[2].set_exception(Unavailable("gone", reason="ENGINE_STOPPED"))
    runs.futures[0].set_result(None)
    runs.futures[3].set_result(None)
    answers = list(batch)
    assert [answers[0], answers[3]] == [0, 3]
    assert isinstance(answers[1], InvalidArgument)
    assert isinstance(answers[2], Unavailable)
    errors = {index: one for index, one in enumerate(answers) if isinstance(one, Exception)}
    failed = BatchFailed([None if index in errors else one for index, one in enumerate(answers)], errors)
    assert failed.results == [0, None, None, 3]
    assert str(failed) == "2 of 4 prompts failed: prompts[1]: prompt: must not be negative; prompts[2]: gone"
    many = BatchFailed([None] * 5, {index: Unavailable("gone", reason="ENGINE_STOPPED") for index in range(5)})
    assert str(many).endswith("prompts[2]: gone and 2 more")


def test_leaving_ends_what_runs() -> None:
    runs = Runs()
    batch = runs.batch(range(10), 3)
    batch._fill()
    batch.close()
    assert [future.cancelled() for future in runs.futures.values()] == [True] * 3
    with pytest.raises(StopIteration):
        next(batch)


def test_progress_is_told_to_a_function() -> None:
    seen: list[BatchProgress] = []
    with BatchReport(seen.append, 3) as report:
        report.ended(5, failed=False)
        report.ended(0, failed=True)
    assert seen == [BatchProgress(1, 0, 3, 5), BatchProgress(2, 1, 3, 5)]


def test_a_bar_is_drawn_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with BatchReport(True, 2) as report:
        report.ended(7, failed=False)
        report.ended(0, failed=True)
    drawn = capsys.readouterr()
    assert "2/2" in drawn.err
    assert "1 failed" in drawn.err
    assert drawn.out == ""
    with BatchReport(False, 2) as report:
        report.ended(7, failed=False)
    # Not a terminal: none unasked.
    with BatchReport(None, 1000) as report:
        report.ended(7, failed=False)
    assert capsys.readouterr().err == ""
