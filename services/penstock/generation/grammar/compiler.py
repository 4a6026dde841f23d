"""Compiler of constraints into grammars: off the event loop, within a budget, each source once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.generation.grammar.call_grammar import CallHolder, CallMarkers
from penstock.generation.grammar.call_spec import FIELD, CallSpec
from penstock.generation.grammar.grammar_limits import GrammarLimits
from penstock.generation.grammar.grammar_tokenizer import GrammarTokenizer
from penstock.generation.grammar.matcher_state import CompiledGrammar
from penstock.generation.grammar.matching import new_matcher
from penstock.generation.grammar.short_ends import ShortEnds
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec, check_spec
from penstock.generation.grammar.trial_pool import OverLimit, TrialPool
from penstock.generation.grammar.written_keys import written_keys
from penstock.text.token_bytes import TokenBytes

TOO_COMPLEX = "CONSTRAINT_TOO_COMPLEX"


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Error of a source, kept in the cache: a wrong source stays wrong."""

    description: str
    reason: str = "INVALID_FIELD"


class GrammarCompiler:
    """Compiler for one model. All methods belong to one event loop. Nothing is loaded before the first constraint."""

    def __init__(self, folder: Path, vocab_size: int, limits: GrammarLimits, table: TokenBytes | None) -> None:
        """`table` belongs to the folder's tokenizer; None: the tokenizer has none, and constraints are refused."""
        self.limits = limits
        self._folder = folder
        self._vocab_size = vocab_size
        self._table = table
        self._trials = TrialPool({"folder": str(folder), "vocab_size": vocab_size}, limits)
        self._threads = ThreadPoolExecutor(limits.constraint_processes, thread_name_prefix="grammar")
        self._tokenizer: asyncio.Future[GrammarTokenizer] | None = None
        self._cache: OrderedDict[bytes, CompiledGrammar | _Refusal] = OrderedDict()
        # Of calls, by what begins them.
        self._markers: OrderedDict[tuple[str, ...], CallMarkers] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[CompiledGrammar]] = {}

    @property
    def pids(self) -> list[int]:
        """Process ids of the trial processes."""
        return self._trials.pids

    async def compile(self, spec: ConstraintSpec) -> CompiledGrammar:
        """Return the grammar of `spec`, from the cache if it was compiled before.

        Callers with the same source wait for one compilation; it goes on when they give up. Raises InvalidArgument
        naming the field of the constraint (reason CONSTRAINT_TOO_LARGE or CONSTRAINT_TOO_COMPLEX if it is over a
        budget), FailedPrecondition for a model with a tokenizer that allows no constraints, and ResourceExhausted when
        too many constraints wait.
        """
        if self._table is None:
            raise FailedPrecondition(
                "constraint: not with this model: its folder has no tokenizer.json that can be split by token",
                reason="NO_TOKENIZER",
                field="constraint",
            )
        check_spec(spec, max_bytes=self.limits.max_constraint_bytes, max_choices=self.limits.max_constraint_choices)
        key = spec.key
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
            return _raise_refusal(spec, known)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._compile(spec, key))
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    async def compile_calls(self, spec: CallSpec) -> CallHolder | None:
        """Return the grammar of calls; None: the model's tokenizer allows none. Raises InvalidArgument naming `calls`,
        and as `compile`."""
        if self._table is None:
            return None
        spec.check()
        try:
            grammar = await self.compile(spec.constraint)
        except InvalidArgument as error:
            raise InvalidArgument(FIELD, error.description, reason=error.reason) from None
        markers = self._markers.get(spec.opens)
        if markers is None:
            tokenizer = await asyncio.shield(self._load_tokenizer())
            loop = asyncio.get_running_loop()
            markers = await loop.run_in_executor(self._threads, CallMarkers, spec.opens, tokenizer)
            self._markers[spec.opens] = markers
            while len(self._markers) > self.limits.constraint_cache:
                self._markers.popitem(last=False)
        return CallHolder(grammar, markers, spec.thought)

    async def close(self) -> None:
        """End running compilations and the processes."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._trials.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compile(self, spec: ConstraintSpec, key: bytes) -> CompiledGrammar:
        kind = spec.kind or ConstraintKind.GRAMMAR
        request = {"kind": kind.value, "text": spec.text, "choices": spec.choices, "around": spec.around}
        # Loaded while the first trial process starts; that reads its own tokenizer.
        tokenizer = self._load_tokenizer()
        try:
            answer = await self._trials.try_constraint(request)
        except OverLimit as error:
            raise InvalidArgument(
                spec.field, f"is too complex: it takes more {error} to compile than allowed", reason=TOO_COMPLEX
            ) from None
        if "refused" in answer:
            return _raise_refusal(spec, self._keep(key, _Refusal(answer["refused"])))
        if "too_complex" in answer:
            refusal = _Refusal(f"is too complex: {answer['too_complex']}", TOO_COMPLEX)
            return _raise_refusal(spec, self._keep(key, refusal))
        loop = asyncio.get_running_loop()
        grammar = await loop.run_in_executor(
            self._threads, _build, await asyncio.shield(tokenizer), answer, spec, self.limits
        )
        return _raise_refusal(spec, self._keep(key, grammar))

    def _load_tokenizer(self) -> asyncio.Future[GrammarTokenizer]:
        if self._tokenizer is None:
            loop = asyncio.get_running_loop()
            self._tokenizer = loop.run_in_executor(
                self._threads, GrammarTokenizer, self._folder, self._vocab_size, self._table
            )
        return self._tokenizer

    def _keep(self, key: bytes, entry: CompiledGrammar | _Refusal) -> CompiledGrammar | _Refusal:
        self._cache[key] = entry
        while len(self._cache) > self.limits.constraint_cache:
            self._cache.popitem(last=False)
        return entry

    def _forget(self, key: bytes, task: asyncio.Task[CompiledGrammar]) -> None:
        del self._running[key]
        # All its callers may be gone: mark the exception as seen.
        if not task.cancelled():
            task.exception()


def _build(
    tokenizer: GrammarTokenizer, answer: Mapping[str, str], spec: ConstraintSpec, limits: GrammarLimits
) -> CompiledGrammar:
    """Compile, on a thread. The trial process has done the same before."""
    matcher = new_matcher(tokenizer, answer["lark"], answer["around"])
    # Computes the lexer's first states, with which every output begins.
    matcher.compute_bitmask()
    if matcher.is_error():
        raise RuntimeError("a grammar that compiled in the trial process did not compile here")
    ends = None
    if limits.close_constraints and spec.has_shorter_ends:
        # Of a matcher of its own: nothing that goes wrong there reaches requests.
        ends = ShortEnds(tokenizer, new_matcher(tokenizer, answer["lark"], answer["around"]), *answer.values())
    written = written_keys(spec, limits.json)
    return CompiledGrammar(
        matcher,
        tokenizer,
        spec.field,
        written=written,
        ends=ends,
        thought=spec.thought,
        # Else a small limit would make a call that nobody chose.
        begins_free=spec.may_be_calls,
    )


def _raise_refusal(spec: ConstraintSpec, entry: CompiledGrammar | _Refusal) -> CompiledGrammar:
    if isinstance(entry, _Refusal):
        raise InvalidArgument(spec.field, entry.description, reason=entry.reason)
    return entry
