"""A request's inputs_embeds: checks of its form and of the fields beside it, and warnings about the prompt's ids."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.common.dtypes import COMPUTED
from penstock.common.errors import InvalidArgument
from penstock.generation.core.decoding_mode import Scope
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.options.mode_options import Modes
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelFacts
from penstock.generation.options.table import RequestOptions

_FIELD = "inputs_embeds"
# Options that have no effect beside embeddings, since transformers takes "encoder" ids from the model's input alone.
ENCODER_OPTIONS = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")
# Options that look at the ids of prompt and output.
_ID_OPTIONS = ("repetition_penalty", "no_repeat_ngram_size")
_OFF = SamplingParams(1)


def check_embeds(request: GenerateOptions, model: ModelFacts, limits: RequestLimits) -> None:
    """Check the tensor, except its values, alone and together with the prompt's ids. Raises InvalidArgument."""
    embeds = request.inputs_embeds
    if embeds is None:
        if request.inputs_embeds_before_ids:
            raise InvalidArgument("inputs_embeds_before_ids", f"must be false without {_FIELD}")
        return
    dtype = COMPUTED.get(embeds.dtype)
    if dtype is None:
        raise InvalidArgument(_FIELD, "dtype must be D_TYPE_FLOAT32, D_TYPE_FLOAT16 or D_TYPE_BFLOAT16")
    if len(embeds.shape) != 2 or embeds.shape[0] < 1 or embeds.shape[1] != model.hidden_size:
        raise InvalidArgument(_FIELD, f"shape must be (tokens, {model.hidden_size}), with at least one token")
    if len(embeds.data) > limits.max_inputs_embeds_bytes:
        most = limits.max_inputs_embeds_bytes
        raise InvalidArgument(_FIELD, f"must take at most the {most} bytes of --max-inputs-embeds-bytes")
    rows, hidden = embeds.shape
    if len(embeds.data) != (num_bytes := rows * hidden * dtype.num_bytes):
        raise InvalidArgument(_FIELD, f"data must be {num_bytes} bytes, as dtype and shape say")
    if len(request.prompt_token_ids) > rows and not request.inputs_embeds_before_ids:
        raise InvalidArgument(
            "prompt",
            f"must have at most as many tokens as {_FIELD} has rows ({rows}): they are the ids of its rows; for tokens "
            "after the rows set inputs_embeds_before_ids",
        )


def check_beside_embeds(request: GenerateOptions, options: RequestOptions, modes: Modes) -> None:
    """Refuse options that need missing ids or text of the prompt.

    `options` hold the model's defaults too. Raises InvalidArgument naming the option.
    """
    if request.inputs_embeds is None:
        return
    if options.token_healing:
        raise InvalidArgument("config.token_healing", f"must be false with {_FIELD}: it chooses the last token by text")
    if Scope.DRAFT_MODEL in modes.mode.uses:
        raise InvalidArgument("config.assistant_model", f"must be unset with {_FIELD}: a draft model cannot read them")
    if modes.guidance.is_on and not modes.guidance.negative_prompt_ids and not request.prompt_token_ids:
        raise InvalidArgument(
            "config.negative_prompt_ids", f"must be set: guidance has no last prompt token with {_FIELD} alone"
        )
    if request.output.prompt_logprobs is not None and request.num_placeholders:
        raise InvalidArgument("output.prompt_logprobs", f"must be unset: not every row of {_FIELD} has an id")


def embeds_warnings(request: GenerateOptions) -> Iterator[str]:
    """Yield warnings about the request's own options that need missing ids, as transformers does."""
    if request.inputs_embeds is None:
        return
    asked = dict(request.options.items())
    for name in ENCODER_OPTIONS:
        if asked.get(name, getattr(_OFF, name)) != getattr(_OFF, name):
            yield f"config.{name} has no effect: the prompt came as {_FIELD}"
    if request.prompt_token_ids:
        return
    for name in _ID_OPTIONS:
        if asked.get(name, getattr(_OFF, name)) != getattr(_OFF, name):
            yield f"config.{name} looks at the output only: {_FIELD} came without ids"
