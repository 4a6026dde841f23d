"""Warnings, about the same as transformers': options that have no effect in the chosen mode.

Only the request's own options warn: a model's file with sampling values is no mistake of the caller (transformers 5.x).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.generation.options.modes import Modes
from penstock.generation.options.option_spec import Scope
from penstock.generation.options.table import CONFIG, OutputOptions, RequestOptions

# transformers 4.55.4 recommends it with DoLa.
_DOLA_REPETITION_PENALTY = 1.2


def warnings_of(asked: RequestOptions, output: OutputOptions, modes: Modes, *, has_eos: bool) -> list[str]:
    """Warnings about `asked`, the request's own options, for the mode."""
    warnings: list[str] = []
    for name, value in asked.items():
        spec = CONFIG[name]
        if spec.scope is Scope.EVERY or value in spec.silent:
            continue
        why = _IDLE[spec.scope](modes, has_eos)
        if why:
            warnings.append(_no_effect(spec.oneof or name, why))
    return [*warnings, *_combinations(asked, modes), *_output(output)]


def _no_effect(name: str, why: str) -> str:
    return f"config.{name} has no effect: {why}"


def _sampling(modes: Modes, _: bool) -> str:
    return "" if modes.do_sample else "nothing is sampled, set config.do_sample to sample"


def _sampling_or_contrastive(modes: Modes, has_eos: bool) -> str:
    return "" if modes.contrastive is not None else _sampling(modes, has_eos)


def _beams(modes: Modes, _: bool) -> str:
    return "" if modes.beams is not None else "it belongs to beam search, and num_beams is 1"


def _contrastive(modes: Modes, _: bool) -> str:
    if modes.contrastive is not None:
        return ""
    return "contrastive search needs one beam, no sampling and config.top_k above 1"


def _no_drafts(modes: Modes) -> str:
    if not modes.is_plain:
        return "drafts need greedy search or sampling"
    return "there are no drafts, set config.assistant_model or config.prompt_lookup_num_tokens"


def _lookup(modes: Modes, _: bool) -> str:
    if modes.assistance is None:
        return _no_drafts(modes)
    return "it belongs to prompt lookup" if modes.assistance.uses_draft_model else ""


def _draft_model(modes: Modes, _: bool) -> str:
    if modes.assistance is None:
        return _no_drafts(modes)
    return "" if modes.assistance.uses_draft_model else "config.prompt_lookup_num_tokens is set and wins"


def _dola(modes: Modes, _: bool) -> str:
    return "" if modes.dola is not None else "DoLa needs greedy search or sampling without drafts"


def _guidance(modes: Modes, _: bool) -> str:
    return "" if modes.guidance is not None else "there is no guidance, set config.guidance_scale to other than 1"


def _ending(_: Modes, has_eos: bool) -> str:
    return "" if has_eos else "the model has no end-of-sequence id"


# Why an option of that scope has no effect, from the mode and from there being an end-of-sequence id; empty: it has.
_IDLE: dict[Scope, Callable[[Modes, bool], str]] = {
    Scope.SAMPLING: _sampling,
    Scope.SAMPLING_OR_CONTRASTIVE: _sampling_or_contrastive,
    Scope.BEAMS: _beams,
    Scope.CONTRASTIVE: _contrastive,
    Scope.LOOKUP: _lookup,
    Scope.DRAFT_MODEL: _draft_model,
    Scope.DOLA: _dola,
    Scope.GUIDANCE: _guidance,
    Scope.ENDING: _ending,
}


def _combinations(asked: RequestOptions, modes: Modes) -> Iterator[str]:
    if asked.do_sample and asked.temperature == 0 and not modes.do_sample:
        yield _no_effect("do_sample", "config.temperature = 0 means greedy")
    penalty = 1.0 if asked.repetition_penalty is None else asked.repetition_penalty
    if modes.dola is not None and penalty < _DOLA_REPETITION_PENALTY:
        yield f"config.dola_layers: a config.repetition_penalty of at least {_DOLA_REPETITION_PENALTY} is recommended"


def _output(output: OutputOptions) -> Iterator[str]:
    if output.echo:
        yield "output.echo has no effect here: the router returns the prompt, a token client holds it"
    if output.scores_top_k is not None and not (output.output_scores or output.output_logits):
        yield "output.scores_top_k has no effect: neither output.output_scores nor output.output_logits is set"
    if output.tensor_steps and not output.tensors:
        yield "output.tensor_steps has no effect: no output.output_* is set"
