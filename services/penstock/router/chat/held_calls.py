"""Message to the generation service: the grammar of calls that a model chooses to make."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penstock.router.chat.call_block import Schemas
from penstock.router.chat.forced_calls import answer_or_calls_grammar, held_grammar
from penstock.router.chat.formats import ChatFormat
from penstock.v1 import generation_pb2


def call_grammar_message(
    chat: ChatFormat, schemas: Schemas, strict: Collection[str], token_ids: Mapping[str, int], *, max_calls: int
) -> generation_pb2.CallGrammar:
    """Return the message; see `held_grammar`."""
    held = held_grammar(chat, schemas, strict, token_ids, max_calls=max_calls)
    return generation_pb2.CallGrammar(
        opens=held.opens,
        grammar=held.grammar,
        # gpt-oss writes calls among its thoughts, and control tokens tell them apart.
        within_thought=chat.tools.is_harmony,
        # Without a strict tool the caller asked for no grammar: none is refused for its sake.
        is_required=any(name in strict for name in schemas),
    )


def calls_beside_answer(
    chat: ChatFormat,
    schemas: Schemas,
    strict: Collection[str],
    token_ids: Mapping[str, int],
    *,
    max_calls: int,
    in_reasoning: bool,
    may_think: bool,
) -> generation_pb2.CallGrammar:
    """Return the message for a request with a constraint of its answer; see `answer_or_calls_grammar`."""
    grammar = answer_or_calls_grammar(
        chat, schemas, strict, token_ids, max_calls=max_calls, in_reasoning=in_reasoning, may_think=may_think
    )
    return generation_pb2.CallGrammar(beside_answer=grammar)
