"""Adapters that lie are refused by ADAPTER_BROKEN or another reason of theirs, whatever a value is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories.engine.model_engine import load_tiny
from factories.models.adapters import LAYER_TARGETS, lora_folder
from factories.models.checkpoints import tiny_checkpoint
from factories.models.lies import Outcomes, damaged, lies, opened, rewrite, safetensors, texts
from penstock.common.errors import InvalidArgument
from penstock.generation.adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from penstock.generation.adapters.adapter_limits import AdapterLimits
from penstock.generation.adapters.peft_folder import PeftFolder
from penstock.generation.models.decoder import CausalLM

LIMITS = AdapterLimits()
# All fields that are read, and some that are not.
FIELDS: dict[str, Any] = {
    "alpha_pattern": {"q_proj": 4.0},
    "rank_pattern": {"v_proj": 8},
    "use_rslora": True,
    "use_dora": False,
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "layers_to_transform": [0],
    "layers_pattern": "layers",
    "exclude_modules": ["x"],
    "target_modules": ".*proj",
    "revision": None,
    "eva_config": None,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> CausalLM:
    return load_tiny(checkpoint)


def test_adapter_config_json(tmp_path: Path, checkpoint: Path, model: CausalLM) -> None:
    folder = lora_folder(tmp_path / "adapter", checkpoint, targets=(*LAYER_TARGETS, "lm_head"), **FIELDS)
    values = json.loads((folder / CONFIG_FILE).read_text())
    outcomes = Outcomes(typed=(InvalidArgument,))
    for name, document in [("as it is", values), *lies(values), *texts(values)]:
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        rewrite(folder / CONFIG_FILE, content)
        outcomes.note(name, lambda: PeftFolder(folder, None, model, LIMITS).read())
    outcomes.check(800)


def test_headers_of_weights(tmp_path: Path, checkpoint: Path, model: CausalLM) -> None:
    folder = lora_folder(tmp_path / "adapter", checkpoint, targets=("v_proj", "embed_tokens"), saved=("lm_head",))
    content = (folder / WEIGHTS_FILE).read_bytes()
    header, data = opened(content)
    outcomes = Outcomes(typed=(InvalidArgument,))
    files = [("as it is", content)]
    files += [(name, safetensors(document, data)) for name, document in [*lies(header), *texts(header)]]
    files += damaged(content, 300, within=len(content) - len(data))
    files += [("shorter", content[:-1]), ("longer", content + b"x"), ("only a length", content[:8])]
    for name, damage in files:
        rewrite(folder / WEIGHTS_FILE, damage)
        outcomes.note(name, lambda: PeftFolder(folder, None, model, LIMITS).read())
    outcomes.check(1000)
