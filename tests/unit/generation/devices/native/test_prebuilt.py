"""Kernels of the wheel penstock-kernels: found where they fit, passed over with a warning where they do not."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from penstock.common.errors import StartupError
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.devices.native import LIBRARY, build, library, prebuilt
from penstock.generation.devices.native.trust import digest, digest_path

ROOT = Path(__file__).resolve().parents[5]
CONTENT = b"\x7fELF of no use"
FITS = {**prebuilt.wheel_facts(torch.__version__), prebuilt.DIGEST: hashlib.blake2b(CONTENT).hexdigest()}


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is remembered, and packages of the test's folder can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    prebuilt.find_prebuilt.cache_clear()
    yield
    prebuilt.find_prebuilt.cache_clear()


def package(folder: Path, facts: str) -> Path:
    """An installed wheel with these facts; returns its library, which is none."""
    made = folder / prebuilt.PACKAGE
    made.mkdir()
    (made / "__init__.py").touch()
    (made / prebuilt.FACTS).write_text(facts)
    (made / f"{LIBRARY}.so").write_bytes(CONTENT)
    return made / f"{LIBRARY}.so"


def test_without_the_wheel_there_is_none() -> None:
    assert prebuilt.find_prebuilt() is None


def test_a_wheel_that_fits_is_found_after_what_was_built_here(tmp_path: Path) -> None:
    made = package(tmp_path, json.dumps(FITS))
    cache = tmp_path / "cache"
    assert library.find_first(cache) == made
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho g++ 12\n")
    compiler.chmod(0o755)
    built = build.library_path(cache, str(compiler))
    built.parent.mkdir(parents=True)
    built.touch()
    digest_path(built).write_text(digest(built))
    assert library.find_first(cache) == built


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (json.dumps({**FITS, "torch": "1.0"}), "they are for torch 1.0, and this is "),
        (json.dumps({**FITS, "sources": "0" * 16}), "they are of another version of penstock"),
        ("{}", "they are for torch None"),
        ("{", "Expecting property name"),
        ("[]", "is not an object"),
        ("[" * 100_000, "recursion"),
        (json.dumps({**FITS, "digest": "0" * 128}), "is not what the wheel has"),
        (json.dumps({**FITS, "digest": None}), "is not what the wheel has"),
        (json.dumps({**FITS, "digest": []}), "is not what the wheel has"),
    ],
)
def test_a_wheel_that_does_not_fit_is_passed_over_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], facts: str, told: str
) -> None:
    package(tmp_path, facts)
    assert library.find_first(tmp_path / "none") is None
    assert library.load(tmp_path / "none") is None
    out = "".join(capsys.readouterr())
    assert out.count("penstock-kernels are not loaded") == 1
    assert told in out


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({**FITS, "torch": "1.7"}, r"pip install 'torch==1\.7\.\*' brings the torch .* are for, and `penstock build-k"),
        ({**FITS, "sources": "0" * 16}, "install penstock-kernels, or run `penstock build-kernels`"),
        ({**FITS, "torch": "`rm`"}, "install penstock-kernels, or run `penstock build-kernels`"),
    ],
)
def test_without_kernels_that_fit_the_pair_that_fits_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: dict[str, str], told: str
) -> None:
    package(tmp_path, json.dumps(facts))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    with pytest.raises(StartupError, match=told):
        CPUDevice().start(kernels="native")


@pytest.mark.parametrize("content", [CONTENT[:5], b"", None])
def test_a_library_of_the_wheel_that_is_cut_short_is_not_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    """It would end the process by SIGBUS."""
    made = package(tmp_path, json.dumps(FITS))
    assert prebuilt.find_prebuilt() == made
    prebuilt.find_prebuilt.cache_clear()
    if content is None:
        made.unlink()
    else:
        made.write_bytes(content)
    assert library.find_first(tmp_path / "none") is None
    assert "penstock-kernels are not loaded" in "".join(capsys.readouterr())


@pytest.mark.parametrize(("version", "release"), [("2.13.0+cpu", "2.13"), ("2.10.1", "2.10"), ("2.14.0a0+git", "2.14")])
def test_libraries_fit_to_a_release_of_torch(version: str, release: str) -> None:
    assert prebuilt.torch_release(version) == release
    assert prebuilt.wheel_facts(version) == prebuilt.wheel_facts(release)


def test_without_any_kernels_the_error_names_both_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(StartupError, match="install penstock-kernels, or run `penstock build-kernels`") as caught:
        CPUDevice().start(kernels="native")
    assert caught.value.flag == "--kernels"


@pytest.mark.slow
@pytest.mark.kernels
def test_the_wheel_computes_in_an_environment_without_a_compiler(tmp_path: Path) -> None:
    """The real wheel: made, installed, loaded in a process with an empty cache, and it multiplies."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheel")]
    subprocess.run(command, cwd=ROOT / "kernels", check=True, timeout=1200)
    (wheel,) = (tmp_path / "wheel").glob("penstock_kernels-*-py3-none-manylinux_*_x86_64.whl")
    place = tmp_path / "place"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(place), str(wheel)]
    subprocess.run(pip, check=True, timeout=300)
    code = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "import torch\n"
        "from pathlib import Path\n"
        "from penstock.generation.devices.native import library\n"
        "print(library.find_first(Path(sys.argv[2])), library.load(Path(sys.argv[2])))\n"
        "from penstock.generation.layers.layer_kernels import NativeKernels\n"
        "pair = torch.randn(4, 64)\n"
        "told = NativeKernels().silu_mul(pair)\n"
        "torch.testing.assert_close(told, torch.nn.functional.silu(pair[:, :32]) * pair[:, 32:])\n"
        "try: NativeKernels().silu_mul(torch.zeros(2, 3))\n"
        "except RuntimeError: print('refused')\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(place), str(tmp_path / "none")], capture_output=True, text=True, check=True
    ).stdout.split()
    assert told[0] == str(place / prebuilt.PACKAGE / f"{LIBRARY}.so")
    assert told[1] in ("avx2", "avx512", "amx")
    assert told[2] == "refused"
