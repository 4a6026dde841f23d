"""Log-probabilities of other engines as our own: the protocols of vLLM and SGLang have the same messages for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.v1 import common_pb2


def from_output(told: Any, alternatives: int) -> list[common_pb2.PositionLogprobs]:
    """Return an OutputLogProbs, with this number of alternatives a position."""
    tops = told.top_logprobs
    return [
        _position(token_id, logprob, tops[at] if at < len(tops) else None, alternatives)
        for at, (token_id, logprob) in enumerate(zip(told.token_ids, told.token_logprobs, strict=False))
    ]


def from_input(told: Any, alternatives: int) -> list[common_pb2.PositionLogprobs]:
    """Return an InputLogProbs: the first token of a prompt has none of its own."""
    tops = told.top_logprobs
    positions = []
    for at, (token_id, logprob) in enumerate(zip(told.token_ids, told.token_logprobs, strict=False)):
        if logprob.HasField("value"):
            positions.append(_position(token_id, logprob.value, tops[at] if at < len(tops) else None, alternatives))
        else:
            positions.append(common_pb2.PositionLogprobs())
    return positions


def from_candidates(
    token_ids: Sequence[int], logprobs: Sequence[float], ranks: Sequence[int], candidates: Sequence[Any], most: int
) -> list[common_pb2.PositionLogprobs]:
    """Return the log-probabilities of vllm.Inference, with at most `most` alternatives a position: its candidates are
    without the token itself, which may be one of the most likely ones."""
    positions = []
    for at, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=False)):
        listed = {one.id: one.logprob for one in candidates[at].tokens} if at < len(candidates) else {}
        listed[token_id] = logprob
        position = _ranked(token_id, logprob, sorted(listed.items(), key=_by_value, reverse=True), most)
        if not position.chosen.rank and at < len(ranks):
            position.chosen.rank = ranks[at]
        positions.append(position)
    return positions


def _by_value(entry: tuple[int, float]) -> float:
    return entry[1]


def _position(token_id: int, logprob: float, top: Any, alternatives: int) -> common_pb2.PositionLogprobs:
    """Make a position. An engine lists the token itself first, then the most likely ones: one more than was asked for
    is asked of it, and sorted."""
    entries = [] if top is None else list(zip(top.token_ids, top.values, strict=False))
    return _ranked(token_id, logprob, sorted(entries, key=_by_value, reverse=True), alternatives)


def _ranked(
    token_id: int, logprob: float, entries: Sequence[tuple[int, float]], alternatives: int
) -> common_pb2.PositionLogprobs:
    """Make a position of entries in order."""
    rank = next((at for at, (one, _) in enumerate(entries, 1) if one == token_id), 0)
    return common_pb2.PositionLogprobs(
        # The last of the list has a rank beyond it, which is not told.
        chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=logprob, rank=rank if rank <= alternatives else 0),
        top=[
            common_pb2.TokenLogprob(token_id=one, logprob=value, rank=at)
            for at, (one, value) in enumerate(entries[:alternatives], 1)
        ],
    )
