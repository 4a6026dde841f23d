"""Files that arrive as bytes: names and sizes before, bytes as they come, and a folder that nobody leaves behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from penstock.common.errors import FailedPrecondition, InvalidArgument, PenstockError, ResourceExhausted
from penstock.generation.core.load_order import FileSize
from penstock.generation.holder.upload import (
    UploadFolder,
    UploadLimits,
    check_files,
    free_disk,
    remove_leftovers,
    upload_parent,
)

LIMITS = UploadLimits(max_bytes=None, max_files=4, max_text_bytes=100)
FREE = 10_000
GOOD = (FileSize("config.json", 10), FileSize("model.safetensors", 1000))
# A header of 2 bytes, "{}".
WEIGHTS = (2).to_bytes(8, "little") + b"{}"


def check(*files: FileSize, limits: UploadLimits = LIMITS, memory: int = FREE, disk: int = FREE) -> None:
    check_files(files, limits, memory, disk)


def test_good_files_are_taken() -> None:
    check(*GOOD)
    check(*GOOD, FileSize("a-00001-of-2.safetensors", 5), FileSize("tokenizer.json", 100))


@pytest.mark.parametrize(
    ("files", "field"),
    [
        ((), "start.upload.files"),
        ((GOOD[0],), "start.upload.files"),
        ((GOOD[1],), "start.upload.files"),
        ((*GOOD, GOOD[0]), "start.upload.files[2].name"),
        ((*GOOD, FileSize("../config.json", 1)), "start.upload.files[2].name"),
        ((*GOOD, FileSize("/etc/passwd", 1)), "start.upload.files[2].name"),
        ((*GOOD, FileSize("a/b.safetensors", 1)), "start.upload.files[2].name"),
        ((*GOOD, FileSize("..safetensors", 1)), "start.upload.files[2].name"),
        ((*GOOD, FileSize(".hidden.safetensors", 1)), "start.upload.files[2].name"),
        ((*GOOD, FileSize("a\0.safetensors", 1)), "start.upload.files[2].name"),
        ((*GOOD, FileSize("a.safetensors\n", 1)), "start.upload.files[2].name"),
        ((*GOOD, FileSize("modeling.py", 1)), "start.upload.files[2].name"),
        ((*GOOD, FileSize("pytorch_model.bin", 1)), "start.upload.files[2].name"),
        ((*GOOD, FileSize("penstock.safetensors", 1)), "start.upload.files[2].name"),
        ((*GOOD, FileSize("tokenizer.json", 0)), "start.upload.files[2].size_bytes"),
        ((*GOOD, FileSize("tokenizer.json", 101)), "start.upload.files[2].size_bytes"),
        ((*GOOD, *(FileSize(f"{i}.safetensors", 1) for i in range(3))), "start.upload.files"),
    ],
)
def test_files_are_refused_by_name_and_size(files: tuple[FileSize, ...], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check(*files)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("limits", "memory", "disk", "flag"),
    [
        (LIMITS, 1009, FREE, "--max-model-bytes"),
        (LIMITS, FREE, 1009, "--model-upload-folder"),
        (UploadLimits(1009, 4, 100), FREE, FREE, "--max-model-bytes"),
        # A bound of its own may be above the free memory: quantised weights take less.
        (UploadLimits(1010, 4, 100), 0, 1009, "--model-upload-folder"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_they_come(
    limits: UploadLimits, memory: int, disk: int, flag: str
) -> None:
    with pytest.raises(ResourceExhausted, match=flag) as refused:
        check(*GOOD, limits=limits, memory=memory, disk=disk)
    assert refused.value.reason == "MODEL_TOO_LARGE"
    check(*GOOD, limits=UploadLimits(1010, 4, 100), memory=0, disk=1010)


@pytest.fixture
def folder(tmp_path: Path) -> UploadFolder:
    files = (FileSize("config.json", 6), FileSize("model.safetensors", 10))
    return UploadFolder(tmp_path, files, LIMITS)


def test_files_arrive_in_pieces_and_in_order(folder: UploadFolder, tmp_path: Path) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.write("config.json", b"abc") is None
    assert folder.write("config.json", b"def") == "config.json"
    assert not folder.is_whole
    with pytest.raises(InvalidArgument, match="cut short"):
        folder.require_whole()
    assert folder.write("model.safetensors", WEIGHTS) == "model.safetensors"
    folder.require_whole()
    assert folder.received_bytes == folder.total_bytes == 16
    assert (folder.path / "config.json").read_bytes() == b"abcdef"
    assert stat.S_IMODE((folder.path / "config.json").stat().st_mode) == 0o600
    folder.drop_weights()
    assert [path.name for path in folder.path.iterdir()] == ["config.json"]
    folder.remove()
    folder.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("writes", "field"),
    [
        ([("model.safetensors", WEIGHTS)], "chunk.name"),
        ([("config.json", b"abcdefg")], "chunk.data"),
        ([("config.json", b"abcdef"), ("model.safetensors", WEIGHTS + b"x")], "chunk.data"),
        ([("config.json", b"abcdef"), ("model.safetensors", WEIGHTS), ("x", b"")], "chunk"),
        # A header that claims more than the file, than any header has, and than --max-model-text-bytes.
        (
            [("config.json", b"abcdef"), ("model.safetensors", (3).to_bytes(8, "little") + b"{}")],
            "start.upload.files[1]",
        ),
        ([("config.json", b"abcdef"), ("model.safetensors", b"\xff" * 10)], "start.upload.files[1]"),
    ],
)
def test_bytes_that_were_not_announced_are_refused(
    folder: UploadFolder, writes: list[tuple[str, bytes]], field: str
) -> None:
    *good, bad = writes
    for one in good:
        folder.write(*one)
    with pytest.raises(InvalidArgument) as refused:
        folder.write(*bad)
    assert (refused.value.field, refused.value.reason) == (field, "MODEL_REFUSED")
    folder.remove()


def test_a_header_that_is_too_long_to_parse_is_refused(tmp_path: Path) -> None:
    data = (101).to_bytes(8, "little") + b" " * 101
    folder = UploadFolder(tmp_path, (FileSize("model.safetensors", len(data)),), LIMITS)
    with pytest.raises(InvalidArgument, match="--max-model-text-bytes"):
        folder.write("model.safetensors", data)
    folder.remove()


def test_a_parent_that_cannot_be_used_is_named_by_its_flag(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "no") == 0
    assert upload_parent(str(tmp_path)) == tmp_path
    with pytest.raises(FailedPrecondition, match="--model-upload-folder"):
        UploadFolder(tmp_path / "no", GOOD, LIMITS)


def test_a_full_disk_is_told(folder: UploadFolder) -> None:
    folder.write("config.json", b"abcdef")
    folder.path.chmod(0o500)
    if os.access(folder.path, os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.raises(PenstockError) as refused:
        folder.write("model.safetensors", WEIGHTS)
    folder.path.chmod(0o700)
    assert refused.value.reason == "MODEL_TOO_LARGE"
    folder.remove()


def test_what_a_killed_process_left_is_removed_and_what_lives_is_not(folder: UploadFolder, tmp_path: Path) -> None:
    code = (
        "import sys, os, signal\n"
        "from pathlib import Path\n"
        "from penstock.generation.core.load_order import FileSize\n"
        "from penstock.generation.holder.upload import UploadFolder, UploadLimits\n"
        "made = UploadFolder(Path(sys.argv[1]), (FileSize('config.json', 9),), UploadLimits(None, 1, 9))\n"
        "made.write('config.json', b'abc')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert died.returncode == -signal.SIGKILL
    stranger = tmp_path / "penstock-model-link"
    stranger.symlink_to(tmp_path.parent)
    assert len(list(tmp_path.iterdir())) == 3
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {folder.path, stranger}
    folder.remove()
    remove_leftovers(tmp_path / "no")
