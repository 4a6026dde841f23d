"""Write what is made from the Helm chart: its schema and its README's table, and with helm the kustomize base.

Helm is the program of $HELM or $PATH, or the one beside Python (python tools/get_helm.py); without it the base stays.

A comment above a value is its description; [..] at its begin is the type, where the default does not tell it:
[one of a, b], [string|null], [integer 1..], [number 0..], [map], [list].

python -m tools.chart_values
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.get_helm import find_helm

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
CHART = DEPLOY / "helm" / "penstock"
BASE = DEPLOY / "kustomize" / "base" / "penstock.yaml"
VALUES, README, SCHEMA = CHART / "values.yaml", CHART / "README.md", CHART / "values.schema.json"
BEGIN, END = "<!-- values: tools/chart_values.py -->", "<!-- end of values -->"
_HINT = re.compile(r"\[(one of [^]]+|string(?:\|null)?|map|list|(?:integer|number) \d+\.\.)\] ")
# Lines that are helm's own: kustomize sets namespaces, and nobody manages the base by helm.
_HELM_LINE = re.compile(
    r"^ *(?:helm\.sh/chart: .*|app\.kubernetes\.io/managed-by: .*|namespace: default|# Source: .*)\n", re.M
)
# What a flag of `penstock serve` may be given as.
_SCALAR = {"type": ["string", "number", "boolean"]}


def comments(node: yaml.MappingNode, lines: list[str], path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """{dotted key: the comment lines straight above it, joined}, of every key at every depth."""
    for key, value in node.value:
        inner = (*path, key.value)
        above = key.start_mark.line - 1
        words: list[str] = []
        while above >= 0 and lines[above].strip().startswith("# "):
            words.insert(0, lines[above].strip()[2:])
            above -= 1
        if words:
            yield ".".join(inner), " ".join(words)
        if isinstance(value, yaml.MappingNode):
            yield from comments(value, lines, inner)


def schema_of(value: Any, described: dict[str, str], path: str) -> dict[str, Any]:
    """Make the JSON schema of one value. Raises ValueError naming a value without a comment."""
    text = described.get(path, "")
    if not text and not isinstance(value, dict):
        raise ValueError(f"{VALUES.name}: {path} needs a comment")
    hint = _HINT.match(text)
    schema: dict[str, Any] = {"description": _HINT.sub("", text)} if text else {}
    kind = hint[1] if hint else ""
    if kind.startswith("one of "):
        return schema | {"enum": kind.removeprefix("one of ").split(", ")}
    if kind.startswith("string"):
        return schema | {"type": kind.split("|") if "|" in kind else kind}
    if kind.startswith(("integer", "number")):
        name, least = kind.removesuffix("..").split(" ")
        return schema | {"type": name, "minimum": int(least)}
    if kind == "list":
        return schema | {"type": "array", "items": {"type": "object"}}
    if kind == "map":
        flags = {"additionalProperties": _SCALAR, "propertyNames": {"pattern": "^[a-z][a-z0-9-]*$"}}
        return schema | {"type": "object"} | (flags if path.endswith(".options") else {})
    if isinstance(value, bool):
        return schema | {"type": "boolean"}
    if isinstance(value, str):
        return schema | {"type": "string"}
    if isinstance(value, dict):
        properties = {key: schema_of(inner, described, f"{path}.{key}".lstrip(".")) for key, inner in value.items()}
        return schema | {"type": "object", "additionalProperties": False, "properties": properties}
    raise ValueError(f"{VALUES.name}: the type of {path} needs a hint in its comment")


def rows(schema: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Make the rows of the table: a value each."""
    for key, inner in schema["properties"].items():
        name = f"{path}.{key}".lstrip(".")
        if "properties" in inner:
            yield from rows(inner, value[key], name)
            continue
        text = inner["description"].replace("|", r"\|")
        if "enum" in inner:
            text = f"{text} One of {', '.join(f'`{word}`' for word in inner['enum'])}."
        yield f"| `{name}` | `{json.dumps(value[key])}` | {text} |"


def base() -> dict[Path, str]:
    """Make the base of the overlays: the chart with its defaults; nothing where there is no helm."""
    helm = find_helm()
    if helm is None:
        return {}
    command = [helm, "template", "penstock", str(CHART), "--namespace", "default"]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {BASE: "# Made from the Helm chart by tools/chart_values.py.\n" + _HELM_LINE.sub("", rendered)}


def of_values() -> dict[Path, str]:
    """Make the schema and the README."""
    source = VALUES.read_text(encoding="utf-8")
    values, node = yaml.safe_load(source), yaml.compose(source)
    assert isinstance(node, yaml.MappingNode)
    schema = schema_of(values, dict(comments(node, source.splitlines())), "")
    # Charts of charts hand these down.
    schema["properties"]["global"] = {"type": "object", "description": "Values of all charts; unused here."}
    table = ["| value | default | what |", "|---|---|---|", *rows(schema | {"properties": _shown(schema)}, values)]
    before, after = README.read_text(encoding="utf-8").split(BEGIN)[0], README.read_text(encoding="utf-8").split(END)[1]
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart penstock"}
    return {
        SCHEMA: json.dumps(head | schema, indent=2) + "\n",
        README: f"{before}{BEGIN}\n\n" + "\n".join(table) + f"\n\n{END}{after}",
    }


def files() -> dict[Path, str]:
    """Make what the files hold."""
    return base() | of_values()


def _shown(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in schema["properties"].items() if key != "global"}


def main() -> None:
    """Write the files."""
    # Helm holds the values against the schema.
    for make in (of_values, base):
        for path, text in make().items():
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
