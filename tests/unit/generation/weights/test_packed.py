"""`penstock pack` writes complete folders or none, and a wrong folder is refused before a kernel gets a pointer."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.models.checkpoints import tiny_checkpoint
from factories.models.packed import load, native_device, packed, read, rewrite, use_packing
from penstock.cli.pack import run_pack
from penstock.common.errors import StartupError
from penstock.common.progress import show_nothing
from penstock.generation import pack as packing
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.base import Device
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.host.mapped import MappedFile
from penstock.generation.layers.linear.native import NativeLinear, can_read
from penstock.generation.models.registry import load_model
from penstock.generation.startup import preload
from penstock.generation.startup.load import load as load_service
from penstock.generation.weights.files import PACKED_FILE
from safetensors import safe_open


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_packing(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Make a model with widths at which no part is a multiple of 64 bytes by itself."""
    return tiny_checkpoint(tmp_path / "model", "qwen3", hidden_size=44, num_attention_heads=4, dtype=torch.bfloat16)


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return packed(model, tmp_path / "packed", quantization="int8")


def refused(call: Callable[[], object], flag: str) -> str:
    with pytest.raises(StartupError) as caught:
        call()
    assert caught.value.flag == flag
    assert "\n" not in caught.value.message
    return caught.value.message


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_any_tool_can_list_it_and_every_tensor_is_aligned(folder: Path) -> None:
    header, begin = read(folder)
    with safe_open(folder / PACKED_FILE, framework="pt") as file:
        facts = file.metadata()
        assert set(file.keys()) == set(header) - {"__metadata__"}
    assert any(name.startswith("padding.") for name in header)
    places = {
        name: entry["data_offsets"][0] for name, entry in header.items() if not name.startswith(("__", "padding."))
    }
    assert not [name for name, offset in places.items() if (begin + offset) % 64]
    assert (facts["dtype"], facts["quantization"], facts["source"]) == ("bfloat16", "int8", "model")
    assert list(json.loads(facts["source_sha256"])) == ["model.safetensors"]


def test_of_a_model_of_the_hub_its_name_and_revision_are_recorded(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--me--tiny" / "snapshots" / "06a4a8"
    shutil.copytree(model, snapshot)
    with safe_open(packed(snapshot, tmp_path / "packed") / PACKED_FILE, framework="pt") as file:
        assert file.metadata()["source"] == "me/tiny@06a4a8"


def test_weights_are_used_where_the_file_is_mapped(folder: Path) -> None:
    model = load(folder)
    down, norm = model.layers[1].mlp.down, model.layers[0].input_norm.weight
    assert isinstance(down, NativeLinear)
    file_bytes = (folder / PACKED_FILE).stat().st_size
    addresses = {one.untyped_storage().data_ptr() for one in (*down.packed.parts().values(), norm)}
    assert len(addresses) == 1
    assert down.packed.weight.untyped_storage().nbytes() == file_bytes


def test_what_is_asked_for_must_be_what_the_file_has(folder: Path) -> None:
    assert load(folder, dtype="bf16", quantization="int8").dtype is torch.bfloat16
    assert "bfloat16" in refused(lambda: load(folder, dtype="float32"), "--dtype")
    for wanted in ("none", "int4", "int9"):
        assert "int8" in refused(lambda wanted=wanted: load(folder, quantization=wanted), "--quantization")  # type: ignore[misc]


def test_without_the_kernels_or_on_another_device_it_cannot_be_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for kernels in ("torch", "auto"):
        if kernels == "auto":
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
            monkeypatch.setattr("penstock.generation.devices.cpu.system_folder", lambda: str(tmp_path / "nothing"))
        device = CPUDevice()
        device.start(kernels=kernels)
        assert "penstock build-kernels" in refused(lambda device=device: load_model(folder, device=device), "--kernels")  # type: ignore[misc]
    file = MappedFile(folder / PACKED_FILE)
    assert "checkpoint" in refused(lambda: Device.mapped_weights(CPUDevice(), file, "it"), "--device")


def test_without_the_kernels_nothing_is_packed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.generation.devices.cpu.library.load", lambda *folders: None)
    with pytest.raises(StartupError, match="penstock build-kernels") as caught:
        packing.pack(model, tmp_path / "other")
    assert caught.value.flag is None


def _resize(folder: Path, by: int) -> None:
    path = folder / PACKED_FILE
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + by)


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        header, _ = read(folder)
        change(header)
        rewrite(folder, header)

    return edit


