"""Compilation of constraints: once per source, within a budget, and the errors that callers get."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
from factories.engine.grammars import EOS, VOCAB_SIZE, allowed, choice, lark, regex, schema
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from penstock.common.work_time import WorkTime
from penstock.generation.grammar.compiler import GrammarCompiler
from penstock.generation.grammar.grammar_limits import GrammarLimits
from penstock.generation.grammar.matching import shorten
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec
from penstock.generation.grammar.trial_pool import TrialPool
from penstock.text.token_bytes import TokenBytes

# Takes llguidance minutes: its automaton counts remainders.
ENDLESS = schema({"type": "integer", "multipleOf": 99_999_989})
SECRET = "s3cret" * 30
# Short enough to be quoted. llguidance repeats it in each of these.
WORD = "s3cret"
ECHOED_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": WORD},
    {"$ref": f"#/{WORD}"},
    {"$ref": WORD},
    {"$id": f"{WORD}:", "$ref": WORD},
    {"type": "string", "pattern": f"(?={WORD})"},
    {"type": "object", "required": [WORD], "properties": {WORD: False}},
    {"type": "integer", "minimum": WORD},
    {"properties": {"a": {"type": WORD}}},
    {"x-guidance": {WORD: 1}},
)
ECHOED_GRAMMARS = (
    f"start: {WORD}",
    f"start: a\na: {WORD.upper()}",
    f"root ::= {WORD}",
    WORD,
    f"start: <|{WORD}|>",
    f"start: @{WORD}",
    f'start: %json {{"type": "{WORD}"}}',
)


@contextlib.asynccontextmanager
async def compiler(*, table: bool = True, **limits: Any) -> AsyncIterator[GrammarCompiler]:
    tokens = TokenBytes.from_folder(demo_folder()) if table else None
    # What a busy machine makes slow is not refused for it.
    bounds = GrammarLimits(**{"constraint_compile_seconds": 60.0, **limits})
    made = GrammarCompiler(demo_folder(), VOCAB_SIZE, bounds, tokens)
    try:
        yield made
    finally:
        await made.close()
        assert made.pids == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bounded() -> AsyncIterator[GrammarCompiler]:
    """One with bounds that are soon exceeded."""
    async with compiler(max_constraint_bytes=1500, max_constraint_choices=3) as made:
        yield made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110 (nothing tells when a pipe was written)
            await asyncio.sleep(0.001)


async def refusal(one: GrammarCompiler, spec: ConstraintSpec) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as raised:
        await one.compile(spec)
    return raised.value


async def test_every_kind_compiles() -> None:
    specs = [schema({"type": "object"}), ConstraintSpec(ConstraintKind.JSON_OBJECT), regex("a+"), choice("a", "b")]
    async with compiler() as one:
        for spec in [*specs, lark('start: "a"'), lark('root ::= "a" | "b"')]:
            state = (await one.compile(spec)).start(EOS)
            assert 0 < len(allowed(state)) < 100


async def test_nothing_is_started_before_the_first_constraint() -> None:
    async with compiler() as one:
        assert one.pids == []
        await one.compile(regex("a"))
        assert len(one.pids) == 1


async def test_a_source_is_compiled_once_for_all_that_ask_at_the_same_time() -> None:
    async with compiler() as one:
        grammars = await asyncio.gather(*(one.compile(regex("[a-z]{3}")) for _ in range(5)))
        assert len({id(grammar) for grammar in grammars}) == 1
        assert len(one.pids) == 1
        assert await one.compile(regex("[a-z]{3}")) is grammars[0]
        assert await one.compile(regex("[a-z]{4}")) is not grammars[0]


async def test_the_least_recently_used_is_forgotten() -> None:
    async with compiler(constraint_cache=2) as one:
        first = await one.compile(regex("a"))
        second = await one.compile(regex("b"))
        assert await one.compile(regex("a")) is first
        await one.compile(regex("c"))
        assert await one.compile(regex("a")) is first
        assert await one.compile(regex("b")) is not second


async def test_a_caller_who_gives_up_leaves_the_others_their_grammar() -> None:
    async with compiler() as one:
        impatient = asyncio.create_task(one.compile(regex("x{2,9}")))
        patient = asyncio.create_task(one.compile(regex("x{2,9}")))
        await asyncio.sleep(0)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        assert allowed((await patient).start(EOS))


async def test_a_slow_compilation_holds_nobody_up() -> None:
    async with compiler(constraint_processes=2) as one:
        await asyncio.gather(one.compile(regex("a")), one.compile(regex("b")))
        slow = asyncio.create_task(one.compile(ENDLESS))
        await until(lambda: len(one._trials._idle) == 1)
        await one.compile(regex("ab"))
        assert not slow.done()
        slow.cancel()


async def test_a_compilation_over_its_time_is_refused_and_the_next_one_works() -> None:
    # Longer than a busy machine keeps the next one waiting.
    async with compiler(constraint_compile_seconds=4.0) as one:
        error = await refusal(one, ENDLESS)
        assert (error.field, error.reason) == ("constraint.json_schema", "CONSTRAINT_TOO_COMPLEX")
        assert one.pids == []
        assert await one.compile(schema({"type": "integer"}))


@contextlib.contextmanager
def without_a_processor(pid: int) -> Iterator[None]:
    """Let a process wait, as on a machine whose processors others have."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_compilation_that_waits_for_a_processor_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    left = WorkTime.left

    def noted(limit: WorkTime) -> float:
        looks.append(left(limit))
        return looks[-1]

    monkeypatch.setattr(WorkTime, "left", noted)
    monkeypatch.setattr(WorkTime, "MOST_WAIT", 1e9)
    async with compiler() as one:
        await one.compile(regex("a"))
        (pid,) = one.pids
        one._trials._limits = dataclasses.replace(one.limits, constraint_compile_seconds=0.3)
        looks.clear()
        with without_a_processor(pid):
            waiting = asyncio.create_task(one.compile(regex("b")))
            # Its time by the clock is over.
            await until(lambda: len(looks) > 2)
            assert not waiting.done()
        assert await waiting
        assert one.pids == [pid]


