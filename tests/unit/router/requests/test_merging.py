"""Way of a backend's messages to a client's deltas: with any merging on the way the answer is the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from factories.engine.token_rows import in_rows
from factories.models.tokenizer_folders import demo_vocabulary, detokenizers_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from penstock.router.backends.session import BackendSession
from penstock.router.chat.chat_output import ChatParser
from penstock.router.frontend.stream_writer import CHAT, StreamWriter
from penstock.router.frontend.turn_limiter import TurnLimiter
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.delta_pace import DeltaPace
from penstock.router.requests.request_state import RequestSpec, RequestState, Timings
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.router.tokenizer.pipeline import Prompt
from penstock.tokenizer.decode_stream import DecodeLimits, DecodeSession
from penstock.v1 import common_pb2, generation_pb2, text_pb2, tokenizer_pb2
from penstock.v1.generation_pb2 import SessionEvent, SessionResponse
from prometheus_client import CollectorRegistry

DEMO = demo_vocabulary()
FACTORY = detokenizers_of(DEMO)


class Turn(NamedTuple):
    """Events after a message of the backend was read."""

    messages: int
    is_reading: bool
    answers: int
    turns: int


class Line:
    """A stream whose other end is the test."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[Any] = asyncio.Queue()
        self.written: list[Any] = []

    async def run(self, take: Callable[[Any], None]) -> None:
        while True:
            take(await self.coming.get())

    async def write(self, request: Any) -> None:
        self.written.append(request)

    async def write_all(self, requests: Iterable[Any]) -> None:
        self.written += requests

    def cancel(self) -> None:
        pass


class Reader:
    """A client that reads while `is_reading` is set."""

    def __init__(self) -> None:
        self.messages: list[text_pb2.ChatResponse] = []
        self.is_reading = asyncio.Event()

    writes_at_once = False

    def try_write(self, message: text_pb2.ChatResponse) -> bool:
        return False

    async def write(self, message: text_pb2.ChatResponse) -> None:
        await self.is_reading.wait()
        self.messages.append(message)


class DirectReader(Reader):
    """The same on a transport that can write without a task, when it has room."""

    writes_at_once = True

    def __init__(self, room: list[bool]) -> None:
        super().__init__()
        self._room = itertools.cycle(room)

    def try_write(self, message: text_pb2.ChatResponse) -> bool:
        is_written = self.is_reading.is_set() and next(self._room)
        if is_written:
            # The writer's own, which fills it again.
            self.messages.append(text_pb2.ChatResponse.FromString(message.SerializeToString()))
        return is_written


def position(token_id: int) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=-1.5))


def messages_of(answers: list[list[int]], widths: list[int], *, has_logprobs: bool) -> list[SessionResponse]:
    """Make steps that give each sequence its next ids until all have ended; plain tokens as rows."""
    head = {"request_id": "r", "attempt_epoch": 0}
    out = [SessionResponse(events=[SessionEvent(**head, started=generation_pb2.Started(request_id="r"))])]
    at, seq = [0] * len(answers), 0
    results = []
    while any(place < len(ids) for place, ids in zip(at, answers, strict=True)):
        step = SessionResponse(step=len(out))
        for index, ids in enumerate(answers):
            if at[index] == len(ids):
                continue
            some = ids[at[index] : at[index] + widths[seq % len(widths)]]
            at[index] += len(some)
            delta = generation_pb2.TokenDelta(seq=seq, index=index, token_ids=some)
            if has_logprobs:
                delta.logprobs.extend(map(position, some))
            if at[index] == len(ids):
                delta.finished.index, delta.finished.token_count = index, len(ids)
                delta.finished.finish_reason = common_pb2.FINISH_REASON_STOP_EOS
                results.append(delta.finished)
            step.events.add(**head, delta=delta)
            seq += 1
        out.append(in_rows(step, {("r", 0): 1}))
    usage = common_pb2.Usage(completion_tokens=sum(map(len, answers)))
    finished = generation_pb2.Finished(sequences=results, usage=usage, last_seq=seq - 1)
    out.append(SessionResponse(events=[SessionEvent(**head, finished=finished)]))
    return out


