"""Warnings, about the same as transformers': options that have no effect in the chosen mode.

Only the request's own options warn: the caller is not to blame for sampling values in the model's file (transformers
5.x).
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from penstock.generation.core.decoding_mode import Scope
from penstock.generation.options.mode_options import Modes
from penstock.generation.options.option_spec import OptionSet, OptionSpec
from penstock.generation.options.request_options import GenerateOptions
from penstock.generation.options.table import CONFIG, OutputOptions, RequestOptions

# Option that asks for drafts of each kind.
_SWITCHES = {spec.chooses: name for name, spec in CONFIG.items() if spec.chooses is not None and spec.chooses.drafts}
# transformers 4.55.4 recommends it with DoLa.
_DOLA_REPETITION_PENALTY = 1.2


def warnings_of(request: GenerateOptions, options: RequestOptions, modes: Modes, *, has_eos: bool) -> list[str]:
    """Return warnings about the request's own options in the mode; `options` include those of the model's file."""
    active = {*modes.mode.uses}
    active |= {Scope.SAMPLING} if modes.do_sample else set()
    active |= {Scope.GUIDANCE} if modes.guidance.is_on else set()
    active |= {Scope.ENDING} if has_eos else set()
    warnings: list[str] = []
    for asked, known in ((request.options, options), (request.stop, request.stop), (request.output, request.output)):
        for name, value in asked.items():
            spec = asked.specs[name]
            if (spec.scopes or spec.needs) and value not in spec.silent and (why := _idle(spec, known, modes, active)):
                warnings.append(_no_effect(f"{spec.section}.{spec.oneof or name}", why))
    return [*warnings, *_combinations(request.options, modes), *_output(request.output)]


def _no_effect(field: str, why: str) -> str:
    return f"{field} has no effect: {why}"


def _idle(spec: OptionSpec, known: OptionSet, modes: Modes, active: Set[Scope]) -> str:
    """Return the reason why a set option has no effect; empty: it has one. `known`: its section, with defaults."""
    if spec.scopes and active.isdisjoint(spec.scopes):
        scope = spec.scopes[0]
        return _without_drafts(spec, scope, modes, active) if scope.drafts else scope.idle
    if spec.needs and not any(known.specs[need].asks(getattr(known, need)) for need in spec.needs):
        needed = [f"{spec.section}.{need}" for need in spec.needs]
        return f"set {needed[0]}, too" if len(needed) == 1 else f"none of {', '.join(needed)} is set"
    return ""


def _without_drafts(spec: OptionSpec, scope: Scope, modes: Modes, active: Set[Scope]) -> str:
    """Return the reason why there are no drafts of the kind that the option belongs to."""
    winner = next((switch for other, switch in _SWITCHES.items() if other in active), None)
    if scope is Scope.DRAFT_MODEL and winner is not None:
        return f"config.{winner} is set and wins"
    if modes.mode.no_drafts:
        return modes.mode.no_drafts
    return f"there are no such drafts, set config.{spec.needs[0]}" if spec.needs else scope.idle


def _combinations(asked: RequestOptions, modes: Modes) -> Iterator[str]:
    if asked.do_sample and asked.temperature == 0 and not modes.do_sample:
        yield _no_effect("config.do_sample", "config.temperature = 0 means greedy")
    if (asked.num_return_sequences or 1) > 1 and not modes.do_sample and Scope.BEAMS not in modes.mode.uses:
        # transformers refuses it.
        yield "config.num_return_sequences above 1 without sampling or beams: the answers are equal"
    penalty = 1.0 if asked.repetition_penalty is None else asked.repetition_penalty
    if Scope.DOLA in modes.mode.uses and penalty < _DOLA_REPETITION_PENALTY:
        yield f"config.dola_layers: a config.repetition_penalty of at least {_DOLA_REPETITION_PENALTY} is recommended"


def _output(output: OutputOptions) -> Iterator[str]:
    if output.echo:
        yield "output.echo has no effect here: the router returns the prompt, a token client holds it"
