"""Request for another engine: resolved as our own backends do it, and held against what the engine can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.generation.core.decoding_mode import PLAIN, Scope
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.options.request_options import GenerateOptions
from penstock.generation.options.resolve import resolve
from penstock.generation.options.table import CONFIG, SECTIONS
from penstock.generation.options.validate import validate, with_prompt
from penstock.generation.wire.convert import to_generate_options
from penstock.router.engines.engine_model import EngineModel
from penstock.v1 import generation_pb2

# Modes that only make an answer faster: an engine drafts as it was started.
_DRAFTS = frozenset((Scope.LOOKUP, Scope.NGRAM_MEMORY, Scope.LOOKAHEAD, Scope.DRAFT_MODEL))
# Fields of SamplingParams that every engine has, or that the router does for it.
_EVERY = frozenset(
    (
        "max_new_tokens",
        "min_new_tokens",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "seed",
        "num_return_sequences",
        "eos_token_ids",
        "ignore_eos",
        "stop_token_ids",
        "stop_strings",
        "include_stop_string_in_output",
        "skip_special_tokens",
        "top_logprobs",
        "max_time",
        # An engine has no such values where it works.
        "remove_invalid_values",
        # Looked at apart.
        "mode",
        "guidance",
        "tensors",
        "plugins",
    )
)
_PATHS = {spec.param: spec.path for specs in SECTIONS.values() for spec in specs.values() if spec.param is not None}
_FIELDS = tuple(field for field in dataclasses.fields(SamplingParams) if field.name not in _EVERY)
_NOT_THERE = "is not there"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Request with every default filled in."""

    options: GenerateOptions
    params: SamplingParams
    warnings: tuple[str, ...]
    # Tokens per delta.
    stream_interval: int
    # Ids that end a sequence: the model's or the caller's own, and stop ids.
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]

    @property
    def ending_ids(self) -> list[int]:
        """Ids that end a sequence, for the engine."""
        return sorted(self.eos_ids | self.stop_ids)

    def resumed(self, index: int) -> Sequence[int]:
        """Ids that an earlier attempt emitted of returned sequence `index`."""
        resumed = self.options.resumed_token_ids
        return resumed[index] if resumed else ()


def resolve_request(message: generation_pb2.GenerateRequest, model: EngineModel) -> EngineRequest:
    """Fill in the defaults of a request. Raises what our own backends raise for it."""
    plain = to_generate_options(message, model.limits)
    options = with_prompt(plain, model.defaults, model.facts)
    validate(options, model.facts, model.limits)
    resolved = resolve(options, model.defaults, model.facts, model.limits)
    params, warnings = resolved.params, resolved.warnings
    if params.mode is not PLAIN and _mode_field(options, model) is None:
        warnings = (*warnings, "this backend makes its own drafts: options of drafts have no effect")
        params = dataclasses.replace(params, mode=PLAIN)
    if options.calls is not None and options.calls.is_required and options.holds_calls:
        warnings = (*warnings, "this backend holds no calls to their schemas: `strict` of tools has no effect")
    if options.constraint is not None and options.constraint.may_be_calls:
        warnings = (*warnings, "this backend makes no calls beside a constraint: the tools have no effect")
    return EngineRequest(
        options,
        params,
        warnings,
        resolved.stream_interval,
        eos_ids=frozenset(() if params.ignore_eos else params.eos_token_ids),
        stop_ids=frozenset(run[0] for run in params.stop_token_ids if len(run) == 1),
    )


def lacking(
    request: EngineRequest, model: EngineModel, params: frozenset[str], constraints: frozenset[str], *, resumes: bool
) -> tuple[str, str] | None:
    """Return the first field of a request that an engine cannot do, and the reason; None: it can do all.

    `params` are fields of SamplingParams that it has beside the common ones, `constraints` kinds of a constraint.
    """
    options, asked = request.options, request.params
    if not model.generates:
        return "model", "is one for embeddings there"
    if asked.mode is not PLAIN:
        return _mode_field(options, model) or "config", _NOT_THERE
    if asked.guidance.is_on:
        return "config.guidance_scale", _NOT_THERE
    if options.output.tensors:
        return f"output.{options.output.tensors[0]}", _NOT_THERE
    for name in ("logits_processor", "stopping_criteria"):
        if getattr(options.options, name):
            return f"config.{name}", _NOT_THERE
    if options.inputs_embeds is not None:
        return "inputs_embeds", _NOT_THERE
    for field in _FIELDS:
        value = getattr(asked, field.name)
        unset = field.default_factory() if callable(field.default_factory) else field.default
        if field.name not in params and value != unset:
            return _PATHS[field.name], _NOT_THERE
    if any(len(run) > 1 for run in asked.stop_token_ids):
        return "stop.stop_token_ids", "may have single ids only"
    return _lacking_text(request, constraints, resumes=resumes)


def _lacking_text(request: EngineRequest, constraints: frozenset[str], *, resumes: bool) -> tuple[str, str] | None:
    """Return what an engine lacks of a constraint or of stop strings: it knows of no thought, and of no tokens before
    its own."""
    options = request.options
    if options.constraint is not None:
        kind = options.constraint.kind
        if kind is not None and kind.value not in constraints:
            return f"constraint.{kind.value}", _NOT_THERE
        if options.thought is not None:
            return "constraint", "cannot begin after a thought there"
        if resumes:
            return "constraint", "cannot go on there after tokens of another backend"
    if request.params.stop_strings:
        if options.thought is not None:
            return "stop.stop_strings", "cannot be looked for after a thought alone there"
        if resumes:
            return "stop.stop_strings", "cannot be looked for there after tokens of another backend"
    return None


def _mode_field(options: GenerateOptions, model: EngineModel) -> str | None:
    """Return the option that asks for a mode other than plain decoding; drafts are none."""
    merged = options.options.over(model.defaults.options)
    for name, value in merged.items():
        spec = CONFIG[name]
        if spec.chooses not in (None, Scope.SAMPLING) and spec.chooses not in _DRAFTS and spec.asks(value):
            return spec.path
    return None
