"""Names of transformers' continuous batching on a Generator; its engine batches continuously anyway.

`generate_batch`, and the manager of `continuous_batching_context_manager` and `init_continuous_batching`: requests are
added from any thread, and results come as they are ready. The classes' fields are transformers'.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from penstock.generator.argument_names import ids_of, reading
from penstock.generator.stream import TextStream

if TYPE_CHECKING:
    from penstock_client._types import Completion


class RequestStatus(enum.IntEnum):
    """Status of a request, with transformers' numbers."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4


@dataclass
class GenerationOutput:
    """Result of a request, or what there is of it; transformers' fields."""

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    # Empty unless top_logprobs was asked for.
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = field(default_factory=time.perf_counter)
    # Times, as time.perf_counter has them, at which the first token came and the request ended; -1: not yet.
    lifespan: tuple[float, float] = (-1, -1)
    timestamps: list[float] | None = None

    def is_finished(self) -> bool:
        """True once nothing more comes."""
        return self.status >= RequestStatus.FINISHED


class ContinuousBatchingManager:
    """Requests in the engine of a Generator, and their results, in the order in which they come.

    Threads read the requests, no more of them than requests are in the engine at once. `stop` ends those that run;
    leaving a `with` block waits for them first.
    """

    def __init__(self, generator: Any, generation_config: Any = None, **options: Any) -> None:
        """`generator` is a Generator; `options` are those of every request, over `generation_config`."""
        self._generator = generator
        self._config = generation_config
        self._options = options
        self._results = _Results()
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], Any], asyncio.AbstractEventLoop]] = {}
        # Requests that have not ended; None: it is being begun.
        self._streams: dict[str, TextStream | None] = {}
        self._unread: deque[_Reading] = deque()
        self._num_threads = 0
        self._numbers = itertools.count()
        # Held for every change of the fields above; notified of each result and end.
        self._changed = threading.Condition()
        self._is_stopped = False

    def start(self) -> None:
        """Do nothing: the engine runs."""

    def is_running(self) -> bool:
        """True until it is stopped."""
        return not self._is_stopped

    def pause(self) -> None:
        """Do nothing: results wait in a queue until they are taken."""

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        **options: Any,
    ) -> str:
        """Begin a request and return its id. `streaming`: a result comes with every token. Raises as `generate`."""
        with reading("input_ids", "a list of ids"):
            ids = ids_of(input_ids)
        named = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        told = {option: value for option, value in {**options, **named}.items() if value is not None}
        # What a request does not tell is the manager's.
        asked = {**self._options, **told}
        with self._changed:
            if self._is_stopped:
                raise ValueError("the manager is stopped: no request is taken any more")
            name = request_id or f"req_{next(self._numbers)}"
            if name in self._streams:
                raise ValueError(f"request_id: {name} is that of a request that runs")
            self._streams[name] = None
        try:
            stream = self._generator.stream(ids, self._config, **asked)
        except BaseException:
            self._ended(name)
            raise
        first = GenerationOutput(name, ids, timestamps=[] if record_timestamps else None)
        with self._changed:
            self._streams[name] = stream
            self._unread.append(_Reading(stream, first, streaming))
            is_stopped = self._is_stopped
            if self._num_threads < self._generator._engine.max_in_flight:
                self._num_threads += 1
                threading.Thread(target=self._read, name="continuous-batching", daemon=True).start()
        if is_stopped:
            stream.close()
        return name

    def add_requests(self, inputs: Iterable[Sequence[int]], **options: Any) -> list[str]:
        """Begin several requests with the same options, and return their ids."""
        return [self.add_request(one, **options) for one in inputs]

    def cancel_request(self, request_id: str) -> None:
        """End a request; its result has the tokens so far. Nothing for one that has ended."""
        with self._changed:
            stream = self._streams.get(request_id)
        if stream is not None:
            stream.close()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Return the next result, of this request where one is named, waiting at most `timeout` seconds.

        None: there is none in that time, or none can come, since the named request does not run.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._results.has(request_id) or self._is_over(request_id), timeout)
            return self._results.take(request_id)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield results as they come, until nothing runs."""
        while (result := self._next()) is not None:
            yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yield the results of one request, the last one included."""
        while (result := self.get_result(request_id)) is not None:
            yield result
            if result.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], Any]) -> None:
        """Call `callback` on the running event loop with each result of a request, in place of the queue; one that
        comes when the loop is closed goes into the queue."""
        with self._changed:
            self._handlers[request_id] = callback, asyncio.get_running_loop()

    def stop(self, block: bool = True, timeout: float | None = None, **_: Any) -> None:
        """End all that runs. `block`: wait for it, at most `timeout` seconds."""
        with self._changed:
            self._is_stopped = True
            streams = [stream for stream in self._streams.values() if stream is not None]
        for stream in streams:
            stream.close()
        if block:
            self.join(timeout=timeout)

    def join(self, stop_trigger_time: float = 0.0, timeout: float | None = None) -> None:
        """Wait for what runs, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._streams, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.stop()
        else:
            self.join()
            self._is_stopped = True

    def _is_over(self, request_id: str | None) -> bool:
        """True for a named request that does not run: nothing more comes of it. The lock is held."""
        return request_id is not None and request_id not in self._streams

    def _next(self) -> GenerationOutput | None:
        """Return the next result; None: nothing runs."""
        with self._changed:
            self._changed.wait_for(lambda: self._results.has() or not self._streams)
            return self._results.take()

    def _read(self) -> None:
        """Read requests to their ends, one after the other, until none is left. A thread's work."""
        while True:
            with self._changed:
                if not self._unread:
                    self._num_threads -= 1
                    return
                given = self._unread.popleft()
            self._follow(given)

    def _follow(self, given: _Reading) -> None:
        """Read a request to its end."""
        output = given.first
        try:
            for delta in given.stream:
                output = _with_delta(output, delta)
                if given.streaming:
                    self._give(output)
            finished = replace(output, status=RequestStatus.FINISHED)
        except Exception as error:
            # Nobody else hears of it: the result tells it.
            finished = replace(output, status=RequestStatus.FAILED, error=str(error))
        finished.lifespan = (output.lifespan[0], time.perf_counter())
        self._give(finished)

    def _give(self, output: GenerationOutput) -> None:
        """Hand out a result; with the last one the request ends, and not before it is there."""
        is_queued = not self._handle(output)
        if output.is_finished():
            self._ended(output.request_id, output if is_queued else None)
        elif is_queued:
            with self._changed:
                self._results.put(output)
                self._changed.notify_all()

    def _ended(self, request_id: str, last: GenerationOutput | None = None) -> None:
        with self._changed:
            if last is not None:
                self._results.put(last)
            del self._streams[request_id]
            self._handlers.pop(request_id, None)
            self._changed.notify_all()

    def _handle(self, output: GenerationOutput) -> bool:
        """Call the request's handler. False: there is none, or its event loop is closed."""
        with self._changed:
            handler = self._handlers.get(output.request_id)
        if handler is None:
            return False
        call, loop = handler
        try:
            loop.call_soon_threadsafe(call, output)
        except RuntimeError:
            return False
        return True


