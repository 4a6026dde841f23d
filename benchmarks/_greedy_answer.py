"""One greedy answer of a generation service: what a start has to do before it is of use."""

from __future__ import annotations

import grpc
from penstock.v1 import config_pb2, generation_pb2, generation_pb2_grpc

_PROMPT = [5, 6, 7, 8, 9, 10]
_NUM_TOKENS = 16


def ids_of(address: str) -> tuple[int, ...]:
    """Ids of a greedy answer."""
    asked = generation_pb2.GenerateRequest(
        prompt_token_ids=_PROMPT,
        config=config_pb2.GenerationConfig(max_new_tokens=_NUM_TOKENS),
        stop=config_pb2.StopConfig(ignore_eos=True),
    )
    with grpc.insecure_channel(address) as channel:
        events = generation_pb2_grpc.GenerationServiceStub(channel).Generate(asked)
        return tuple(token for event in events if event.HasField("delta") for token in event.delta.token_ids)
