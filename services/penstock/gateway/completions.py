"""`/v1/completions`: texts or token ids in, their continuations out; echo and logprobs as lm-eval expects them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock_client import AsyncStream, Choice, Completion, Delta, LogprobEntry, Usage
from penstock_client._state import StreamState, logprob_entry

from penstock.common.errors import InvalidArgument
from penstock.gateway.answers import (
    DONE,
    AnswerHead,
    TextLogprobs,
    dumps,
    event,
    extras,
    finish_reason,
    merged,
    quoted,
    stop_reason,
    usage_of,
)
from penstock.gateway.chat import include_usage
from penstock.gateway.endpoint import Answer, HttpCall
from penstock.gateway.followed import Followed
from penstock.gateway.request_fields import Fields, checked, options_of, token_lists, typed


@dataclass(slots=True)
class _CompletionPlan:
    """A parsed request: prompts, options, and the form of its answer."""

    prompts: Sequence[str | list[int]]
    options: dict[str, Any]
    is_stream: bool
    wants_usage: bool
    # Alternatives that `logprobs` asks for; None: no log-probabilities.
    logprobs: int | None
    echo: bool
    # max_tokens 0: the engine makes one token, which is left out.
    no_output: bool
    call: HttpCall
    # Number of answers for one prompt.
    count: int = field(default=1)
    # Number of best_of answers that are returned, the likeliest first; None: all.
    num_best: int | None = None
    # Texts of the first ids of prompts of ids, by the prompt's place; for an echo with log-probabilities.
    first_texts: dict[int, str] = field(default_factory=dict)

    def is_output(self, delta: Delta, begun: set[int], number: int) -> bool:
        """True for a delta of new tokens, in a request that returns ids. `begun`: choices with an echo that has begun.

        An echo's first delta has the ids of the prompt; in a long echo, deltas with only text follow.
        """
        if not delta.token_ids:
            return False
        if not self.echo or number in begun:
            return True
        begun.add(number)
        return False

    def open(self, prompt: str | list[int]) -> AsyncStream:
        """Send the request for one prompt."""
        call = self.call
        return checked(
            self.options,
            lambda: call.client.stream(prompt, timeout=call.config.answer_seconds, **self.options),
        )


async def completions(call: HttpCall) -> Answer:
    """Complete prompts. Raises PenstockError."""
    plan = _read(call)
    if plan.echo and plan.logprobs is not None:
        plan.first_texts = await _first_texts(plan)
    if plan.is_stream:
        return _OneAnswer(plan) if len(plan.prompts) == 1 else _events(plan)
    answers = await _all(plan)
    started = answers[0].started
    call.request_id = started.request_id
    call.tokens.add(answer.usage for answer in answers)
    head = AnswerHead("cmpl", "text_completion", started.request_id, started.model)
    numbers = itertools.count()
    return dumps(
        head.with_(
            choices=[
                _choice(plan, answer, choice, next(numbers), prompt)
                for prompt, answer in enumerate(answers)
                for choice in (answer if plan.num_best is None else answer.best(plan.num_best)).choices
            ],
            usage=usage_of((answer.usage for answer in answers), no_output=plan.no_output),
            system_fingerprint=None,
            penstock=extras(started, answers[0].finished),
        )
    )


def _read(call: HttpCall) -> _CompletionPlan:
    fields = Fields(call)
    prompts = token_lists(fields.raw("prompt"), "prompt")
    if len(prompts) > call.config.max_prompts:
        raise InvalidArgument("prompt", f"must have at most {call.config.max_prompts} entries", reason="TOO_MANY")
    is_stream, echo = fields.get("stream", bool, False), fields.get("echo", bool, False)
    wants_usage = include_usage(fields)
    options = options_of(fields, call)
    # In vLLM and llama.cpp, true means the chosen token alone.
    asked = fields.raw("logprobs")
    logprobs = {True: 0, False: None}[asked] if isinstance(asked, bool) else fields.maybe("logprobs", int)
    no_output = options.get("max_new_tokens") == 0
    if no_output:
        options["max_new_tokens"] = 1
    if echo:
        options["echo"] = True
    if logprobs is not None:
        options["top_logprobs"], call.names["top_logprobs"] = logprobs, "logprobs"
        if echo:
            options["prompt_logprobs"], call.names["prompt_logprobs"] = logprobs, "logprobs"
    if no_output:
        # Distinguishes output from the echo.
        options["return_token_ids"] = True
    num_best = _take_best_of(fields, options, call, is_stream=is_stream)
    options["model"] = fields.get("model", str, "")
    fields.done()
    if options.get("request_id") and len(prompts) > 1:
        raise InvalidArgument("request_id", "is for one prompt")
    count = _count(options, call)
    return _CompletionPlan(prompts, options, is_stream, wants_usage, logprobs, echo, no_output, call, count, num_best)


def _count(options: dict[str, Any], call: HttpCall) -> int:
    """Return the number of answers to a prompt. Raises InvalidArgument naming its field."""
    name = "num_return_sequences"
    return typed(options.get(name) or 1, int, call.names.get(name, name))


def _take_best_of(fields: Fields, options: dict[str, Any], call: HttpCall, *, is_stream: bool) -> int | None:
    """Ask for best_of answers with their log-probabilities; return the number to send back. None: all. Raises
    InvalidArgument naming it."""
    best_of = fields.maybe("best_of", int)
    if best_of is None or "num_beams" in options:
        return None
    wanted = _count(options, call)
    if best_of == wanted:
        return None
    if best_of < 1 or best_of < wanted:
        raise InvalidArgument("best_of", "must be at least n")
    if is_stream:
        raise InvalidArgument("best_of", "cannot be streamed: the best answer is known only at the end")
    options["num_return_sequences"], call.names["num_return_sequences"] = best_of, "best_of"
    if options.get("temperature") != 0 and options.get("do_sample") is None:
        # Several answers also ask for sampling.
        options["do_sample"] = True
    options.setdefault("top_logprobs", 0)
    return wanted


async def _all(plan: _CompletionPlan) -> list[Completion]:
    """Answers of all prompts, in order. The first error ends the others."""
    turns = asyncio.Semaphore(plan.call.config.concurrent_prompts)

    async def answer(prompt: str | list[int]) -> Completion:
        async with turns, plan.open(prompt) as stream:
            return await stream.result() if not plan.no_output else await _echo_only(plan, stream)

    if len(plan.prompts) == 1:
        return [await answer(plan.prompts[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(prompt)) for prompt in plan.prompts]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _echo_only(plan: _CompletionPlan, stream: AsyncStream) -> Completion:
    """The answer to a request for no tokens: its choices hold only the echo."""
    echoes: dict[int, str] = {}
    begun: set[int] = set()
    async for delta in stream:
        if not plan.is_output(delta, begun, delta.index):
            echoes[delta.index] = echoes.get(delta.index, "") + delta.text
    completion = stream.state.completion()
    for choice in completion.choices:
        _cut(choice, echoes.get(choice.index, ""))
    return completion


def _cut(choice: Choice, echo: str) -> None:
    choice.text, choice.finish_reason, choice.stop_string, choice.stop_token_id = echo, "LENGTH", None, None
    choice.token_ids.clear()
    choice.logprobs.clear()


async def _first_texts(plan: _CompletionPlan) -> dict[int, str]:
    """Texts of first ids: a first token has no log-probability, so its text is missing from these, too."""
    firsts = {number: prompt[:1] for number, prompt in enumerate(plan.prompts) if prompt and isinstance(prompt, list)}
    if not firsts:
        return {}
    call, skips = plan.call, plan.options.get("skip_special_tokens")
    call.names["sequences"] = "prompt"
    texts = await call.client.detokenize(
        firsts.values(),
        skip_special_tokens=skips is not False,
        model=plan.options["model"],
        timeout=call.config.answer_seconds,
    )
    return dict(zip(firsts, texts, strict=True))


def _prompt_entries(plan: _CompletionPlan, prompt: int, started: Any) -> list[LogprobEntry]:
    """Log-probabilities of the prompt at a place; the first token has none."""
    entries = [logprob_entry(one) for one in started.prompt_logprobs]
    if entries:
        text = plan.first_texts.get(prompt, "")
        if isinstance(whole := plan.prompts[prompt], str):
            # The part that the other tokens leave: nothing, if the first is a control token that was added.
            rest = b"".join(entry.token_bytes for entry in entries[1:]).decode("utf-8", "replace")
            text = whole[: len(whole) - len(rest)] if whole.endswith(rest) else ""
        entries[0] = replace(entries[0], text=text, raw=b"")
    return entries


def _choice(plan: _CompletionPlan, answer: Completion, choice: Choice, number: int, prompt: int) -> dict[str, Any]:
    logprobs = None
    if plan.logprobs is not None:
        entries = [*(_prompt_entries(plan, prompt, answer.started) if plan.echo else ()), *choice.logprobs]
        logprobs = TextLogprobs().lists(entries)
    made: dict[str, Any] = {
        "index": number,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": finish_reason(choice),
        "stop_reason": stop_reason(choice),
    }
    if choice.token_ids:
        made["token_ids"] = choice.token_ids
    if "prompt_logprobs" in plan.options and not plan.echo:
        made["prompt_logprobs"] = TextLogprobs().lists(_prompt_entries(plan, prompt, answer.started))
    return made


class _CompletionChunks:
    """Chunks of a streamed answer."""

    def __init__(self, plan: _CompletionPlan) -> None:
        self._plan = plan
        self._head: AnswerHead | None = None
        self._opened = b""
        self._tail = b',"usage":null}\n\n' if plan.wants_usage else b"}\n\n"
        # Choices for which the prompt's log-probabilities were sent.
        self._lists: dict[int, TextLogprobs] = {}
        self._around: dict[int, tuple[bytes, bytes]] = {}
        # Choices with an echo that has begun.
        self._echoes: set[int] = set()

    def begin(self, started: Any) -> None:
        """Take the facts that all chunks begin with, from the prompt that starts first."""
        if self._head is None:
            self._plan.call.request_id = started.request_id
            self._head = AnswerHead("cmpl", "text_completion", started.request_id, started.model)
            self._opened = b"data: " + dumps(self._head.fields)[:-1] + b',"choices":'

    def delta(self, number: int, delta: Delta, started: Any) -> bytes:
        """Chunk of new text of one choice; `number` counts choices over all prompts."""
        plan = self._plan
        if plan.no_output:
            is_output = plan.is_output(delta, self._echoes, number)
            text, entries = "" if is_output else delta.text, self._entries(number, (), started)
            return self._text(number, text, entries) if text or (entries and entries["tokens"]) else b""
        if plan.logprobs is not None or delta.token_ids:
            entries = self._entries(number, delta.logprobs, started)
            return self._text(number, delta.text, entries, token_ids=delta.token_ids)
        if not delta.text:
            return b""
        if number not in self._around:
            before, _, after = self._text(number, "\0", None).partition(b'"\\u0000"')
            self._around[number] = (before, after)
        before, after = self._around[number]
        return before + quoted(delta.text) + after

    def _entries(self, number: int, entries: Sequence[LogprobEntry], started: Any) -> dict[str, Any] | None:
        if self._plan.logprobs is None:
            return None
        front: list[LogprobEntry] = []
        if number not in self._lists:
            self._lists[number] = TextLogprobs()
            front = _prompt_entries(self._plan, number // self._plan.count, started) if self._plan.echo else []
        return self._lists[number].lists([*front, *entries])

    def _text(self, number: int, text: str, logprobs: Any, *, token_ids: Sequence[int] = ()) -> bytes:
        choice: dict[str, Any] = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": None}
        if token_ids:
            choice["token_ids"] = token_ids
        return self._opened + dumps([choice]) + self._tail

    def ends(self, state: StreamState, first: int) -> bytes:
        """Chunks with the finish reasons of a prompt's choices, numbered from `first`."""
        return b"".join([self._end(first + index, state.choices[index]) for index in sorted(state.choices)])

    def _end(self, number: int, choice: Choice) -> bytes:
        reason, matched = finish_reason(choice), stop_reason(choice)
        if self._plan.no_output:
            reason, matched = "length", None
        ended = {"index": number, "text": "", "logprobs": None, "finish_reason": reason, "stop_reason": matched}
        return self._opened + dumps([ended]) + self._tail

    def last(self, states: list[StreamState]) -> bytes:
        """Chunk with the usage of all prompts, if asked for, and the end."""
        usages = [Usage.of(state.finished.usage) for state in states if state.finished is not None]
        self._plan.call.tokens.add(usages)
        if not self._plan.wants_usage or self._head is None:
            return DONE
        total = usage_of(usages, no_output=self._plan.no_output)
        own = extras(states[0].started, states[0].finished)
        return event(self._head.with_(choices=[], usage=total, penstock=own)) + DONE


