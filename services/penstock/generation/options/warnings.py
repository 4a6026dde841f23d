"""Warnings, about the same as transformers': options that have no effect in the chosen mode.

Only the request's own options warn: a model's file with sampling values is no mistake of the caller (transformers 5.x).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.generation.options.modes import Modes
from penstock.generation.options.option_spec import Scope
from penstock.generation.options.request_options import GenerateOptions
from penstock.generation.options.table import OutputOptions, RequestOptions

# Drafting option -> the option that asks for drafts of its kind.
_DRAFT_SWITCHES = {
    "max_matching_ngram_size": "prompt_lookup_num_tokens",
    "ngram_memory_match": "ngram_memory_num_tokens",
    "lookahead_ngram_size": "lookahead_window",
    "lookahead_guesses": "lookahead_window",
    "num_assistant_tokens": "assistant_model",
    "num_assistant_tokens_schedule": "assistant_model",
    "assistant_confidence_threshold": "assistant_model",
}
# transformers 4.55.4 recommends it with DoLa.
_DOLA_REPETITION_PENALTY = 1.2


def warnings_of(request: GenerateOptions, modes: Modes, *, has_eos: bool) -> list[str]:
    """Return warnings about the request's own options, in the mode."""
    warnings: list[str] = []
    for asked in (request.options, request.stop, request.output):
        for name, value in asked.items():
            spec = asked.specs[name]
            if spec.scope is Scope.EVERY or value in spec.silent:
                continue
            why = _IDLE[spec.scope](name, modes, has_eos)
            if why:
                warnings.append(_no_effect(f"{spec.section}.{spec.oneof or name}", why))
    return [*warnings, *_combinations(request.options, modes), *_output(request.output)]


def _no_effect(field: str, why: str) -> str:
    return f"{field} has no effect: {why}"


def _sampling(_: str, modes: Modes, __: bool) -> str:
    return "" if modes.do_sample else "nothing is sampled, set config.do_sample to sample"


def _sampling_or_mode(name: str, modes: Modes, has_eos: bool) -> str:
    return "" if name in modes.mode.uses else _sampling(name, modes, has_eos)


def _beams(name: str, modes: Modes, _: bool) -> str:
    return "" if name in modes.mode.uses else "it belongs to beam search, and num_beams is 1"


def _contrastive(name: str, modes: Modes, _: bool) -> str:
    if name in modes.mode.uses:
        return ""
    return "contrastive search needs one beam, no sampling and config.top_k above 1"


def _drafts(name: str, modes: Modes, _: bool) -> str:
    if name in modes.mode.uses:
        return ""
    if modes.mode.no_drafts:
        return modes.mode.no_drafts
    switch = _DRAFT_SWITCHES.get(name)
    return f"there are no such drafts, set config.{switch}" if switch else "this server remembers no outputs"


def _draft_model(name: str, modes: Modes, has_eos: bool) -> str:
    winner = next((switch for switch in _DRAFT_SWITCHES.values() if switch in modes.mode.uses), None)
    if winner is None or winner == _DRAFT_SWITCHES.get(name, name):
        return _drafts(name, modes, has_eos)
    return f"config.{winner} is set and wins"


def _dola(name: str, modes: Modes, _: bool) -> str:
    return "" if name in modes.mode.uses else "DoLa needs greedy search or sampling without drafts"


def _guidance(_: str, modes: Modes, __: bool) -> str:
    return "" if modes.guidance.is_on else "there is no guidance, set config.guidance_scale to other than 1"


def _ending(_: str, __: Modes, has_eos: bool) -> str:
    return "" if has_eos else "the model has no end-of-sequence id"


# Reason why an option of that scope has no effect, by its name, the mode and the presence of an end-of-sequence id;
# empty: it has one.
_IDLE: dict[Scope, Callable[[str, Modes, bool], str]] = {
    Scope.SAMPLING: _sampling,
    Scope.SAMPLING_OR_CONTRASTIVE: _sampling_or_mode,
    Scope.BEAMS: _beams,
    Scope.CONTRASTIVE: _contrastive,
    Scope.LOOKUP: _drafts,
    Scope.NGRAM_MEMORY: _drafts,
    Scope.LOOKAHEAD: _drafts,
    Scope.DRAFT_MODEL: _draft_model,
    Scope.DOLA: _dola,
    Scope.GUIDANCE: _guidance,
    Scope.ENDING: _ending,
}


def _combinations(asked: RequestOptions, modes: Modes) -> Iterator[str]:
    if asked.do_sample and asked.temperature == 0 and not modes.do_sample:
        yield _no_effect("config.do_sample", "config.temperature = 0 means greedy")
    penalty = 1.0 if asked.repetition_penalty is None else asked.repetition_penalty
    if "dola_layers" in modes.mode.uses and penalty < _DOLA_REPETITION_PENALTY:
        yield f"config.dola_layers: a config.repetition_penalty of at least {_DOLA_REPETITION_PENALTY} is recommended"


def _output(output: OutputOptions) -> Iterator[str]:
    if output.echo:
        yield "output.echo has no effect here: the router returns the prompt, a token client holds it"
    if output.scores_top_k is not None and not (output.output_scores or output.output_logits):
        yield "output.scores_top_k has no effect: neither output.output_scores nor output.output_logits is set"
    if output.tensor_steps and not output.tensors:
        yield "output.tensor_steps has no effect: no output.output_* is set"
