"""A request's budget of thinking: checks, warnings, and the plain data that the sampler takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.common.errors import InvalidArgument
from penstock.generation.core.decoding_mode import Scope
from penstock.generation.core.thought_budget import ThoughtBudget
from penstock.generation.options.kinds import check_vocabulary

if TYPE_CHECKING:
    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.options.mode_options import Modes
    from penstock.generation.options.request_limits import RequestLimits
    from penstock.generation.options.request_options import GenerateOptions, ModelFacts
    from penstock.text.token_bytes import TokenBytes

_FIELD = "config.thinking_budget_tokens"


def check_thinking(request: GenerateOptions, modes: Modes, model: ModelFacts, limits: RequestLimits) -> list[str]:
    """Check a budget of thinking and what closes the thought; return warnings. Raises InvalidArgument."""
    end, tokens = request.thought_end, request.options.thinking_budget_tokens
    if end is not None:
        if not 0 < len(end.token_ids) <= limits.max_phrase_tokens:
            raise InvalidArgument("thought_end.token_ids", f"must have 1 to {limits.max_phrase_tokens} ids")
        check_vocabulary("thought_end.token_ids", end.token_ids, model.vocab_size)
    if tokens is None:
        return []
    if Scope.BEAMS in modes.mode.uses:
        raise InvalidArgument(_FIELD, "must be unset in beam search: beams cannot be forced to close a thought")
    if not model.has_token_bytes:
        raise InvalidArgument(_FIELD, f"cannot be kept: {model.no_tokenizer}")
    return [f"{_FIELD} has no effect: the answer has no thought"] if end is None and tokens else []


def with_thought_budget(params: SamplingParams, request: GenerateOptions, table: TokenBytes | None) -> SamplingParams:
    """Return the parameters with the request's budget, or the wish for one where it can be kept."""
    end = request.thought_end
    if end is None or table is None or Scope.BEAMS in params.mode.uses:
        return params
    asked = params.thinking_budget_tokens
    tokens = end.wished_tokens if asked is None else asked
    return params if tokens is None else replace(params, thought_budget=ThoughtBudget.of(tokens, end, table))
