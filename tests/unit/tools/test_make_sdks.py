"""Packages for other languages where a compiler lacks what it reads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import make_sdks

# The words of protoc 3.21 without google.protobuf's own files.
WORDS = """google/protobuf/struct.proto: File not found.
penstock/v1/text.proto:11:1: Import "google/protobuf/struct.proto" was not found or had errors."""


def put_compiler(folder: Path, words: str) -> None:
    """Put a compiler of Ruby's name into a folder; it tells `words` and fails."""
    compiler = folder / "grpc_tools_ruby_protoc"
    compiler.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{words}\nEND\nexit 1\n", encoding="utf-8")
    compiler.chmod(0o755)


def test_a_compiler_without_its_own_files_is_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release leaves out what cannot be made here, with the reason; other failures end it."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    put_compiler(tmp_path, WORDS)
    with pytest.raises(make_sdks.Missing, match="libprotobuf-dev"):
        make_sdks.make("ruby", tmp_path / "out")
    put_compiler(tmp_path, "penstock/v1/text.proto:11:1: Expected message type.")
    with pytest.raises(subprocess.CalledProcessError):
        make_sdks.make("ruby", tmp_path / "out")