def _set_config(folder: Path, **values: int) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _longer_header(folder: Path) -> None:
    path = folder / PACKED_FILE
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    path.write_bytes((size + 1).to_bytes(8, "little") + content[8 : 8 + size] + b" " + content[8 + size :])


def _link_to_nothing(folder: Path) -> None:
    (folder / PACKED_FILE).unlink()
    (folder / PACKED_FILE).symlink_to(folder / "gone")


NORM = "model.norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda folder: (folder / PACKED_FILE).write_bytes(b""), "not a complete file"),
    "a link to nothing": (_link_to_nothing, "cannot be read (No such file"),
    "no header": (lambda folder: (folder / PACKED_FILE).write_bytes(b"\xff" * 100), "not a complete file"),
    "a header that ends early": (
        lambda folder: _resize(folder, 200 - (folder / PACKED_FILE).stat().st_size),
        "not a complete",
    ),
    "a list": (lambda folder: (folder / PACKED_FILE).write_bytes(b"\2" + bytes(7) + b"[]"), "not a complete file"),
    "no facts": (_edit(lambda header: header.pop("__metadata__")), "not a complete file"),
    "facts that are no text": (_edit(lambda header: header["__metadata__"].update(dtype=[])), "not a complete file"),
    "too short": (lambda folder: _resize(folder, -1), "bytes"),
    "too long": (lambda folder: _resize(folder, 1), "bytes"),
    "no version": (_edit(lambda header: header["__metadata__"].pop("layout_version")), "not a complete file"),
    "another layout": (_edit(lambda header: header["__metadata__"].update(layout_version="999")), "layout version"),
    "another format": (_edit(lambda header: header["__metadata__"].update(format_version="0")), "format version"),
    "an unknown dtype": (_edit(lambda header: header["__metadata__"].update(dtype="int3")), "int3"),
    "another quantization": (_edit(lambda header: header["__metadata__"].update(quantization="int4")), "does not fit"),
    "offsets": (_edit(lambda header: header[NORM].update(data_offsets=[2**60, 2**60 + 88])), NORM),
    "a shape": (_edit(lambda header: header[NORM].update(shape=[88])), NORM),
    "a missing tensor": (_edit(lambda header: header.pop(NORM)), NORM),
    "another tensor": (_edit(lambda header: header.update(more=header[NORM])), "unexpected tensor 'more'"),
    "tensors between two places": (_longer_header, "multiple of 64"),
    "another model": (lambda folder: _set_config(folder, intermediate_size=96), "config.json"),
    "a vocabulary beyond the file": (lambda folder: _set_config(folder, vocab_size=2**31 - 1), "too small"),
    "widths beyond the file": (lambda folder: _set_config(folder, intermediate_size=2**31 - 1), "too small"),
}


@pytest.mark.parametrize(
    ("quantization", "version"), [("none", "2"), ("int8", "3"), ("int8", "2"), ("int4", "3"), ("none", "1")]
)
def test_an_earlier_layout_is_read_where_its_bytes_mean_the_same(
    model: Path, tmp_path: Path, quantization: str, version: str
) -> None:
    folder = packed(model, tmp_path / "packed", quantization=quantization)
    expected = load(folder)
    _edit(lambda header: header["__metadata__"].update(layout_version=version))(folder)
    if can_read(version, quantization):
        found = load(folder)
        for one, other in zip(found.layers, expected.layers, strict=True):
            assert isinstance(one.mlp.down, NativeLinear)
            assert isinstance(other.mlp.down, NativeLinear)
            assert torch.equal(one.mlp.down.packed.weight, other.mlp.down.packed.weight)
    else:
        message = refused(lambda: load(folder), "MODEL")
        assert f"has layout version '{version}'" in message
        assert message.endswith("run `penstock pack` again")


