"""Odd arguments and files are one line with the flag and exit code 2; a full device for output is no reason to end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from factories.servers import stack
from penstock.common.checkpoint import demo_folder

LONG_SECONDS = 300


def outcome(*arguments: str) -> tuple[int, str]:
    """Exit code and last line of standard error."""
    command = [sys.executable, "-m", "penstock.cli.main", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_SECONDS, check=False)
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("roles", [(), ("tokenizer", "--port", "0", "--metrics-port", "-1")], ids=["tree", "tokenizer"])
def test_a_model_name_of_5000_characters(roles: tuple[str, ...]) -> None:
    role, flags = roles[:1], roles[1:]
    code, line = outcome(*role, "m" * 5000, *flags)
    assert code == 2
    assert "MODEL" in line
    assert "File name too long" in line
    assert len(line) < 300


def test_a_deeply_nested_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(demo_folder(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    code, line = outcome("tokenizer", str(tmp_path), "--port", "0", "--metrics-port", "-1")
    assert code == 2
    assert "tokenizer.json" in line
    assert "MODEL" in line


def test_a_service_whose_log_device_is_full_serves_and_ends_with_0() -> None:
    port = stack.free_port()
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "tokenizer", "--port", str(port)]
    with Path("/dev/full").open("wb") as full:
        popen = subprocess.Popen([*command, "--metrics-port", "-1"], stdout=full, stderr=full)
    try:
        stack.wait_serving(f"127.0.0.1:{port}", stack.Process("tokenizer", popen, port, -1, Path("/dev/null")))
        popen.terminate()
        assert popen.wait(LONG_SECONDS) == 0
    finally:
        popen.kill()
        popen.wait()
