"""Write from the table of options: docs/reference/options.md and the clients' option tables.

python tools/option_tables.py
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from penstock.common.options import options_of
from penstock.compat.option_names import ALIASES
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.options.kinds import SEED_RANGE, Bounds
from penstock.generation.options.option_spec import OptionSpec
from penstock.generation.options.request_limits import DEFAULT_LIMITS
from penstock.generation.options.table import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
HEAD = """\
# Options of a request

Every field of GenerationConfig, StopConfig and OutputConfig. Names and meanings are those of Hugging Face's
`GenerationConfig`; [generation-config.md](../guide/generation-config.md) tells the rules, the modes and the versions.
An option that is set where it has no effect comes back in `Started.warnings`; a value that is not allowed is
`INVALID_ARGUMENT` with the field's path (`config.top_p`). Bounds written as flags are the generation service's.

This page is made from `services/penstock/generation/options/table.py` by `python tools/option_tables.py` (`make docs`).
"""
MESSAGES = {"config": "GenerationConfig", "stop": "StopConfig", "output": "OutputConfig"}
FLAGS = {bound.name: bound.flag for bound in options_of(GenerationServiceConfig)}
PYTHON = '''\
"""Keywords of the server's options, and the form in which each is taken; see _config_values.

Made from the server's table of options by `python tools/option_tables.py`: do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

# One phrase, or alternatives; one of them must appear.
Words = Sequence[int] | Sequence[Sequence[int]]


class OptionKeywords(TypedDict, total=False):
    """Options of GenerationConfig, StopConfig and OutputConfig."""

'''
NODE = """\
// Options of the server -> the form in which each is taken; see options.mjs.
// Made from the server's table of options by `python tools/option_tables.py`: do not edit.
"""


def page() -> str:
    """docs/reference/options.md."""
    parts = [HEAD]
    for section, specs in SECTIONS.items():
        columns = ["field", "default", "allowed", ""]
        # A section in which every option has its effect everywhere, as in transformers, goes without these.
        is_wide = any(spec.scopes or spec.differs for spec in specs.values())
        columns += ["has an effect in", "differs from transformers"] if is_wide else []
        rows = [_line(columns), "|" + "---|" * len(columns)]
        rows += [_line(_cells(spec, is_wide=is_wide)) for spec in specs.values()]
        parts.append(f"## `{section}` ({MESSAGES[section]})\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _cells(spec: OptionSpec, *, is_wide: bool) -> list[str]:
    aliases = ALIASES.get(spec.name, ())
    others = f" Other servers' names: {', '.join(f'`{name}`' for name in aliases)}." if aliases else ""
    doc = spec.doc + others
    cells = [f"`{spec.name}`", default_of(spec), allowed(spec), doc]
    if not is_wide:
        return [*cells[:3], f"{doc} The router's." if spec.router_only else doc]
    return [*cells, "the router" if spec.router_only else spec.effect, spec.differs or "–"]


def default_of(spec: OptionSpec) -> str:
    """Default as the page writes it."""
    value = spec.default
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def in_words(bounds: Bounds) -> str:
    """An interval as the page writes it."""
    if bounds is SEED_RANGE:
        return "[0, 2⁶³ − 1]"
    if bounds.low is None:
        return "finite"
    low = f"{bounds.low:g}".replace("-", "−")
    if bounds.high is None:
        return f"{'>' if bounds.above else '≥'} {low}"
    return f"{'(' if bounds.above else '['}{low}, {bounds.high:g}{')' if bounds.below else ']'}"


def allowed(spec: OptionSpec) -> str:
    """Bounds, limit, needs and the rest."""
    parts = [in_words(spec.bounds)] if spec.bounds is not None else []
    if spec.limit:
        most = f"`{FLAGS[spec.limit]}`" if spec.limit in FLAGS else str(getattr(DEFAULT_LIMITS, spec.limit))
        parts.append(spec.kind.most.format(most))
    parts += [spec.allowed] if spec.allowed else []
    if spec.needs:
        parts.append(f"without {' or '.join(f'`{need}`' for need in spec.needs)}: warning")
    return "; ".join(parts)


def keywords(specs: dict[str, OptionSpec]) -> Iterator[tuple[str, OptionSpec, str]]:
    """Keyword of clients, its row and its type in Python; a oneof is a keyword too, in place of its text."""
    for name, spec in specs.items():
        if spec.oneof and spec.router_only:
            yield spec.oneof, spec, "str | Sequence[int]"
        else:
            yield name, spec, spec.kind.hint


def forms(specs: dict[str, OptionSpec]) -> dict[str, str]:
    """Keyword or field -> form of its value."""
    return {name: spec.kind.form for name, spec in specs.items()} | {
        name: spec.kind.form for name, spec, _ in keywords(specs)
    }


def python_table() -> str:
    """clients/python/penstock_client/_option_table.py."""
    lines = []
    for section, specs in SECTIONS.items():
        for name, spec, hint in keywords(specs):
            lines.append(f"    # {spec.doc}\n    {name}: {hint}\n")
        if section != "output":
            lines.append("\n")
    tables = "\n".join(_mapping(section, specs) for section, specs in SECTIONS.items())
    return f"{PYTHON}{''.join(lines)}\n\n{tables}"


def _mapping(section: str, specs: dict[str, OptionSpec]) -> str:
    entries = "".join(f'    "{name}": "{form}",\n' for name, form in forms(specs).items())
    return f"{section.upper()}: Mapping[str, str] = {{\n{entries}}}\n"


def node_table() -> str:
    """clients/node/option_table.mjs."""
    parts = []
    for section, specs in SECTIONS.items():
        entries = "".join(f'  {name}: "{form}",\n' for name, form in forms(specs).items())
        parts.append(f"export const {section.upper()} = {{\n{entries}}};\n")
    return NODE + "\n" + "\n".join(parts)


FILES = {
    "docs/reference/options.md": page,
    "clients/python/penstock_client/_option_table.py": python_table,
    "clients/node/option_table.mjs": node_table,
}


def main() -> None:
    """Write the files."""
    for name, make in FILES.items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