@pytest.mark.parametrize("name", DAMAGE)
def test_a_file_that_is_not_as_it_should_be_is_to_be_packed_again(folder: Path, name: str) -> None:
    damage, said = DAMAGE[name]
    damage(folder)
    message = refused(lambda: load(folder), "MODEL")
    assert said in message
    assert message.endswith("run `penstock pack` again")


@pytest.mark.parametrize(
    "sizes",
    [
        {"vocab_size": 2**58},
        {"intermediate_size": 2**59},
        {"intermediate_size": 2**80},
        {"num_attention_heads": 2**57, "num_key_value_heads": 2**57},
    ],
    ids=str,
)
def test_sizes_beyond_numbers_are_refused_by_name(folder: Path, sizes: dict[str, int]) -> None:
    """The kernels' products of them fit in no 64-bit number."""
    _set_config(folder, **sizes)
    assert f"{next(iter(sizes))} must be at most" in refused(lambda: load(folder), "MODEL")


def test_the_digest_finds_a_byte_that_changed(folder: Path) -> None:
    tasks = set()
    assert packing.check(folder, lambda task, done, total: tasks.add(task)).path == folder / PACKED_FILE
    assert tasks == {"checking"}
    content = bytearray((folder / PACKED_FILE).read_bytes())
    content[-100] ^= 1
    (folder / PACKED_FILE).write_bytes(content)
    assert "damaged" in refused(lambda: packing.check(folder), "MODEL")