async def test_a_compilation_that_never_gets_a_processor_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkTime, "MOST_WAIT", 2.0)
    async with compiler() as one:
        await one.compile(regex("a"))
        (pid,) = one.pids
        one._trials._limits = dataclasses.replace(one.limits, constraint_compile_seconds=0.1)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ResourceExhausted, match="the machine is too busy to compile constraints") as raised:
            await one.compile(regex("b"))
        assert raised.value.retry_after_seconds == 1
        assert one.pids == []
        one._trials._limits = one.limits
        assert await one.compile(regex("b"))


async def test_a_compilation_that_ends_its_process_is_refused_and_the_next_one_works() -> None:
    async with compiler() as one:
        await one.compile(regex("a"))
        slow = asyncio.create_task(refusal(one, ENDLESS))
        await until(lambda: not one._trials._idle)
        (pid,) = one.pids
        os.kill(pid, signal.SIGKILL)
        assert (await slow).reason == "CONSTRAINT_TOO_COMPLEX"
        assert await one.compile(regex("b"))
        assert pid not in one.pids


async def test_a_compilation_over_its_memory_is_refused() -> None:
    many = "|".join(f"x{number}y{number * 7919 % 10007}[a-z]{{1,50}}" for number in range(6000))
    async with compiler(constraint_compile_memory_bytes=4 << 20) as one:
        assert (await refusal(one, regex(many))).reason == "CONSTRAINT_TOO_COMPLEX"


async def test_what_waits_for_a_process_is_bounded() -> None:
    async with compiler(constraint_processes=1, max_queued_constraints=1) as one:
        await one.compile(regex("a"))
        running = asyncio.create_task(one.compile(ENDLESS))
        await until(lambda: not one._trials._idle)
        waiting = asyncio.create_task(one.compile(regex("b")))
        await until(lambda: one._trials._num_queued == 1)
        with pytest.raises(ResourceExhausted) as raised:
            await one.compile(regex("c"))
        assert raised.value.reason == "QUEUE_FULL"
        assert await one.compile(regex("a"))
        for task in (running, waiting):
            task.cancel()


