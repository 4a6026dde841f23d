"""PEFT folders: what is read of them, and what is refused, by its reason and name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.model_engine import load_tiny
from factories.models.adapters import lora_folder
from factories.models.checkpoints import tiny_checkpoint
from penstock.common.errors import InvalidArgument
from penstock.generation.adapters.adapter_limits import AdapterLimits
from penstock.generation.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE, PeftFolder
from penstock.generation.models.decoder import CausalLM
from safetensors.torch import load_file, save_file

LIMITS = AdapterLimits(max_adapter_rank=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> CausalLM:
    return load_tiny(checkpoint)


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path) -> Path:
    return lora_folder(tmp_path / "adapter", checkpoint)


def refused(path: Path, model: CausalLM, root: Path | None = None, *, read: bool = False) -> tuple[str, str]:
    def use() -> None:
        files = PeftFolder(path, root, model, LIMITS)
        if read:
            files.read()

    with pytest.raises(InvalidArgument) as caught:
        use()
    assert caught.value.field == "path"
    return caught.value.reason, caught.value.message


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def test_rank_targets_and_size_are_known_before_anything_is_read(tmp_path: Path, checkpoint: Path) -> None:
    path = lora_folder(tmp_path / "mixed", checkpoint, rank=4, ranks={"v_proj": 9}, targets=("q_proj", "v_proj"))
    files = PeftFolder(path, None, load_tiny(checkpoint), LIMITS)
    assert (files.rank, files.targets) == (9, ("q_proj", "v_proj"))
    # Two layers of (48 -> 48) with rank 4 and (48 -> 24) with rank 9, in float32.
    assert files.num_bytes == 2 * 4 * (4 * (48 + 48) + 9 * (48 + 24))


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(folder: Path, model: CausalLM, name: str) -> None:
    (folder / name).unlink()
    reason, message = refused(folder, model)
    assert reason == "ADAPTER_PATH"
    assert name in message


def test_there_is_no_such_folder(tmp_path: Path, model: CausalLM) -> None:
    assert refused(tmp_path / "nowhere", model)[0] == "ADAPTER_PATH"
    assert refused(Path("bad\0name"), model)[0] == "ADAPTER_PATH"


def test_nothing_outside_the_root_is_read(tmp_path: Path, folder: Path, model: CausalLM) -> None:
    root = tmp_path / "root"
    root.mkdir()
    assert refused(folder, model, root)[0] == "ADAPTER_PATH"
    (root / "link").symlink_to(folder)
    assert refused(root / "link", model, root)[0] == "ADAPTER_PATH"
    assert refused(root / ".." / "adapter", model, root)[0] == "ADAPTER_PATH"
    inside = root / "inside"
    inside.mkdir()
    (inside / CONFIG_FILE).write_bytes((folder / CONFIG_FILE).read_bytes())
    (inside / WEIGHTS_FILE).symlink_to(folder / WEIGHTS_FILE)
    assert refused(inside, model, root)[0] == "ADAPTER_PATH"
    assert PeftFolder(folder, tmp_path, model, LIMITS).rank == 8


def test_a_rank_above_the_bound_is_refused(tmp_path: Path, checkpoint: Path, model: CausalLM) -> None:
    path = lora_folder(tmp_path / "large", checkpoint, rank=8, ranks={"up_proj": 17})
    reason, message = refused(path, model)
    assert reason == "ADAPTER_RANK"
    assert "--max-adapter-rank is 16" in message


def test_a_saved_head_and_embedding_are_the_models_in_shape(tmp_path: Path, checkpoint: Path, model: CausalLM) -> None:
    path = lora_folder(tmp_path / "saved", checkpoint, targets=("v_proj",), saved=("lm_head", "embed_tokens"))
    files = PeftFolder(path, None, model, LIMITS)
    assert (files.targets, files.depends_on_weights) == (("embed_tokens", "lm_head", "v_proj"), True)
    assert files.num_bytes > 2 * 4 * (model.config.vocab_size * 48 + 48 * 48)
    assert files.num_bytes == files.read().num_bytes
    head = "base_model.model.lm_head.weight"
    change_weights(path, lambda tensors: tensors.update({head: torch.zeros(7, 48)}))
    assert refused(path, model) == (
        "ADAPTER_UNSUPPORTED",
        f"path: {WEIGHTS_FILE}: lm_head has shape [7, 48], the model's is [{model.config.vocab_size}, 48]",
    )
    change_weights(path, lambda tensors: tensors.__delitem__(head))
    assert refused(path, model) == (
        "ADAPTER_BROKEN",
        f"path: {WEIGHTS_FILE} has no weight of lm_head, which is in modules_to_save",
    )
    both = lora_folder(tmp_path / "both", checkpoint, targets=("lm_head",), saved=("lm_head",))
    assert refused(both, model)[0] == "ADAPTER_BROKEN"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"peft_type": None}, "peft_type"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"modules_to_save": ["score", "lm_head"]}, "modules_to_save (score)"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights pissa"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"of_a_later_release": 1}, "of_a_later_release"),
        ({"rank_pattern": {"(a+)+x": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"a" * 300: 8}}, "alpha_pattern"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    folder: Path, model: CausalLM, fields: dict[str, Any], named: str
) -> None:
    change_config(folder, **fields)
    reason, message = refused(folder, model)
    assert reason == "ADAPTER_UNSUPPORTED"
    assert named in message


def test_fields_that_change_nothing_are_fine(folder: Path, model: CausalLM) -> None:
    change_config(
        folder,
        peft_version="0.99",
        revision=None,
        init_lora_weights="gaussian",
        layers_to_transform=[0, 1],
        use_qalora=False,
        exclude_modules=["x"],
        lora_bias=False,
    )
    assert PeftFolder(folder, None, model, LIMITS).rank == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"r": "many"},
        {"r": True},
        {"lora_alpha": None},
        {"lora_alpha": float("inf")},
        {"lora_alpha": 1e308},
        {"lora_alpha": 10**400},
        {"alpha_pattern": {"q_proj": 1e308}},
        {"alpha_pattern": {"q_proj": None}},
        {"rank_pattern": {"q_proj": 8.5}},
        {"r": 10**400},
        {"use_rslora": "yes"},
        {"rank_pattern": [1]},
        {"rank_pattern": {"[": 8}},
        # The weights have rank 8.
        {"r": 4},
        {"rank_pattern": {"q_proj": 9}},
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_broken(folder: Path, model: CausalLM, fields: dict[str, Any]) -> None:
    change_config(folder, **fields)
    assert refused(folder, model)[0] == "ADAPTER_BROKEN"


def test_a_configuration_that_is_no_json_is_broken(folder: Path, model: CausalLM) -> None:
    for text in (b"{", b"[]", b"\xff", b"[" * 100_000, b" " * (LIMITS.max_config_bytes + 1)):
        (folder / CONFIG_FILE).write_bytes(text)
        assert refused(folder, model)[0] == "ADAPTER_BROKEN"


def change_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = (folder / WEIGHTS_FILE).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    (folder / WEIGHTS_FILE).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": ["F32"]},
        {"dtype": None},
        {"shape": ["8", "48"]},
        {"shape": [8.0, 48]},
        {"shape": [-8, -48]},
        {"shape": 8},
        {"shape": [True] * 2},
        {"shape": [1] * 1000},
        {"data_offsets": ["0", "1"]},
        {"data_offsets": [-1536, 0]},
        {"data_offsets": [0, 2**80]},
        {"data_offsets": [1536, 0]},
    ],
    ids=str,
)
def test_a_header_of_wrong_types_is_broken(folder: Path, model: CausalLM, entry: dict[str, Any]) -> None:
    change_header(folder, lambda header: header[Q_A].update(entry))
    assert refused(folder, model)[0] == "ADAPTER_BROKEN"


def test_a_header_longer_than_the_model_s_is_not_parsed(folder: Path, model: CausalLM) -> None:
    """Parsing it would hold the engine up: a file of 200 000 tensors did for two seconds."""
    change_header(folder, lambda header: header.update(__metadata__={"note": "x" * (1 << 16)}))
    assert PeftFolder(folder, None, model, LIMITS).rank == 8
    change_header(folder, lambda header: header.update(__metadata__={"note": "x" * (1 << 17)}))
    assert refused(folder, model)[0] == "ADAPTER_BROKEN"


def test_a_file_that_becomes_shorter_while_it_is_read_is_broken(folder: Path, model: CausalLM) -> None:
    """A mapped one would end the process."""
    files = PeftFolder(folder, None, model, LIMITS)
    with (folder / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(InvalidArgument, match="became shorter") as caught:
        files.read()
    assert caught.value.reason == "ADAPTER_BROKEN"


def test_numbers_beyond_the_model_s_dtype_are_refused(folder: Path, model: CausalLM) -> None:
    change_weights(folder, replaced(torch.full((8, 48), 1e300, dtype=torch.float64)))
    assert refused(folder, model, read=True)[0] == "ADAPTER_BROKEN"


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def rename(to: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[to] = tensors.pop(Q_A)

    return change


def replaced(value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q_A] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        (rename("base_model.model.model.layers.0.self_attn.r_proj.lora_A.weight"), "ADAPTER_UNSUPPORTED", "r_proj"),
        (rename("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"), "ADAPTER_UNSUPPORTED", "layers.7"),
        (
            rename("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
            "ADAPTER_UNSUPPORTED",
            "lora_magnitude_vector",
        ),
        (rename("base_model.model.lm_head.weight"), "ADAPTER_UNSUPPORTED", "lm_head.weight"),
        (rename("q_proj.lora_A.weight"), "ADAPTER_BROKEN", "q_proj"),
        (rename("x" * 400), "ADAPTER_BROKEN", "xxx"),
        (lambda tensors: tensors.pop(Q_A), "ADAPTER_BROKEN", "only one of lora_A and lora_B"),
        (lambda tensors: tensors.clear(), "ADAPTER_BROKEN", "no lora_A"),
        (replaced(torch.zeros(8, 47)), "ADAPTER_BROKEN", "[8, 47]"),
        (replaced(torch.zeros(7, 48)), "ADAPTER_BROKEN", "[7, 48]"),
        (replaced(torch.zeros(8 * 48)), "ADAPTER_BROKEN", "[384]"),
        (replaced(torch.zeros(8, 48, dtype=torch.int8)), "ADAPTER_BROKEN", "I8"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    folder: Path, model: CausalLM, change: Callable[[dict[str, torch.Tensor]], None], reason: str, named: str
) -> None:
    change_weights(folder, change)
    found, message = refused(folder, model)
    assert found == reason
    assert named in message


def test_numbers_that_are_not_finite_are_refused(folder: Path, model: CausalLM) -> None:
    change_weights(folder, replaced(torch.full((8, 48), torch.nan)))
    reason, message = refused(folder, model, read=True)
    assert reason == "ADAPTER_BROKEN"
    assert Q_A in message


def test_a_file_that_is_cut_off_or_lies_is_broken(folder: Path, model: CausalLM) -> None:
    whole = (folder / WEIGHTS_FILE).read_bytes()
    lying = whole.replace(b'"shape":[8,48]', b'"shape":[9,48]', 1)
    assert lying != whole
    for content in (whole[:-4], whole[:100], b"", b"\xff" * 64, lying):
        (folder / WEIGHTS_FILE).write_bytes(content)
        assert refused(folder, model)[0] == "ADAPTER_BROKEN"


def test_a_file_may_change_once_it_is_read(folder: Path, model: CausalLM) -> None:
    weights: Any = PeftFolder(folder, None, model, LIMITS).read()
    before = weights.num_bytes
    (folder / WEIGHTS_FILE).write_bytes(b"")
    assert weights.num_bytes == before


def test_weights_are_converted_to_the_model_s_dtype(tmp_path: Path, checkpoint: Path, model: CausalLM) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        path = lora_folder(tmp_path / str(dtype), checkpoint, dtype=dtype)
        files = PeftFolder(path, None, model, LIMITS)
        assert files.num_bytes == PeftFolder(lora_folder(tmp_path / "f32", checkpoint), None, model, LIMITS).num_bytes
        files.read()
