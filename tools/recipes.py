"""Write the table of docs/guide/recipes.md: a model, the command that serves it, and what the command needs.

    python tools/recipes.py

`tests/data/recipes.json` has the models, their flags, their number of weights as published, and the fields of their
config.json that size and layout follow from. No weights are read: transformers makes each model without memory, its
tensors become the header of a file of weights, and `penstock inspect` reads that beside the configuration.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from penstock.cli.inspect_model import inspect_model, weights_of
from penstock.common.units import format_size
from penstock.generation.models.registry import read_model_config
from penstock.generation.weights.files import read_header
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "tests" / "data" / "recipes.json"
TARGET = ROOT / "docs" / "guide" / "recipes.md"
MARK = "<!-- The table is made by tools/recipes.py. -->\n"
HEAD = (
    "| Model | Command | Weights | In memory | A thousand tokens of context | A token reads |\n"
    "|---|---|---|---|---|---|\n"
)
# Bytes of a number as the checkpoints have it: bfloat16.
_ITEM = 2.0
_TOKENS = 1000


class Needs(NamedTuple):
    """Needs of a recipe, in bytes but for the number of weights."""

    parameters: int
    weights: int
    context: int
    read: int


def recipes() -> dict[str, Any]:
    """Return name of a model -> its flags, its published number of weights, and its configuration."""
    found: dict[str, Any] = json.loads(RECIPES.read_text(encoding="utf-8"))
    return found


def write_description(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, and the header of the weights without their bytes."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    fields = {name: value for name, value in config.items() if name not in ("model_type", "torch_dtype")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**fields))
    model.tie_weights()
    header, at = {}, 0
    for name, weight in model.named_parameters():
        end = at + int(_ITEM) * weight.numel()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def needs_of(recipe: Mapping[str, Any], folder: Path) -> Needs:
    """Return what `penstock inspect` says of a recipe, whatever this machine's memory is. Raises StartupError for a
    configuration that does not start."""
    write_description(folder, recipe["config"])
    read_model_config(folder)
    facts = inspect_model(str(folder), measures=False)
    kind = recipe["flags"].partition("--quantization ")[2] or "none"
    experts = facts["experts"]
    share = 1.0 if experts is None else experts["used_per_token"] / experts["total"]
    read = weights_of(read_header(folder / "model.safetensors"), folder).read_bytes(_ITEM, kind, share)
    kv = facts["kv_bytes_per_token"] * _TOKENS
    return Needs(facts["parameters"], facts["memory"]["weights_bytes"][kind], kv, int(read))


def row_of(name: str, recipe: Mapping[str, Any], needs: Needs) -> str:
    """Return the line of the table for a recipe."""
    size = f"{needs.parameters / 1e9:.3g} B" if needs.parameters >= 999.5e6 else f"{needs.parameters / 1e6:.0f} M"
    command = f"penstock serve {name} {recipe['flags']}".strip()
    told = (format_size(needs.weights), format_size(needs.context), format_size(needs.read))
    return f"| {name.partition('/')[2]} | `{command}` | {size} | {' | '.join(told)} |\n"


def rows() -> Iterator[str]:
    """Yield all lines of the table."""
    for name, recipe in recipes().items():
        with tempfile.TemporaryDirectory() as folder:
            yield row_of(name, recipe, needs_of(recipe, Path(folder)))


def page(before: str) -> str:
    """Return the page with its table made anew."""
    start, _, rest = before.partition(MARK)
    _, _, end = rest.partition(MARK)
    return f"{start}{MARK}\n{HEAD}{''.join(rows())}\n{MARK}{end}"


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