@pytest.mark.parametrize(
    ("spec", "field", "reason"),
    [
        (ConstraintSpec(None), "constraint", "INVALID_FIELD"),
        (regex(""), "constraint.regex", "INVALID_FIELD"),
        (regex("(" + SECRET), "constraint.regex", "INVALID_FIELD"),
        (regex("x" * 2000), "constraint.regex", "CONSTRAINT_TOO_LARGE"),
        (lark("no grammar " + SECRET), "constraint.grammar", "INVALID_FIELD"),
        (lark(f'start: missing "{SECRET}"'), "constraint.grammar", "INVALID_FIELD"),
        (lark("start: /[^\\x00-\\x{10FFFF}]/"), "constraint.grammar", "INVALID_FIELD"),
        (schema({"$ref": "#"}), "constraint.json_schema", "INVALID_FIELD"),
        (ConstraintSpec(ConstraintKind.JSON_SCHEMA, "{"), "constraint.json_schema", "INVALID_FIELD"),
        (ConstraintSpec(ConstraintKind.JSON_SCHEMA, '{} start: "x"'), "constraint.json_schema", "INVALID_FIELD"),
        (ConstraintSpec(ConstraintKind.JSON_SCHEMA, '{"minimum": NaN}'), "constraint.json_schema", "INVALID_FIELD"),
        (ConstraintSpec(ConstraintKind.JSON_SCHEMA, "[" * 1000), "constraint.json_schema", "INVALID_FIELD"),
        (schema(True), "constraint.json_schema", "INVALID_FIELD"),
        (schema({"not": {"minLength": 3}}), "constraint.json_schema", "INVALID_FIELD"),
        (schema({"type": "integer", "minimum": 3, "maximum": 2}), "constraint.json_schema", "INVALID_FIELD"),
        (schema({"type": "string", "pattern": "(?=a)" + SECRET}), "constraint.json_schema", "INVALID_FIELD"),
        *((schema(document), "constraint.json_schema", "INVALID_FIELD") for document in ECHOED_SCHEMAS),
        *((lark(text), "constraint.grammar", "INVALID_FIELD") for text in ECHOED_GRAMMARS),
        (schema({"$ref": "https://example.com/schema.json"}), "constraint.json_schema", "INVALID_FIELD"),
        (ConstraintSpec(ConstraintKind.JSON_OBJECT, enabled=False), "constraint.json_object", "INVALID_FIELD"),
        (choice(), "constraint.choice", "INVALID_FIELD"),
        (choice("a", ""), "constraint.choice", "INVALID_FIELD"),
        (choice("a", "b", "a"), "constraint.choice", "INVALID_FIELD"),
        (choice("a", "b", "c", "d"), "constraint.choice", "CONSTRAINT_TOO_LARGE"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_refusal_names_the_field_and_does_not_echo_it(
    bounded: GrammarCompiler, spec: ConstraintSpec, field: str, reason: str
) -> None:
    for _ in range(2):
        error = await refusal(bounded, spec)
        assert (error.field, error.reason) == (field, reason)
        assert len(error.message) < 300
        assert WORD not in error.message.lower()


async def test_a_model_without_a_usable_tokenizer_takes_no_constraint() -> None:
    async with compiler(table=False) as one:
        with pytest.raises(FailedPrecondition) as raised:
            await one.compile(regex("a"))
        assert (raised.value.field, raised.value.reason) == ("constraint", "NO_TOKENIZER")
        assert one.pids == []


async def test_closing_ends_what_is_running() -> None:
    async with compiler() as one:
        await one.compile(regex("a"))
        running = asyncio.create_task(one.compile(ENDLESS))
        await until(lambda: not one._trials._idle)
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_trial_process_ends_with_its_service() -> None:
    pool = TrialPool({"folder": str(demo_folder()), "vocab_size": VOCAB_SIZE}, GrammarLimits())
    await pool.try_constraint({"kind": "regex", "text": "a", "choices": ()})
    (process,) = pool._processes
    process._requests.close()
    await process._wire.exited
    assert process.returncode == 0


async def test_a_machine_too_busy_to_start_the_process_refuses_for_now() -> None:
    """It was an internal error, which no caller tries again."""
    async with compiler(start_seconds=0.0) as one:
        with pytest.raises(ResourceExhausted) as raised:
            await one.compile(regex("a"))
        assert raised.value.reason == "QUEUE_FULL"


def test_messages_are_short_and_keep_their_reason() -> None:
    assert shorten('at 1(8): invalid regex "a(b": regex parse error:\n    a(b\n     ^\nerror: unclosed group\n') == (
        "invalid regex: unclosed group"
    )
    assert shorten(f'1(3): unknown name: "{SECRET}" (at "x")\n   1 | start') == "1(3): unknown name: …"
    assert len(shorten("word " * 500)) <= 200
    assert json.dumps(shorten("a\tb\r c")) == '"a b c"'
