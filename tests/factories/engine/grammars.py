"""Compiled constraints without processes, and texts as tokens, for tests of the grammar package."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from penstock.common.checkpoint import demo_folder
from penstock.generation.grammar.call_grammar import CallHolder, CallMarkers, HeldCalls
from penstock.generation.grammar.grammar_limits import JsonBounds
from penstock.generation.grammar.grammar_tokenizer import GrammarTokenizer, words_of
from penstock.generation.grammar.matcher_state import CompiledGrammar, MaskWorkers, MatcherState
from penstock.generation.grammar.matching import new_matcher
from penstock.generation.grammar.short_ends import ShortEnds
from penstock.generation.grammar.spec import ConstraintKind, ConstraintSpec
from penstock.generation.grammar.translate import to_lark
from penstock.generation.grammar.trial_process import answer_to
from penstock.generation.grammar.written_keys import written_keys
from penstock.router.chat.forced_calls import HeldGrammar
from penstock.text.thoughts import Thought
from tokenizers import Tokenizer

VOCAB_SIZE = 4096
# <|im_end|> and <|endoftext|> of the demo tokenizer.
EOS = (4089, 4087)


@functools.cache
def text_tokenizer() -> Tokenizer:
    """Tokenizer that encodes text as it is: a model may write any bytes, and a grammar means exactly its own."""
    tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    tokenizer.normalizer = None
    return tokenizer


@functools.cache
def grammar_tokenizer(vocab_size: int = VOCAB_SIZE) -> GrammarTokenizer:
    return GrammarTokenizer(demo_folder(), vocab_size)


@functools.cache
def mask_workers(vocab_size: int = VOCAB_SIZE) -> MaskWorkers:
    return MaskWorkers(vocab_size, num_threads=1)


def ids_of(text: str) -> list[int]:
    ids: list[int] = text_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def schema(document: Any) -> ConstraintSpec:
    return ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(document))


def regex(text: str) -> ConstraintSpec:
    return ConstraintSpec(ConstraintKind.REGEX, text)


def lark(text: str) -> ConstraintSpec:
    return ConstraintSpec(ConstraintKind.GRAMMAR, text)


def choice(*values: str) -> ConstraintSpec:
    return ConstraintSpec(ConstraintKind.CHOICE, choices=values)


def compiled(spec: ConstraintSpec, tokenizer: GrammarTokenizer | None = None) -> CompiledGrammar:
    """Compile in this process and at once; the constraint must be valid."""
    tokenizer = tokenizer or grammar_tokenizer()
    assert spec.kind is not None
    matcher = new_matcher(tokenizer, to_lark(spec.kind, spec.text, spec.choices))
    assert not matcher.is_error(), matcher.get_error()
    ends = None
    if spec.has_shorter_ends:
        ends = ShortEnds(tokenizer, matcher, to_lark(spec.kind, spec.text, spec.choices))
    written = written_keys(spec, JsonBounds())
    return CompiledGrammar(matcher, tokenizer, spec.field, written=written, ends=ends, thought=spec.thought)


def compiled_around(spec: ConstraintSpec, around: str, tokenizer: GrammarTokenizer | None = None) -> CompiledGrammar:
    """Compile a constraint of the part @answer of an output, as the trial process and the service do it."""
    tokenizer = tokenizer or grammar_tokenizer()
    assert spec.kind is not None
    choices = list(spec.choices)
    request = {"kind": spec.kind.value, "text": spec.text, "choices": choices, "around": around}
    answer = answer_to(tokenizer, request, 10.0)
    matcher = new_matcher(tokenizer, answer["lark"], answer["around"])
    assert not matcher.is_error(), matcher.get_error()
    written = written_keys(replace(spec, around=around), JsonBounds())
    return CompiledGrammar(matcher, tokenizer, spec.field, written=written)


def held(grammar: HeldGrammar, thought: Thought | None = None) -> CallHolder:
    """Compile what holds the calls that a model chooses to make."""
    return CallHolder(compiled(lark(grammar.grammar)), CallMarkers(grammar.opens, grammar_tokenizer()), thought)


def allowed(state: MatcherState | HeldCalls, vocab_size: int = VOCAB_SIZE) -> set[int]:
    """Return the ids with a set bit."""
    workers = mask_workers(vocab_size)
    words = np.zeros((1, workers.num_words), dtype=np.int32)
    workers.fill([state], words)
    # llguidance's own end of output, which the sampler never looks at, may have a word of its own.
    bits = np.unpackbits(words[0, : words_of(vocab_size)].view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return set(np.flatnonzero(bits).tolist())


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """True when the whole text is an output: token by token, and complete at its end."""
    state = grammar.start(EOS)
    return all(state.advance(token_id) for token_id in ids_of(text)) and state.advance(EOS[0])


def spellings(value: Any) -> Iterator[str]:
    """Make JSON texts of a value: every order of its properties (a grammar has one), with and without escapes."""
    for ordered in itertools.islice(_orders(value), 200):
        for ensure_ascii in (False, True):
            text = json.dumps(ordered, ensure_ascii=ensure_ascii)
            if text.isprintable():
                yield text


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in itertools.islice(itertools.permutations(value), 120):
            for members in itertools.product(*(list(_orders(value[name])) for name in names)):
                yield dict(zip(names, members, strict=True))
    elif isinstance(value, list):
        for items in itertools.product(*(list(_orders(item)) for item in value)):
            yield list(items)
    else:
        yield value
