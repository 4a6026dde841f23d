"""Model of another engine: its facts, limits and defaults, in the terms in which our own backends judge a request."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.common.errors import InvalidArgument, StartupError
from penstock.generation.options.checks import check_options
from penstock.generation.options.hf_json import options_of
from penstock.generation.options.kinds import BadValue
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import ModelDefaults, ModelFacts
from penstock.generation.options.table import RequestOptions
from penstock.generation.wire.option_messages import from_options
from penstock.router.engines.engine_blocks import NAMED_TOKENS
from penstock.router.engines.engine_services import EngineFacts
from penstock.router.engines.tokenizer_bundle import BundleFacts
from penstock.v1 import common_pb2, config_pb2, model_pb2, tokenizer_pb2

# Above it a reported size is none that a model has.
_MOST = 1 << 31


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Model that an engine serves."""

    facts: ModelFacts
    defaults: ModelDefaults
    limits: RequestLimits
    # False: it embeds texts.
    generates: bool
    info: model_pb2.GetModelInfoResponse


def read_model(
    told: EngineFacts, bundle: BundleFacts | None, max_top_logprobs: int, tokenizer: tokenizer_pb2.GetTokenizerResponse
) -> EngineModel:
    """Read what an engine tells of its model. `bundle` are its files if it sends them; `tokenizer` are the facts of the
    router's own, for what the engine's protocol does not tell.

    Raises StartupError for facts that no model has.
    """
    context = told.max_context_tokens
    vocabulary = tokenizer.vocab_size if told.vocab_size is None else told.vocab_size
    if not (0 < context < _MOST and 0 < vocabulary < _MOST):
        raise StartupError("the backend tells no context or vocabulary of its model", flag="--backend")
    ids = known_ids(tokenizer.eos_token_ids if told.eos_token_ids is None else told.eos_token_ids, vocabulary)
    defaults = bundle.defaults if bundle is not None else _told_defaults(told.default_sampling_params_json, ids)
    name, window = told.name, told.max_running_requests
    limits = RequestLimits(max_top_logprobs=max_top_logprobs)
    facts = ModelFacts(
        name,
        vocabulary,
        context,
        tokenizer_fingerprint=bundle.fingerprint if bundle is not None else "",
        has_token_bytes=True,
        num_layers=bundle.num_layers if bundle is not None else 1,
    )
    info = model_pb2.GetModelInfoResponse(
        model=name,
        architecture=told.architecture,
        model_type=told.model_type,
        world_size=1,
        # Blocks as the router names them, whatever the engine's own are.
        kv=model_pb2.KvGeometry(block_size=NAMED_TOKENS, num_blocks=told.kv_tokens // NAMED_TOKENS, prefix_cache=True),
        limits=model_pb2.Limits(
            max_context_tokens=context,
            max_running_sequences=window,
            max_return_sequences=limits.max_return_sequences,
            max_top_logprobs=max_top_logprobs,
            max_stop_strings=limits.max_stop_strings,
            max_logit_bias=limits.max_logit_bias,
        ),
        eos_token_ids=defaults.eos_token_ids,
        vocab_size=vocabulary,
        tokenizer_fingerprint=facts.tokenizer_fingerprint,
        state=common_pb2.MODEL_STATE_READY,
        percent_loaded=100.0,
        default_config=from_options(defaults.options),
        default_stop=config_pb2.StopConfig(
            stop_strings=defaults.stop_strings,
            stop_token_ids=[common_pb2.TokenIds(ids=run) for run in defaults.eos_sequences],
        ),
    )
    if defaults.bos_token_id is not None:
        info.bos_token_id = defaults.bos_token_id
    if defaults.pad_token_id is not None:
        info.pad_token_id = defaults.pad_token_id
    return EngineModel(facts, defaults, limits, told.generates, info)


def known_ids(told: Iterable[int], vocabulary: int) -> tuple[int, ...]:
    """Return those of the ids that a vocabulary of this size has."""
    return tuple(token_id for token_id in told if 0 <= token_id < vocabulary)


def _told_defaults(told: str, eos_token_ids: tuple[int, ...]) -> ModelDefaults:
    """Return the defaults that an engine tells without the file. It leaves do_sample out: options of sampling are in a
    file that samples. Raises StartupError."""
    try:
        values = json.loads(told) if told else {}
        options = options_of({name: value for name, value in values.items() if value is not None})
        check_options(options, prefix="")
    except (ValueError, RecursionError, AttributeError, TypeError, BadValue, InvalidArgument) as error:
        raise StartupError("the backend's default_sampling_params_json cannot be read", flag="--backend") from error
    samples = any(name in values for name in ("temperature", "top_p", "top_k", "min_p"))
    if samples and options.do_sample is None:
        options = RequestOptions(do_sample=True).over(options)
    return ModelDefaults(options, eos_token_ids)
