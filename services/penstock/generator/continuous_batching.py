"""Names of transformers' continuous batching on a Generator, whose engine batches continuously anyway.

`generate_batch`, and the manager of `continuous_batching_context_manager` and `init_continuous_batching`: requests are
added from any thread, and results come as they are ready. The classes' fields are transformers'.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from penstock.common.errors import PenstockError
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

    A thread reads each request. `stop` ends those that run; leaving a `with` block waits for them first.
    """

    def __init__(self, generator: Any, generation_config: Any = None, **options: Any) -> None:
        """`generator` is a Generator; `options` are those of every request, over `generation_config`."""
        self._generator = generator
        self._config = generation_config
        self._options = options
        self._results: queue.Queue[GenerationOutput] = queue.Queue()
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], Any], asyncio.AbstractEventLoop]] = {}
        self._streams: dict[str, TextStream] = {}
        self._threads: set[threading.Thread] = set()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
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
        if self._is_stopped:
            raise ValueError("the manager is stopped: no request is taken any more")
        name = request_id or f"req_{next(self._numbers)}"
        if name in self._streams:
            raise ValueError(f"request_id: {name} is that of a request that runs")
        asked = {**self._options, **options, "max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        ids = [int(one) for one in input_ids]
        stream = self._generator.stream(
            ids, self._config, **{name: value for name, value in asked.items() if value is not None}
        )
        first = GenerationOutput(name, ids, timestamps=[] if record_timestamps else None)
        thread = threading.Thread(target=self._follow, args=(stream, first, streaming), daemon=True)
        with self._lock:
            self._streams[name] = stream
            self._threads.add(thread)
        thread.start()
        return name

    def add_requests(self, inputs: Iterable[Sequence[int]], **options: Any) -> list[str]:
        """Begin several requests with the same options, and return their ids."""
        return [self.add_request(one, **options) for one in inputs]

    def cancel_request(self, request_id: str) -> None:
        """End a request; its result has the tokens so far. Nothing for one that has ended."""
        with self._lock:
            stream = self._streams.get(request_id)
        if stream is not None:
            stream.close()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Return the next result, waiting at most `timeout` seconds; None: there is none, or not of this request."""
        try:
            result = self._results.get(timeout=timeout)
        except queue.Empty:
            return None
        if request_id is not None and result.request_id != request_id:
            self._results.put(result)
            return None
        return result

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield results as they come, until nothing runs."""
        while self._threads or not self._results.empty():
            result = self.get_result(timeout=_POLL_SECONDS)
            if result is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yield the results of one request, the last one included."""
        while request_id in self._streams or not self._results.empty():
            result = self.get_result(request_id, timeout=_POLL_SECONDS)
            if result is not None:
                yield result
                if result.is_finished():
                    return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], Any]) -> None:
        """Call `callback` on the running event loop with each result of a request, in place of the queue."""
        with self._lock:
            self._handlers[request_id] = callback, asyncio.get_running_loop()

    def stop(self, block: bool = True, timeout: float | None = None, **_: Any) -> None:
        """End all that runs. `block`: wait for it, at most `timeout` seconds for each request."""
        self._is_stopped = True
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()
        if block:
            self.join(timeout=timeout)

    def join(self, stop_trigger_time: float = 0.0, timeout: float | None = None) -> None:
        """Wait for what runs, at most `timeout` seconds for each request."""
        for thread in list(self._threads):
            thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.stop()
        else:
            self.join()
            self._is_stopped = True

    def _follow(self, stream: TextStream, output: GenerationOutput, streaming: bool) -> None:
        """Read a request to its end, on a thread of its own."""
        try:
            for delta in stream:
                output = _with_delta(output, delta)
                if streaming:
                    self._give(output)
            finished = replace(output, status=RequestStatus.FINISHED)
        except PenstockError as error:
            finished = replace(output, status=RequestStatus.FAILED, error=str(error))
        finished.lifespan = (output.lifespan[0], time.perf_counter())
        with self._lock:
            self._streams.pop(output.request_id, None)
        self._give(finished)
        self._threads.discard(threading.current_thread())

    def _give(self, output: GenerationOutput) -> None:
        with self._lock:
            handler = self._handlers.get(output.request_id)
            if handler is not None and output.is_finished():
                del self._handlers[output.request_id]
        if handler is None:
            self._results.put(output)
        else:
            call, loop = handler
            loop.call_soon_threadsafe(call, output)


# Time after which somebody who waits for a result looks whether any can come.
_POLL_SECONDS = 0.1


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
