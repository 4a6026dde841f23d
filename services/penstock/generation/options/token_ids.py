"""Lists of token ids in options: what may be empty, what must differ, and that every id is in the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from penstock.common.errors import InvalidArgument
from penstock.generation.options.request_options import Alternatives, RequestedOptions, TokenSequence

OUT_OF_VOCABULARY = "TOKEN_OUT_OF_VOCABULARY"


def check_ids(options: RequestedOptions, vocab_size: int, *, prefix: str = "config.") -> None:
    """Raises InvalidArgument naming `prefix` + field for an empty entry, a repeated one or an id outside."""
    for name, ids in _flat(options):
        check_vocabulary(prefix + name, ids, vocab_size)
    for name, sequences in _sequences(options):
        if not all(sequences):
            raise InvalidArgument(prefix + name, "no entry may be empty")
        for ids in sequences:
            check_vocabulary(prefix + name, ids, vocab_size)
    for name, words in (
        ("constraints", options.beams.constraints),
        ("force_words_ids", options.beams.force_words_ids),
    ):
        for alternatives in words or ():
            _check_alternatives(prefix + name, alternatives, vocab_size)
    biased = [ids for ids, _ in options.processors.sequence_bias or ()]
    if len(set(biased)) < len(biased):
        raise InvalidArgument(prefix + "sequence_bias", "must not hold a sequence twice")
    if options.processors.allowed_token_trie == ():
        raise InvalidArgument(prefix + "allowed_token_trie", "must hold at least one sequence")
    if options.guidance.negative_prompt_ids == ():
        raise InvalidArgument(prefix + "negative_prompt_ids", "must hold at least one token")


def check_possible(options: RequestedOptions, vocab_size: int, *, prefix: str = "config.") -> None:
    """Refuse what would leave no token at some position. Forced and suppressed: transformers 5.23's validate().

    `options` hold the model's defaults too. Raises InvalidArgument naming `prefix` + suppress_tokens.
    """
    asked, field = options.processors, prefix + "suppress_tokens"
    if asked.suppress_tokens is None:
        return
    suppressed = set(asked.suppress_tokens)
    if len(suppressed) >= vocab_size:
        raise InvalidArgument(field, "must leave a token of the vocabulary")
    if asked.forced_bos_token_id in suppressed:
        raise InvalidArgument(field, f"must not hold {prefix}forced_bos_token_id")
    if asked.forced_eos_token_id and suppressed.issuperset(asked.forced_eos_token_id):
        raise InvalidArgument(field, f"must not hold every one of {prefix}forced_eos_token_id")
    if asked.allowed_token_ids and suppressed.issuperset(asked.allowed_token_ids):
        raise InvalidArgument(field, f"must leave one of {prefix}allowed_token_ids")


def check_vocabulary(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidArgument naming `field` when an id is not below `vocab_size`."""
    if max(ids, default=0) >= vocab_size:
        raise InvalidArgument(field, f"every id must be below {vocab_size}", reason=OUT_OF_VOCABULARY)


def _flat(options: RequestedOptions) -> Iterator[tuple[str, Iterable[int]]]:
    processors = options.processors
    yield "negative_prompt_ids", options.guidance.negative_prompt_ids or ()
    yield "forced_bos_token_id", () if processors.forced_bos_token_id is None else (processors.forced_bos_token_id,)
    yield "forced_eos_token_id", processors.forced_eos_token_id or ()
    yield "suppress_tokens", processors.suppress_tokens or ()
    yield "begin_suppress_tokens", processors.begin_suppress_tokens or ()
    yield "logit_bias", processors.logit_bias or ()
    yield "allowed_token_ids", processors.allowed_token_ids or ()


def _sequences(options: RequestedOptions) -> Iterator[tuple[str, tuple[TokenSequence, ...]]]:
    processors = options.processors
    yield "bad_words_ids", processors.bad_words_ids or ()
    yield "sequence_bias", tuple(ids for ids, _ in processors.sequence_bias or ())
    yield "allowed_token_trie", processors.allowed_token_trie or ()


def _check_alternatives(field: str, alternatives: Alternatives, vocab_size: int) -> None:
    """One word to force. As transformers 4.41's DisjunctiveTrie: no alternative may begin with another."""
    if not alternatives or not all(alternatives):
        raise InvalidArgument(field, "no entry may be empty")
    for ids in alternatives:
        check_vocabulary(field, ids, vocab_size)
    ordered = sorted(alternatives)
    for one, following in pairwise(ordered):
        if following[: len(one)] == one:
            raise InvalidArgument(field, "no alternative may be equal to, or the beginning of, another")