async def answer_of(
    messages: Sequence[SessionResponse], plan: list[Turn], reader: Reader, spec: RequestSpec, *, by_table: bool
) -> list[text_pb2.ChatResponse]:
    """Return the client's answer when messages come, texts come back and the client reads in the order of `plan`."""
    metrics = RouterMetrics(CollectorRegistry())
    detokenizer, backend, tokenizer = Detokenizer(max_outstanding=10_000), Line(), Line()
    detokenizer.connected()
    if by_table:
        assert FACTORY.table is not None
        detokenizer.use_table(FACTORY.table)
    decoding = DecodeSession(FACTORY, DecodeLimits(), serves=lambda model: model == "", id_limit=DEMO.bundle.id_limit)
    state = RequestState(spec, Timings(0.0), detokenizer.drop, metrics, 1 << 30)
    session = BackendSession(backend, "backend", detokenizer, metrics)
    submit = generation_pb2.GenerateRequest(request_id="r")
    session.submit(state, generation_pb2.SessionRequest(submit=submit))

    texts = SimpleNamespace(fill_known=lambda _: True)
    parts: Any = SimpleNamespace(
        turn_limiter=TurnLimiter(4), delta_pace=DeltaPace(0.0), metrics=metrics, token_texts=texts
    )
    prompt = Prompt([1])
    context: Any = reader
    writer = StreamWriter(state, prompt, CHAT, parts, context, lambda: None)
    tasks = [
        asyncio.ensure_future(work)
        for work in (session.run_reader(), detokenizer.run_writer(tokenizer), detokenizer.run_reader(tokenizer))
    ]
    handler = asyncio.ensure_future(writer.run(""))
    waiting = list(messages)
    for turn in [*plan, *[Turn(1, True, 8, 8)] * (2 * len(messages))]:
        some, waiting = waiting[: turn.messages], waiting[turn.messages :]
        if some:
            backend.coming.put_nowait(SessionResponse.FromString(b"".join(one.SerializeToString() for one in some)))
        (reader.is_reading.set if turn.is_reading else reader.is_reading.clear)()
        for _ in range(turn.answers):
            if tokenizer.written:
                tokenizer.coming.put_nowait(decoding.process(tokenizer.written.pop(0)))
        for _ in range(turn.turns):
            await asyncio.sleep(0)
    while not handler.done():
        if tokenizer.written:
            tokenizer.coming.put_nowait(decoding.process(tokenizer.written.pop(0)))
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    handler.result()
    return reader.messages


TURNS = st.builds(Turn, st.integers(0, 4), st.booleans(), st.integers(0, 3), st.integers(0, 6))
TEXTS = st.text("ab é你👨‍👩\n<think></think>", min_size=1, max_size=30)


# Two texts come back in one turn of the loop; there is room for the second only.
CROWDED = [Turn(1, True, 8, 8), *[Turn(1, True, 0, 8), Turn(1, True, 0, 8), Turn(0, True, 2, 8)] * 8]


@example(
    texts=["abé你" * 8],
    widths=[1],
    plan=CROWDED,
    room=[False, True],
    wants=(True, False),
    is_chat=False,
    by_table=False,
)
@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=3),
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    plan=st.lists(TURNS, max_size=30),
    room=st.lists(st.booleans(), max_size=5),
    wants=st.tuples(st.booleans(), st.booleans()),
    is_chat=st.booleans(),
    by_table=st.booleans(),
)
def test_an_answer_does_not_depend_on_what_is_merged(
    texts: list[str],
    widths: list[int],
    plan: list[Turn],
    room: list[bool],
    wants: tuple[bool, bool],
    is_chat: bool,
    by_table: bool,
) -> None:
    answers: list[list[int]] = [DEMO.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    spec = RequestSpec(
        request_id="r",
        template=generation_pb2.GenerateRequest(),
        num_sequences=len(answers),
        decode_options=tokenizer_pb2.DecodeStreamOpen(),
        make_parser=(lambda: ChatParser(parse_tools=False)) if is_chat else None,
        wants_token_ids=wants[0],
        wants_logprobs=wants[1],
    )
    run = answer_of(
        messages_of(answers, widths, has_logprobs=wants[1]),
        plan,
        DirectReader(room) if room else Reader(),
        spec,
        by_table=by_table,
    )
    started, *between, finished = asyncio.run(run)
    assert started.HasField("started")
    deltas = [message.delta for message in between]
    assert [delta.seq for delta in deltas] == list(range(len(deltas)))
    assert finished.finished.usage.completion_tokens == sum(map(len, answers))
    assert [result.token_count for result in finished.finished.sequences] == [len(ids) for ids in answers]
    for index, ids in enumerate(answers):
        mine = [delta for delta in deltas if delta.index == index]
        text = DEMO.tokenizer.decode(ids)
        assert ("".join(delta.text for delta in mine), "".join(delta.reasoning for delta in mine)) == parsed(
            text, is_chat=is_chat
        )
        assert [one for delta in mine for one in delta.token_ids] == (ids if wants[0] else [])
        logprobs = [one.chosen.token_id for delta in mine for one in delta.logprobs]
        assert logprobs == (ids if wants[1] else [])


def parsed(text: str, *, is_chat: bool) -> tuple[str, str]:
    """Parse text and reasoning of a whole answer."""
    if not is_chat:
        return text, ""
    parser = ChatParser(parse_tools=False)
    first, rest = parser.feed(text), parser.finish()
    return first.text + rest.text, first.reasoning + rest.reasoning
