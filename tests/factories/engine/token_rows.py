"""Plain tokens of sessions as rows of SessionTokens, in the generation service's own form."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.v1 import generation_pb2


def in_rows(
    message: generation_pb2.SessionResponse, handles: Mapping[tuple[str, int], int]
) -> generation_pb2.SessionResponse:
    """Return `message` with rows in place of the plain deltas of requests (id and epoch) that have a handle."""
    told = generation_pb2.SessionResponse(step=message.step)
    for event in message.events:
        handle = handles.get((event.request_id, event.attempt_epoch), 0)
        if not handle or not event.HasField("delta") or not _is_plain(event.delta):
            told.events.append(event)
            continue
        if not told.events or not told.events[-1].HasField("tokens"):
            told.events.add().tokens.SetInParent()
        columns = told.events[-1].tokens
        columns.handles.append(handle)
        columns.seqs.append(event.delta.seq)
        columns.token_ids.append(event.delta.token_ids[0])
    return told


def _is_plain(delta: generation_pb2.TokenDelta) -> bool:
    """True when it is one token of sequence 0 and nothing else."""
    return len(delta.token_ids) == 1 and delta == generation_pb2.TokenDelta(seq=delta.seq, token_ids=delta.token_ids)
