"""Reader of documents by a running server: the log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from penstock.common.errors import Internal
from penstock.evaluation.readers import Documents
from penstock.evaluation.reading import Reading

if TYPE_CHECKING:
    from penstock_client import Client, Completion


class ServedReader:
    """A Reader of a router's model. The caller closes the client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def readings(self, documents: Documents, most: int) -> Iterator[Reading]:
        """Raises PenstockError."""
        answers = self._client.generate_many(documents, max_new_tokens=1, do_sample=False, prompt_logprobs=most)
        for ids, answer in zip(documents, answers, strict=True):
            if isinstance(answer, Exception):
                raise answer
            yield _reading(answer, ids)


def _reading(answer: Completion, ids: list[int]) -> Reading:
    """Return the reading of one prompt. Raises Internal where the answer is about other tokens."""
    # A prompt's first token has no log-probability, and the server may add tokens before it.
    places = list(answer.started.prompt_logprobs)[1 - len(ids) :]
    if [place.chosen.token_id for place in places] != ids[1:] or not all(place.top for place in places):
        raise Internal("the server's prompt_logprobs are not those of the text", reason="INTERNAL")
    most = min(len(place.top) for place in places)
    return Reading(
        torch.tensor([place.chosen.logprob for place in places]),
        torch.tensor([[one.token_id for one in place.top[:most]] for place in places], dtype=torch.int32),
        torch.tensor([[one.logprob for one in place.top[:most]] for place in places]),
    )
