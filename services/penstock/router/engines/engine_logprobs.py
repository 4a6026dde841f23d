"""Log-probabilities of other engines as our own: the protocols of vLLM and SGLang have the same messages for them."""

from __future__ import annotations

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


def _position(token_id: int, logprob: float, top: Any, alternatives: int) -> common_pb2.PositionLogprobs:
    """Make a position. An engine lists the token itself first, then the most likely ones: one more than was asked for
    is asked of it, and sorted."""
    entries = sorted(
        {} if top is None else zip(top.token_ids, top.values, strict=False), key=lambda entry: entry[1], reverse=True
    )
    rank = next((at for at, (one, _) in enumerate(entries, 1) if one == token_id), 0)
    return common_pb2.PositionLogprobs(
        # The last of the list has a rank beyond it, which is not told.
        chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=logprob, rank=rank if rank <= alternatives else 0),
        top=[
            common_pb2.TokenLogprob(token_id=one, logprob=value, rank=at)
            for at, (one, value) in enumerate(entries[:alternatives], 1)
        ],
    )
