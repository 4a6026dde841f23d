"""`make lint` refuses a change of the protos that breaks callers of the last release."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).resolve().parents[3] / "protos"
BUF = shutil.which("buf") or str(Path(sys.executable).parent / "buf")


def breaking(protos: Path) -> subprocess.CompletedProcess[str]:
    (release,) = (PROTOS / "release").glob("penstock-*.binpb")
    command = [BUF, "breaking", str(protos), "--against", str(release)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_nothing_breaks_the_last_release() -> None:
    done = breaking(PROTOS)
    assert (done.returncode, done.stdout) == (0, "")


def test_planted_breaks_are_refused(tmp_path: Path) -> None:
    planted = [
        ("text.proto", r"  rpc ListModels.*\n", "", 'RPC "ListModels"'),
        ("common.proto", r"uint32 rank = 3", "uint32 rank = 13", 'field "3"'),
        ("generation.proto", r"string adapter = 12", "bytes adapter = 12", 'changed type from "string" to "bytes"'),
        ("admin.proto", r"  reserved 1 to 4;\n", "", "reserved range"),
        ("common.proto", r"  MODEL_STATE_DRAINING = 3;\n", "", 'enum value "3"'),
    ]
    shutil.copytree(PROTOS, tmp_path / "protos", ignore=shutil.ignore_patterns("release", "__pycache__"))
    for file, pattern, replacement, _ in planted:
        path = tmp_path / "protos" / "penstock" / "v1" / file
        text, count = re.subn(pattern, replacement, path.read_text())
        assert count == 1
        path.write_text(text)
    done = breaking(tmp_path / "protos")
    assert done.returncode == 100
    assert [complaint for *_, complaint in planted if complaint not in done.stdout] == []


def test_additions_are_no_break(tmp_path: Path) -> None:
    shutil.copytree(PROTOS, tmp_path / "protos", ignore=shutil.ignore_patterns("release", "__pycache__"))
    path = tmp_path / "protos" / "penstock" / "v1" / "admin.proto"
    path.write_text(path.read_text().replace("message ResumeRequest {}", "message ResumeRequest {\n  bool now = 1;\n}"))
    assert breaking(tmp_path / "protos").returncode == 0
