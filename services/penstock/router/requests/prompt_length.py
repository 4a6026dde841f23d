"""Length of a prompt that may have embeddings in place of ids, or before them."""

from __future__ import annotations

from penstock.v1 import generation_pb2, text_pb2


def num_embeds(request: generation_pb2.GenerateRequest | text_pb2.GenerateTextRequest) -> int:
    """Return the number of embeddings that a request declares; the generation service checks the tensor."""
    if not request.HasField("inputs_embeds") or not request.inputs_embeds.shape:
        return 0
    # At most the number of bytes: shapes may lie.
    return min(max(request.inputs_embeds.shape[0], 0), request.inputs_embeds.ByteSize())


def num_prompt_tokens(request: generation_pb2.GenerateRequest | text_pb2.GenerateTextRequest, num_ids: int) -> int:
    """Return the number of tokens that the model reads for a prompt with this number of ids."""
    if not request.HasField("inputs_embeds"):
        return num_ids
    return num_embeds(request) + (num_ids if request.inputs_embeds_before_ids else 0)
