"""Answers of a generation service that keeps every promise, of scripted ids.

Options, lengths and ends are resolved by the service's own code, not by the router's idea of them. So a router that
expects something else takes an honest backend for a liar, and a test that counts errors sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import ModelDefaults, ModelFacts
from penstock.generation.options.resolve import resolve
from penstock.generation.options.validate import validate
from penstock.generation.wire.convert import to_generate_options
from penstock.v1 import common_pb2, generation_pb2

_LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True)
class HonestAnswer:
    """Ids of every sequence of an answer, and the reason of their end."""

    ids: Sequence[int]
    reason: common_pb2.FinishReason


@dataclass(frozen=True)
class HonestModel:
    """Model with no end-of-sequence id of its own: without one of the caller's it ends an answer where it likes."""

    facts: ModelFacts
    defaults: ModelDefaults = field(default_factory=ModelDefaults)

    def answer(self, request: generation_pb2.GenerateRequest, script: Sequence[int]) -> HonestAnswer:
        """Answer with the ids of `script`, or more where nothing may end them, or fewer where something does.

        Raises PenstockError as a generation service does: for options that cannot be.
        """
        options = to_generate_options(request, _LIMITS)
        validate(options, self.facts, _LIMITS)
        params = resolve(options, self.defaults, self.facts, _LIMITS).params
        ids: list[int] = []
        for token_id in _endless(script, params, request.stop.ignore_eos):
            if len(ids) == params.max_new_tokens:
                return HonestAnswer(ids, common_pb2.FINISH_REASON_LENGTH)
            ids.append(token_id)
            if not request.stop.ignore_eos and token_id in params.eos_token_ids:
                return HonestAnswer(ids, common_pb2.FINISH_REASON_STOP_EOS)
            if any(tuple(ids[-len(run) :]) == tuple(run) for run in params.stop_token_ids):
                return HonestAnswer(ids, common_pb2.FINISH_REASON_STOP_TOKEN)
            if len(ids) == len(script) and _is_constrained(request):
                return HonestAnswer(ids, common_pb2.FINISH_REASON_CONSTRAINT_DONE)
        if len(ids) == params.max_new_tokens:
            return HonestAnswer(ids, common_pb2.FINISH_REASON_LENGTH)
        return HonestAnswer(ids, common_pb2.FINISH_REASON_STOP_EOS)


def _endless(script: Sequence[int], params: SamplingParams, ignores_eos: bool) -> Iterator[int]:
    """Yield the script's ids; behind them the caller's end-of-sequence id, or the last one for ever if none counts."""
    yield from script
    if ignores_eos:
        while True:
            yield script[-1]
    yield from params.eos_token_ids[:1]


def _is_constrained(request: generation_pb2.GenerateRequest) -> bool:
    config = request.config
    return request.HasField("constraint") or bool(config.constraints or config.force_words_ids)
