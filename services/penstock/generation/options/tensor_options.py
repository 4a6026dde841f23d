"""The options output_scores, output_logits, output_hidden_states and output_attentions, and their sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.errors import InvalidArgument
from penstock.generation.core.decoding_mode import TensorOutputs
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.table import OutputOptions

_FLOAT_BYTES, _ID_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """Sizes of the model that tensors depend on."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int


def resolve_tensors(
    output: OutputOptions, params: SamplingParams, prompt_tokens: int, sizes: TensorSizes, limits: RequestLimits
) -> TensorOutputs | None:
    """Resolve the tensors to output; None when none is asked for. `params` are resolved but for the tensors.

    Raises InvalidArgument naming `output.*`: modes without tensors, and more bytes than a delta or the answer may
    have, which are computed from the longest answer that the request allows.
    """
    asked = frozenset(output.tensors)
    if not asked:
        return None
    if params.mode.no_tensors:
        raise InvalidArgument(f"output.{output.tensors[0]}", params.mode.no_tensors)
    wanted = TensorOutputs(
        scores="output_scores" in asked,
        logits="output_logits" in asked,
        hidden_states="output_hidden_states" in asked,
        attentions="output_attentions" in asked,
        top_k=min(output.scores_top_k or 0, sizes.vocab_size),
        steps=frozenset(output.tensor_steps),
    )
    _check_size(wanted, output.tensors, params, prompt_tokens, sizes, limits)
    return wanted


def _check_size(
    wanted: TensorOutputs,
    names: tuple[str, ...],
    params: SamplingParams,
    prompt_tokens: int,
    sizes: TensorSizes,
    limits: RequestLimits,
) -> None:
    count = params.max_new_tokens
    steps = sorted(step for step in wanted.steps if step < count) if wanted.steps else range(count)
    if not steps:
        return
    largest = {name: _bytes(name, wanted, prompt_tokens + steps[-1], sizes) for name in names}
    each, most = sum(largest.values()), limits.max_token_tensor_bytes
    field = f"output.{max(largest, key=lambda name: largest[name])}"
    if each > most:
        raise InvalidArgument(
            field, f"the tensors of a token take up to {each} bytes, and {most} fit a message: set output.scores_top_k"
        )
    # The context grows by one per token, so the mean over the tokens counts for attentions.
    mean = prompt_tokens + sum(steps) / len(steps)
    # Beams keep those of all that may still be returned.
    kept = max(params.num_return_sequences, int(params.mode.sizes.get("num_beams", 1)))
    total = kept * len(steps) * sum(_bytes(name, wanted, mean, sizes) for name in names)
    if total > limits.max_tensor_bytes:
        raise InvalidArgument(
            field,
            f"the tensors take up to {int(total)} bytes, and an answer may have {limits.max_tensor_bytes}: "
            "set output.scores_top_k, output.tensor_steps or config.max_new_tokens",
        )


def _bytes(name: str, wanted: TensorOutputs, context: float, sizes: TensorSizes) -> float:
    """Bytes of one tensor for a token drawn after `context` tokens."""
    if name == "output_hidden_states":
        return _FLOAT_BYTES * (sizes.num_layers + 1) * sizes.hidden_size
    if name == "output_attentions":
        return _FLOAT_BYTES * sizes.num_layers * sizes.num_heads * context
    return (_FLOAT_BYTES + _ID_BYTES) * wanted.top_k or _FLOAT_BYTES * sizes.vocab_size