class _Reading(NamedTuple):
    """A request that is to be read, and the result that it begins with."""

    stream: TextStream
    first: GenerationOutput
    streaming: bool


class _Results:
    """Results in their order, of all requests and of each."""

    def __init__(self) -> None:
        self._all: OrderedDict[int, GenerationOutput] = OrderedDict()
        self._places: dict[str, deque[int]] = {}
        self._numbers = itertools.count()

    def put(self, result: GenerationOutput) -> None:
        place = next(self._numbers)
        self._all[place] = result
        self._places.setdefault(result.request_id, deque()).append(place)

    def has(self, request_id: str | None = None) -> bool:
        """True where there is one, of this request if one is named."""
        return bool(self._all) if request_id is None else request_id in self._places

    def take(self, request_id: str | None = None) -> GenerationOutput | None:
        """Return the first one, and forget it; None: there is none."""
        if not self.has(request_id):
            return None
        name = next(iter(self._all.values())).request_id if request_id is None else request_id
        places = self._places[name]
        result = self._all.pop(places.popleft())
        if not places:
            del self._places[name]
        return result


def _with_delta(output: GenerationOutput, delta: Any) -> GenerationOutput:
    now = time.perf_counter()
    times = None if output.timestamps is None else [*output.timestamps, *[now] * len(delta.token_ids)]
    began = output.lifespan[0] if output.lifespan[0] >= 0 else now
    return replace(
        output,
        generated_tokens=[*output.generated_tokens, *delta.token_ids],
        logprobs=[*output.logprobs, *(entry.logprob for entry in delta.logprobs)],
        status=RequestStatus.DECODING,
        lifespan=(began, -1),
        timestamps=times,
    )


def batch_outputs(prompts: Sequence[Sequence[int]], answers: Sequence[Completion | Exception]) -> Mapping[str, Any]:
    """Return {request id: result}, in the order of the prompts, further sequences of one before it, as transformers."""
    found: dict[str, GenerationOutput] = {}
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        name, ids = f"req_{number}", [int(one) for one in prompt]
        if isinstance(answer, Exception):
            found[name] = GenerationOutput(name, ids, error=str(answer), status=RequestStatus.FAILED)
            continue
        for index, choice in [*list(enumerate(answer.choices))[1:], (0, answer.choices[0])]:
            key = f"{name}__child#{index - 1}" if index else name
            logprobs = [entry.logprob for entry in choice.logprobs]
            status = RequestStatus.FINISHED
            found[key] = GenerationOutput(key, ids, list(choice.token_ids), logprobs, status=status)
    return found
