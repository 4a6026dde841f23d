"""A computed prefix that a caller holds: what `past_key_values` is for transformers' generate()."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from penstock.common.errors import InvalidArgument


class PrefixHandle:
    """Keys and values of a prefix, which stay in the pool until it is closed or collected as garbage.

    Prompts that begin with its ids need not compute them, with the handle or without; with it, `generate` checks that
    they do begin so.
    """

    def __init__(self, token_ids: Sequence[int], num_held_tokens: int, release: Callable[[], None]) -> None:
        self.token_ids = tuple(token_ids)
        # Whole blocks of them: the last few tokens are computed again.
        self.num_held_tokens = num_held_tokens
        self._finalizer = weakref.finalize(self, release)

    def get_seq_length(self) -> int:
        """Return the number of its tokens, as transformers' Cache does."""
        return len(self.token_ids)

    @property
    def is_open(self) -> bool:
        """False once it is closed."""
        return self._finalizer.alive

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise InvalidArgument unless a prompt goes on from this prefix."""
        if not self.is_open:
            raise InvalidArgument("past_key_values", "is closed: hold the prefix again")
        if tuple(token_ids[: len(self.token_ids)]) != self.token_ids or len(token_ids) == len(self.token_ids):
            raise InvalidArgument(
                "past_key_values", f"the prompt must be its {len(self.token_ids)} tokens and at least one more"
            )

    def close(self) -> None:
        """Give the blocks back. Calling it again is harmless."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def prefix_handle(value: Any) -> PrefixHandle | None:
    """Return the handle given as past_key_values. Raises TypeError for anything else, such as transformers' caches."""
    if value is None or isinstance(value, PrefixHandle):
        return value
    raise TypeError(
        "option 'past_key_values': must be what Generator.hold_prefix returns, since keys and values lie in the "
        f"engine's pool; found {type(value).__name__}"
    )
