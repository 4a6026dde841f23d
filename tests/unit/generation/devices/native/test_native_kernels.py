"""The C++ kernels of rows against torch's operators, over random shapes, on every instruction set that the CPU has."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from factories.models.kernels import assert_close
from factories.models.native import INSTRUCTION_SETS, cache_home, use_instruction_set
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.cli import kernels
from penstock.common.errors import StartupError
from penstock.generation.devices.native import LIBRARY, build, library, prebuilt
from penstock.generation.devices.native.trust import digest, digest_path
from penstock.generation.layers.layer_kernels import LayerKernels, NativeKernels

dtypes = st.sampled_from(library.DTYPES)


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, autouse=True)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_instruction_set(request.param)


@settings(max_examples=30, deadline=None)
@given(dtype=dtypes, rows=st.integers(1, 40), width=st.integers(1, 300), seed=st.integers(0, 1000))
def check_rows(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    hidden, x = (torch.randn(rows, width).to(dtype) for _ in range(2))
    weight, gate_up = torch.randn(width).to(dtype), (3 * torch.randn(rows, 2 * width)).to(dtype)
    streams = [hidden.clone(), hidden.clone()]
    normed = [
        kernels.add_rms_norm(stream, x, weight, 1e-6)
        for kernels, stream in zip((LayerKernels(), NativeKernels()), streams, strict=True)
    ]
    assert torch.equal(*streams)
    assert_close(normed[1], normed[0])
    assert_close(NativeKernels().silu_mul(gate_up), LayerKernels().silu_mul(gate_up))


def test_norm_and_swiglu_are_those_of_the_reference() -> None:
    check_rows()


@settings(max_examples=30, deadline=None)
@given(exact=st.booleans(), out=dtypes, rows=st.integers(1, 40), width=st.integers(1, 300), seed=st.integers(0, 1000))
def check_stream(exact: bool, out: torch.dtype, rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    hidden, x = torch.randn(rows, width), torch.randn(rows, width)
    weight = torch.randn(width) if exact else torch.randn(width).bfloat16()
    stream, kernels = hidden.clone(), NativeKernels(out)
    normed = kernels.add_rms_norm(stream, x, weight, 1e-6)
    assert torch.equal(stream, hidden + x)
    assert normed.dtype is out
    expected = LayerKernels().rms_norm(stream, weight.float(), 1e-6)
    assert_close(normed, expected.to(out))
    assert_close(kernels.rms_norm(stream, weight, 1e-6), normed)
    addend = kernels.norm_addend(x, weight, 1e-6)
    assert addend.dtype is torch.float32
    assert_close(addend, LayerKernels().rms_norm(x, weight.float(), 1e-6))


def test_a_stream_in_float_is_normed_into_the_models_dtype() -> None:
    check_stream()


def test_small_parts_of_a_large_stream_are_kept() -> None:
    stream, weight = torch.full((1, 64), 256.0), torch.ones(64).bfloat16()
    for _ in range(64):
        NativeKernels(torch.bfloat16).add_rms_norm(stream, torch.full((1, 64), 0.25).bfloat16(), weight, 1e-6)
    assert torch.equal(stream, torch.full((1, 64), 272.0))


def test_a_nan_stays_one() -> None:
    hidden = torch.zeros(2, 40)
    hidden[1, 3] = torch.nan
    normed = NativeKernels().add_rms_norm(hidden, torch.ones(2, 40), torch.ones(40), 1e-6)
    assert normed[0].isfinite().all()
    assert normed[1].isnan().all()
    activated = NativeKernels().silu_mul(torch.cat((hidden, torch.ones(2, 40)), dim=1))
    assert activated.isnan().sum() == 1


def test_impossible_arguments_are_refused_not_read() -> None:
    with pytest.raises(RuntimeError):
        NativeKernels().add_rms_norm(torch.zeros(2, 4), torch.zeros(2, 5), torch.zeros(4), 1e-6)
    with pytest.raises(RuntimeError):
        NativeKernels().silu_mul(torch.zeros(2, 3))


def fake_compiler(folder: Path, version: str) -> str:
    """One that says its version, and cannot compile."""
    path = folder / f"compiler-{version}"
    path.write_text(f'#!/bin/sh\ntest "$1" = --version && echo "g++ {version}"\n')
    path.chmod(0o755)
    return str(path)


def test_the_library_is_built_once_for_each_version_of_its_sources_and_compiler(tmp_path: Path) -> None:
    old, new = fake_compiler(tmp_path, "12.1"), fake_compiler(tmp_path, "12.2")
    path = build.library_path(tmp_path, old)
    assert library.load(tmp_path) is None
    path.parent.mkdir()
    path.write_bytes(b"")
    digest_path(path).write_text(digest(path))
    assert build.build(tmp_path, compiler=old) == path
    with pytest.raises(StartupError, match="compiled"):
        build.build(tmp_path, compiler=new)
    with pytest.raises(StartupError, match="compiled"):
        build.build(tmp_path, compiler="/nowhere")


def test_a_build_without_instructions_that_this_cpu_has_is_the_last_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = fake_compiler(tmp_path, "12.1")
    monkeypatch.setattr(build, "has_wide_set", lambda: False)
    narrow = build.library_path(tmp_path, compiler)
    whole = build.library_path(tmp_path, compiler, everywhere=True)
    assert narrow.parent != whole.parent
    narrow.parent.mkdir()
    narrow.write_bytes(b"")
    digest_path(narrow).write_text(digest(narrow))
    assert build.find(tmp_path) == narrow
    monkeypatch.setattr(build, "has_wide_set", lambda: True)
    build._warn_of_narrow.cache_clear()
    assert build.find(tmp_path) == narrow
    assert "run `penstock build-kernels` here" in "".join(capsys.readouterr())
    assert build.library_path(tmp_path, compiler) == whole
    # One that has all is as good where fewer are needed.
    whole.parent.mkdir()
    whole.write_bytes(b"")
    digest_path(whole).write_text(digest(whole))
    assert build.find(tmp_path) == whole
    monkeypatch.setattr(build, "has_wide_set", lambda: False)
    assert build.find(tmp_path) == whole
    assert build.build(tmp_path, compiler=compiler) == whole


@pytest.mark.parametrize("system", [False, True])
def test_what_goes_into_an_environment_has_every_instruction_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: bool
) -> None:
    asked: list[bool] = []

    def built(_folder: Path, *, everywhere: bool, progress: object) -> Path:
        asked.append(everywhere)
        return tmp_path

    monkeypatch.setattr(build, "build", built)
    monkeypatch.setattr(library, "load", lambda *_: "avx2")
    monkeypatch.setattr(kernels.signal, "signal", lambda *_: None)
    for name in ("cache_folder", "system_folder"):
        monkeypatch.setattr(kernels, name, lambda: str(tmp_path))
    kernels.run_build_kernels(system=system)
    assert asked == [system]


def test_what_was_built_is_found_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.library_path(tmp_path, fake_compiler(tmp_path, "12.1"))
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with pytest.raises(StartupError, match="install"):
        build.build(tmp_path)
    path.parent.mkdir()
    path.write_bytes(b"")
    digest_path(path).write_text(digest(path))
    assert build.find(tmp_path) == path
    assert build.build(tmp_path) == path
    # In a process that has none yet: what is no library is passed over.
    script = "import pathlib, sys; from penstock.generation.devices.native import library; "
    code = script + "print(library.load(pathlib.Path(sys.argv[1]) / 'none', pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "None"


@pytest.mark.parametrize("place", ["cache", pytest.param("wheel", marks=pytest.mark.slow)])
def test_a_library_that_is_cut_short_does_not_end_the_process(tmp_path: Path, place: str) -> None:
    """Half of the real one: the loader would map what is not there, and end by SIGBUS."""
    content = next((cache_home() / "penstock").glob("*/*.so")).read_bytes()
    made = build.library_path(tmp_path / "cache", fake_compiler(tmp_path, "12.1"))
    if place == "wheel":
        made = tmp_path / prebuilt.PACKAGE / f"{LIBRARY}.so"
    made.parent.mkdir(parents=True)
    made.write_bytes(content[: len(content) // 2])
    if place == "wheel":
        (made.parent / "__init__.py").touch()
        facts = {**prebuilt.wheel_facts(torch.__version__), prebuilt.DIGEST: hashlib.blake2b(content).hexdigest()}
        (made.parent / prebuilt.FACTS).write_text(json.dumps(facts))
    script = (
        "import pathlib, sys; sys.path.append(sys.argv[1])\n"
        "from penstock.generation.devices.native import library\n"
        "print(library.load(pathlib.Path(sys.argv[1]) / 'cache'))"
    )
    found = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.splitlines()[-1:]) == (0, ["None"]), found.stderr
    assert "not loaded" in found.stdout + found.stderr
