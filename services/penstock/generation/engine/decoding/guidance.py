"""Classifier-free guidance: the unconditional branch that goes beside a returned sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.generation.core.draw import DrawKind, DrawSpec
from penstock.generation.core.sequence import Sequence

if TYPE_CHECKING:
    from penstock.generation.core.request import Request
    from penstock.generation.core.sampling_params import SamplingParams

# Guides of one request begin with the same negative prompt, and so are a family of their own.
GUIDE_FAMILY = 1


def negative_prompt(request: Request) -> list[int]:
    """What the unconditional branch starts from; transformers: the last prompt token when nothing else was given."""
    options = request.params.guidance
    return (
        list(options.negative_prompt_ids) if options and options.negative_prompt_ids else request.prompt_token_ids[-1:]
    )


def new_guide(request: Request, index: int, seq_id: int) -> Sequence:
    """The unconditional branch of returned sequence `index`, before any output."""
    prompt = negative_prompt(request)
    return Sequence(
        seq_id=seq_id,
        index=index,
        params=_guide_params(request.params),
        seed=0,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        draw=DrawSpec(DrawKind.GUIDE),
        family=GUIDE_FAMILY,
    )


def _guide_params(params: SamplingParams) -> SamplingParams:
    """Nothing is drawn from a guide and nobody sees its rows: it is the plain model over its tokens."""
    return replace(params, guidance=None, dola=None, tensors=None, top_logprobs=None, prompt_logprobs=None)
