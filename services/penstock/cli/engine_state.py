"""An engine's state as text that a terminal of 80 columns holds: a line, or two, for each request and sequence."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# The message EngineState as JSON has it, with numbers as such.
State = dict[str, Any]
WIDTH = 80


def state_text(state: State) -> str:
    """Return the lines of a state, each with its end."""
    return "".join(f"{line}\n" for line in _lines(state))


def _lines(state: State) -> Iterator[str]:
    if state["stack"]:
        yield "the engine's thread did not answer; it is at"
        yield from (f"  {line}" for line in state["stack"])
    yield from _pools(state)
    yield from _last_step(state["last_step"])
    for queue in ("running", "waiting"):
        yield from _groups(queue, state[queue], state[f"more_{queue}"])
    for title in ("counters", "config"):
        yield from ("", f"{title}:", *_aligned(state[title]))


def _pools(state: State) -> Iterator[str]:
    pool = state["pool"]
    yield from _wrapped(
        "pool: ",
        f"{pool['used']} of {pool['total']} blocks used",
        *(f"{pool[name]} {name}" for name in ("free", "evictable", "references")),
        f"{pool['reserve']} kept for running requests",
    )
    # A service of an older release has no host pool.
    host = state.get("host_pool")
    if host and host["total"]:
        yield from _wrapped(
            "host pool: ",
            f"{host['used']} of {host['total']} blocks used by {host['swapped_requests']} swapped requests",
            *(f"{host[name]} {name}" for name in ("free", "evictable")),
            f"preemption by {host['preemption']}",
        )


def _last_step(step: State) -> Iterator[str]:
    yield ""
    if not step["number"]:
        yield "last step: none, the engine has nothing to do"
        return
    yield from _wrapped(
        f"last step: number {step['number']}, ",
        f"{step['rows']} rows",
        f"{step['rows_left']} left",
        f"held back by {step['ended_by']}",
        f"{step['admitted']} admitted",
        f"{step['preempted']} preempted",
    )
    for group in step["groups"]:
        rows = (f"{group[f'{kind}_rows']} {kind} rows" for kind in ("prompt", "decode", "draft"))
        yield from _wrapped(f"  {group['request']}: ", f"{group['sequences']} sequences", *rows)
    if step["more_groups"]:
        yield f"  and {step['more_groups']} more"


def _groups(title: str, groups: Sequence[State], more: int) -> Iterator[str]:
    """Yield the lines of the requests that run, or wait."""
    yield ""
    yield f"{title}: {len(groups) + more or 'none'}"
    for group in groups:
        yield from _wrapped(
            f"  {group['request']}: ",
            f"{group['state']}, {group['decoding']}",
            f"priority {group['priority']}",
            f"age {group['age_seconds']:.3f}s",
            f"running {group['running_seconds']:.3f}s",
            f"prompt {group['prompt_tokens']}",
            f"most new {group['max_new_tokens']}",
            f"width {group['width']}",
        )
        for one in group["sequences"]:
            yield from _wrapped(
                f"    sequence {one['number']}: ",
                f"family {one['family']}",
                f"{one['tokens']} tokens",
                f"{one['computed_tokens']} computed",
                f"{one['blocks']} blocks",
                f"{one['host_blocks']} host blocks",
                f"{one['draft_tokens']} drafts",
                f"waits for {one['waits_for']}",
            )
        if group["more_sequences"]:
            yield f"    and {group['more_sequences']} more"
    if more:
        yield f"  and {more} more"


def _aligned(values: Mapping[str, float]) -> Iterator[str]:
    width = max(map(len, values), default=0)
    yield from (f"  {name:<{width}}  {_digits(value)}" for name, value in values.items())


def _digits(value: float) -> str:
    """Spell a number; a whole one with all its digits."""
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def _wrapped(begin: str, *facts: str) -> list[str]:
    """Return the facts behind `begin`, in lines: the later ones are indented further than the first."""
    indent = " " * (len(begin) - len(begin.lstrip()) + 2)
    return textwrap.wrap(begin + ", ".join(facts), WIDTH, subsequent_indent=indent, break_on_hyphens=False)
