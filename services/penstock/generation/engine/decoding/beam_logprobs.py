"""Logprobs of a beam's tokens, shared with the beams that it forked from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.generation.core.request import Logprob, PositionLogprobs

if TYPE_CHECKING:
    from penstock.generation.core.draw import Candidates
    from penstock.generation.core.step import SampledToken


class Trail(NamedTuple):
    """The logprobs of a beam's last token, and the way there."""

    before: Trail | None
    last: PositionLogprobs

    @classmethod
    def of(cls, before: Trail | None, drawn: SampledToken, token_id: int, score: float) -> Trail:
        """`score`: the processed score of the token."""
        candidates = drawn.candidates
        assert candidates is not None
        top = drawn.logprobs.top if drawn.logprobs is not None else ()
        chosen = Logprob(token_id, score - candidates.log_total, _rank(token_id, candidates, top))
        return cls(before, PositionLogprobs(chosen, top))

    def unrolled(self) -> tuple[PositionLogprobs, ...]:
        """One entry per token, in order."""
        entries = []
        trail: Trail | None = self
        while trail is not None:
            entries.append(trail.last)
            trail = trail.before
        return tuple(reversed(entries))


def _rank(token_id: int, candidates: Candidates, top: tuple[Logprob, ...]) -> int:
    """0, for not known, where a constraint brought in a token that is neither a candidate nor listed."""
    if token_id in candidates.token_ids:
        return candidates.ranks[candidates.token_ids.index(token_id)]
    return next((entry.rank for entry in top if entry.token_id == token_id), 0)