def test_nothing_is_packed_twice_or_as_what_the_kernels_do_not_have(model: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert "already" in refused(lambda: packing.pack(folder, other), "MODEL")
    assert "float16" in refused(lambda: packing.pack(model, other, dtype="float16"), "--dtype")
    assert not other.exists()


def test_what_is_in_the_output_is_replaced_only_with_force(model: Path, folder: Path, tmp_path: Path) -> None:
    before = (folder / PACKED_FILE).stat().st_ino
    refused(lambda: packing.pack(model, folder), "OUTPUT")
    refused(lambda: packing.pack(model, model, force=True), "OUTPUT")
    refused(lambda: packing.pack(model, model / "config.json"), "OUTPUT")
    assert (folder / PACKED_FILE).stat().st_ino == before
    held = load(folder)
    (folder / "chat_template.jinja").write_text("of the model that was here")
    mine = ("mine.txt", "package.json", "page.jinja")
    for name in mine:
        (folder / name).write_text("kept")
    (folder / ".penstock-pack-killed").mkdir()
    packed(model, folder, quantization="none", force=True)
    assert not (folder / "chat_template.jinja").exists()
    assert {(folder / name).read_text() for name in mine} == {"kept"}
    assert not list(folder.glob(".penstock*"))
    assert load(folder).layers[0].mlp.down.num_bytes > held.layers[0].mlp.down.num_bytes


def test_side_files_come_along_and_old_weights_do_not(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", max_shard_size="30KB")
    others = ("additional_chat_templates/rag.jinja", "chat_templates/tools.jinja")
    for name in (*others, "tokenizer.json", "tokenizer.model", "chat_template.jinja", "LICENSE.txt", "notes.md"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
    found = listing(packed(model, tmp_path / "new" / "folder"))
    expected = ["LICENSE.txt", others[0], "chat_template.jinja", others[1], "config.json", "generation_config.json"]
    assert found == [*expected, PACKED_FILE, "tokenizer.json", "tokenizer.model"]


def test_somebody_elses_folder_keeps_what_is_no_models(model: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in ("package.json", "page.jinja", "LICENSE", "tokenizer_config.json"):
        (project / name).write_text("theirs")
    packed(model, project, force=True)
    assert [name for name in listing(project) if (project / name).read_bytes() == b"theirs"] == [
        "LICENSE",
        "package.json",
        "page.jinja",
    ]


@pytest.mark.parametrize("output", [None, ""])
def test_no_output_is_not_the_working_folder(model: Path, output: str | None) -> None:
    assert "missing" in refused(lambda: run_pack(str(model), output, {}), "OUTPUT")
    assert "has no penstock.safetensors" in refused(lambda: run_pack(str(model), output, {"check": True}), "MODEL")


def test_a_full_disk_is_told_before_and_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "packed"
    with monkeypatch.context() as full:
        usage = shutil.disk_usage(tmp_path)
        full.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        assert "0.98 KiB is free" in refused(lambda: packing.pack(model, output), "OUTPUT")
    with monkeypatch.context() as broken:

        def fail(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        broken.setattr(os, "fsync", fail)
        assert "No space left" in refused(lambda: packing.pack(model, output), "OUTPUT")
    assert not output.exists()


def test_an_interrupted_run_leaves_what_was_there(model: Path, folder: Path) -> None:
    before = (folder / PACKED_FILE).stat()

    def interrupt(task: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packing.pack(model, folder, force=True, progress=interrupt)
    assert (folder / PACKED_FILE).stat() == before
    assert not list(folder.glob(".penstock*"))


def test_who_interrupts_does_not_wait_for_the_digest_of_a_large_checkpoint(tmp_path: Path) -> None:
    # It has no end.
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(KeyboardInterrupt), packing._source_digests(tmp_path):
        raise KeyboardInterrupt


def test_a_start_takes_no_memory_for_it_and_reads_ahead_instead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[Path] = []
    monkeypatch.setattr(preload, "populate_beside", ahead.append)
    config = GenerationServiceConfig(model=str(folder))
    assert preload.begin(config).arena is None
    assert ahead == [folder / PACKED_FILE]
    assert preload.begin(dataclasses.replace(config, prefault_weights=False)).arena is None
    assert ahead == [folder / PACKED_FILE]


def test_mapped_weights_are_not_available_to_a_pool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def host_memory(*, mapped: int) -> tuple[int, int]:
        told.append(mapped)
        return 2**40, 2**39

    monkeypatch.setattr("penstock.generation.devices.cpu.host_memory", host_memory)
    device = native_device()
    device.memory()
    load_model(folder, device=device)
    device.memory()
    assert told == [0, (folder / PACKED_FILE).stat().st_size]


def test_a_service_loads_one_as_its_model_and_as_its_draft_model(folder: Path, model: Path) -> None:
    config = GenerationServiceConfig(
        model=str(model), assistant_model=str(folder), kv_memory="1MiB", assistant_kv_memory="1MiB", tune_seconds=0.0
    )
    loaded = load_service(config, "both", show_nothing)
    assert loaded.engine.draft is not None
    assert loaded.engine.draft.model.num_bytes < loaded.weights.model.num_bytes
    assert " of it mapped)" in loaded.status_lines()[0]
    assert "B mapped)" in loaded.status_lines()[-1]
    swapped = dataclasses.replace(config, model=str(folder), assistant_model=str(model))
    assert "B mapped)" in load_service(swapped, "both", show_nothing).status_lines()[0]
    wrong = dataclasses.replace(config, quantization="none")
    assert str(folder) in refused(lambda: load_service(wrong, "both", show_nothing), "--quantization")


def test_a_model_larger_than_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.generation.devices.cpu.host_memory", lambda *, mapped: (2**40, 1000))
    config = GenerationServiceConfig(model=str(folder))
    assert "of memory is free" in refused(lambda: load_service(config, "it", show_nothing), "MODEL")


def test_progress_ends_at_a_hundred(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    load_model(folder, device=native_device(), progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
