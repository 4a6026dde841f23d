"""Catalogue of `penstock serve --models DIR|FILE`: models of this machine, and the router's file for them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from penstock.common.errors import StartupError
from penstock.router.models_file import FLAG, ModelEntry, ModelsFile, read_models

# Ends of the names of files with weights: their size is the greater part of a model's memory.
_WEIGHTS = (".safetensors", ".gguf")


@dataclasses.dataclass(frozen=True)
class LocalModels:
    """Models below one folder. Their entries have no addresses yet."""

    # Slots read no model outside it.
    root: Path
    file: ModelsFile


def read_catalogue(path: str, max_models: int, kv_bytes: int) -> LocalModels:
    """Read a folder of model folders, or a file that names some. Raises StartupError naming --models.

    `kv_bytes`: memory of a model's KV pool; the size of its files is added where the file does not tell its memory.
    """
    where = Path(path).expanduser().resolve()
    if where.is_dir():
        folders = sorted(folder for folder in where.iterdir() if (folder / "config.json").is_file())
        if not folders:
            raise StartupError(f"{FLAG} {path}: no folder in it has a config.json", flag=FLAG)
        if len(folders) > max_models:
            raise StartupError(
                f"{FLAG} {path}: has {len(folders)} models, and --max-models allows {max_models}", flag=FLAG
            )
        entries = tuple(ModelEntry(name=folder.name, tokenizer=(), path=folder.name) for folder in folders)
        root, file = where, ModelsFile(models=entries)
    else:
        root, file = where.parent, read_models(str(where), max_models, is_local=True)
    models = tuple(_with_memory(entry, root, kv_bytes) for entry in file.models)
    return LocalModels(root, dataclasses.replace(file, models=models))


def with_addresses(file: ModelsFile, tokenizers: list[str], slots: list[str], memory: int) -> ModelsFile:
    """Return the router's file: a tokenizer for each model, and the slots. `memory`: 0 leaves the file's own."""
    models = tuple(
        dataclasses.replace(entry, tokenizer=(address,)) for entry, address in zip(file.models, tokenizers, strict=True)
    )
    return dataclasses.replace(file, models=models, slots=tuple(slots), memory=memory or file.memory)


def to_toml(file: ModelsFile) -> str:
    """Write a file of models on demand as text."""
    top = {"default": file.default, "slots": list(file.slots), "memory": file.memory}
    lines = _lines(top)
    for entry in file.models:
        told = {
            "name": entry.name,
            "aliases": list(entry.aliases),
            "weight": entry.weight,
            "tokenizer": list(entry.tokenizer),
            "path": entry.path,
            "memory": entry.memory,
        }
        lines += ["", "[[models]]", *_lines(told)]
        if entry.options:
            lines += ["[models.options]", *_lines(dict(entry.options))]
    return "\n".join([*lines, ""])


def _lines(table: dict[str, object]) -> list[str]:
    # JSON's texts, numbers and lists of them are TOML's, too.
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]


def _with_memory(entry: ModelEntry, root: Path, kv_bytes: int) -> ModelEntry:
    folder = (root / entry.path).resolve()
    if not folder.is_relative_to(root) or not (folder / "config.json").is_file():
        raise StartupError(f"{FLAG}: {entry.name}: no folder {entry.path} with a config.json below {root}", flag=FLAG)
    if entry.memory:
        return entry
    size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in _WEIGHTS)
    return dataclasses.replace(entry, memory=size + kv_bytes)