class _OneAnswer(Followed):
    """Chunks of one prompt's answer, then usage and [DONE]."""

    def __init__(self, plan: _CompletionPlan) -> None:
        super().__init__(plan.open(plan.prompts[0]))
        self._chunks = _CompletionChunks(plan)

    def begin(self) -> None:
        self._chunks.begin(self.stream.state.started)

    def of(self, deltas: list[Delta]) -> bytes:
        chunks, started = self._chunks, self.stream.state.started
        return b"".join([chunks.delta(delta.index, delta, started) for delta in deltas])

    async def end(self) -> bytes:
        return self._chunks.ends(self.stream.state, 0) + self._chunks.last([self.stream.state])


async def _events(plan: _CompletionPlan) -> AsyncIterator[bytes]:
    """Chunks of several prompts' answers as they come, then usage and [DONE]."""
    chunks, states = _CompletionChunks(plan), list[StreamState]()
    # Bounded: a reader that stops holds up the prompts' streams, not memory.
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue(plan.call.config.concurrent_prompts)
    turns = asyncio.Semaphore(plan.call.config.concurrent_prompts)

    async def follow(prompt: str | list[int], first: int) -> None:
        async with turns, plan.open(prompt) as stream:
            async for piece in _pieces(chunks, stream, first):
                await pieces.put(piece)
            states.append(stream.state)

    async def follow_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number, prompt in enumerate(plan.prompts):
                    group.create_task(follow(prompt, number * plan.count))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            # Full only if nobody reads any more.
            await pieces.put(None)

    task = asyncio.create_task(follow_all())
    try:
        while (queued := await pieces.get()) is not None:
            yield queued
        await task
    finally:
        task.cancel()
        while not pieces.empty():
            pieces.get_nowait()
        await asyncio.gather(task, return_exceptions=True)
    yield chunks.last(states)


async def _pieces(chunks: _CompletionChunks, stream: AsyncStream, first: int) -> AsyncIterator[bytes]:
    """Chunks of one prompt, with choices numbered from `first`."""
    state = stream.state
    while deltas := merged(await stream.read()):
        started = state.started
        chunks.begin(started)
        if piece := b"".join([chunks.delta(first + delta.index, delta, started) for delta in deltas]):
            yield piece
    chunks.begin(state.started)
    yield chunks.ends(state, first)
