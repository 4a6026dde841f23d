"""What transformers only warns about: options that have no effect in the chosen mode.

Only the request's own options warn: a model's file with sampling values is no mistake of the caller (transformers 5.x).
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.generation.core.modes import EarlyStopping
from penstock.generation.options.generate_options import RequestedOutput
from penstock.generation.options.modes import DEFAULT_TOP_K, Modes
from penstock.generation.options.request_options import RequestedOptions

# Sampling options, and the values that go without a warning while nothing is sampled.
SAMPLING_ONLY: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0, DEFAULT_TOP_K),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
}
BEAM_ONLY: dict[str, tuple[object, ...]] = {
    "length_penalty": (1.0,),
    "early_stopping": (EarlyStopping.FALSE,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
}
_DRAFTING = (
    "prompt_lookup_num_tokens",
    "assistant_model",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "max_matching_ngram_size",
)
# transformers 4.55.4 recommends it with DoLa.
_DOLA_REPETITION_PENALTY = 1.2


def warnings_of(requested: RequestedOptions, output: RequestedOutput, modes: Modes, *, has_eos: bool) -> list[str]:
    """Warnings about `requested`, the request's own options, for the mode."""
    given = dict(requested.items())
    return [
        *_sampling(given, modes),
        *_beams(given, modes),
        *_extensions(given, modes),
        *_assistance(given, modes),
        *_ends(given, has_eos),
        *_output(output),
    ]


def _no_effect(name: str, why: str) -> str:
    return f"config.{name} has no effect: {why}"


def _sampling(given: dict[str, object], modes: Modes) -> Iterator[str]:
    if modes.do_sample:
        return
    if given.get("do_sample") and given.get("temperature") == 0:
        yield _no_effect("do_sample", "config.temperature = 0 means greedy")
    for name, silent in SAMPLING_ONLY.items():
        if name in modes.mode.uses:
            continue
        if name in given and given[name] not in silent:
            yield _no_effect(name, "nothing is sampled, set config.do_sample to sample")


def _beams(given: dict[str, object], modes: Modes) -> Iterator[str]:
    for name, silent in BEAM_ONLY.items():
        if name in given and name not in modes.mode.uses and given[name] not in silent:
            yield _no_effect(name, "it belongs to beam search, and num_beams is 1")


def _extensions(given: dict[str, object], modes: Modes) -> Iterator[str]:
    """Contrastive search, DoLa, guidance."""
    uses = modes.mode.uses
    if given.get("penalty_alpha") and "penalty_alpha" not in uses:
        yield _no_effect("penalty_alpha", "contrastive search needs one beam, no sampling and config.top_k above 1")
    if "dola_layers" in given and "dola_layers" not in uses:
        yield _no_effect("dola_layers", "DoLa needs greedy search or sampling without drafts")
    penalty = given.get("repetition_penalty", 1.0)
    if "dola_layers" in uses and isinstance(penalty, float) and penalty < _DOLA_REPETITION_PENALTY:
        yield f"config.dola_layers: a config.repetition_penalty of at least {_DOLA_REPETITION_PENALTY} is recommended"
    if "negative_prompt_ids" in given and not modes.guidance.is_on:
        # The name of the oneof: right for the router's callers, who sent text, too.
        yield _no_effect("negative_prompt", "there is no guidance, set config.guidance_scale to other than 1")


def _assistance(given: dict[str, object], modes: Modes) -> Iterator[str]:
    for name in _DRAFTING:
        # A look-up of 0 tokens is none.
        silent = (None, "", 0) if name == "prompt_lookup_num_tokens" else (None, "")
        if name not in modes.mode.uses and given.get(name) not in silent:
            yield _no_effect(name, modes.mode.no_drafts)


def _ends(given: dict[str, object], has_eos: bool) -> Iterator[str]:
    name = "exponential_decay_length_penalty"
    if name in given and not has_eos:
        yield _no_effect(name, "the model has no end-of-sequence id")


def _output(output: RequestedOutput) -> Iterator[str]:
    if output.echo:
        yield "output.echo has no effect here: the router returns the prompt, a token client holds it"
    if output.scores_top_k is not None and not {"output_scores", "output_logits"} & set(output.tensors):
        yield "output.scores_top_k has no effect: neither output.output_scores nor output.output_logits is set"
    if output.tensor_steps and not output.tensors:
        yield "output.tensor_steps has no effect: no output.output_* is set"
