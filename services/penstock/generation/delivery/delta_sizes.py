"""Sizes of deltas: no delta, and no message of a session, may have more bytes than clients accept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.generation.core.request import Emission
from penstock.generation.core.tensors import StepTensors

# Most bytes of one delta, and of the events of one message: below the 4 MiB that clients receive by default.
MAX_DELTA_BYTES = 3 << 20
# Most bytes on the wire of an id, and of the log-probability of one token with its id and rank.
_ID_BYTES, _LOGPROB_BYTES = 5, 21
# A delta of at most this many tokens is never cut for its log-probabilities: they have at most 20 alternatives.
_SMALL = 64


def tensor_bytes(tensors: StepTensors | None) -> int:
    """Return the bytes of all tensors of one position."""
    if tensors is None:
        return 0
    parts = (
        tensors.scores,
        tensors.score_ids,
        tensors.logits,
        tensors.logit_ids,
        tensors.hidden_states,
        tensors.attentions,
    )
    return sum(len(part.data) for part in parts if part is not None)


def num_bytes(delta: Emission) -> int:
    """Return an upper bound on the bytes of `delta` on the wire, without a few bytes of framing."""
    size = _ID_BYTES * len(delta.token_ids)
    if delta.logprobs:
        size += sum(_LOGPROB_BYTES * (1 + len(position.top)) for position in delta.logprobs)
    return size + sum(map(tensor_bytes, delta.tensors)) if delta.tensors else size


def with_tensors(delta: Emission) -> Emission:
    """Return `delta` with an entry of tensors for every token."""
    if len(delta.tensors) == len(delta.token_ids):
        return delta
    return replace(delta, tensors=(None,) * len(delta.token_ids))


def split(delta: Emission) -> Iterator[Emission]:
    """Yield `delta` in parts that fit, of at least one token each. The end of the sequence is in the last part."""
    if not delta.tensors and len(delta.token_ids) <= _SMALL:
        yield delta
        return
    begin, size = 0, 0
    for place in range(len(delta.token_ids)):
        more = num_bytes(_slice(delta, place, place + 1))
        if place > begin and size + more > MAX_DELTA_BYTES:
            yield replace(_slice(delta, begin, place), finish=None)
            begin, size = place, 0
        size += more
    yield _slice(delta, begin, len(delta.token_ids)) if begin else delta


def _slice(delta: Emission, begin: int, end: int) -> Emission:
    return replace(
        delta,
        token_ids=delta.token_ids[begin:end],
        logprobs=delta.logprobs[begin:end],
        tensors=delta.tensors[begin:end],
    )
