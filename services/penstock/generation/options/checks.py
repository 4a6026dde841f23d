"""Checks of options: each by itself, its size, its ids, and combinations that would leave no token."""

from __future__ import annotations

from penstock.common.errors import InvalidArgument
from penstock.generation.options.kinds import SEED_RANGE
from penstock.generation.options.option_spec import OptionSet
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.table import RequestOptions


def check_options(options: OptionSet, *, prefix: str | None = None) -> None:
    """Check each option by itself. Raises InvalidArgument naming `prefix` (None: the section) + field."""
    for name, value in options.items():
        spec = options.specs[name]
        field = spec.path if prefix is None else prefix + name
        if spec.bounds is not None and not spec.bounds.allow(value):
            raise InvalidArgument(field, str(spec.bounds))
        spec.kind.check(value, field)


def check_limits(options: OptionSet, limits: RequestLimits) -> None:
    """Check sizes and counts. Raises InvalidArgument naming the field."""
    for name, value in options.items():
        spec = options.specs[name]
        spec.kind.check_limit(value, spec.path, limits, spec.limit)


def check_ids(options: OptionSet, vocab_size: int, *, prefix: str | None = None) -> None:
    """Check ids. Raises InvalidArgument naming `prefix` + field for an empty entry, a repeated one or an id outside."""
    for name, value in options.items():
        spec = options.specs[name]
        spec.kind.check_ids(value, spec.path if prefix is None else prefix + name, vocab_size)


def check_possible(options: RequestOptions, vocab_size: int, *, prefix: str = "config.") -> None:
    """Refuse options that would leave no token at some position. Forced and suppressed ids: transformers 5.23's
    validate().

    `options` hold the model's defaults too. Raises InvalidArgument naming `prefix` + suppress_tokens.
    """
    field = prefix + "suppress_tokens"
    if options.suppress_tokens is None:
        return
    suppressed = set(options.suppress_tokens)
    if len(suppressed) >= vocab_size:
        raise InvalidArgument(field, "must leave a token of the vocabulary")
    if options.forced_bos_token_id in suppressed:
        raise InvalidArgument(field, f"must not hold {prefix}forced_bos_token_id")
    if options.forced_eos_token_id and suppressed.issuperset(options.forced_eos_token_id):
        raise InvalidArgument(field, f"must not hold every one of {prefix}forced_eos_token_id")
    if options.allowed_token_ids and suppressed.issuperset(options.allowed_token_ids):
        raise InvalidArgument(field, f"must leave one of {prefix}allowed_token_ids")


def check_seed(seed: int, field: str) -> None:
    """Raise InvalidArgument when `seed` is outside [0, 2^63 - 1]."""
    if not SEED_RANGE.allow(seed):
        raise InvalidArgument(field, str(SEED_RANGE))
