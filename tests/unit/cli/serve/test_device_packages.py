"""A device that the installed packages cannot have is refused at once, without an import of torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from penstock.cli.serve import device_packages
from penstock.cli.serve.device_packages import check_device_packages
from penstock.common.errors import StartupError


def torch_with(version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a torch with these lines in its version.py be the one that is installed."""
    (folder / "version.py").write_text(version)
    monkeypatch.setattr(
        device_packages, "find_spec", lambda name: ModuleSpec(name, None, origin=str(folder / "__init__.py"))
    )


@pytest.mark.parametrize(
    "cuda", ["cuda = None", "cuda: Optional[str] = None", "debug = False\ncuda = None\nhip = None"]
)
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_torch_without_cuda_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, device: str) -> None:
    torch_with(f"__version__ = '2'\n{cuda}\n", tmp_path, monkeypatch)
    with pytest.raises(StartupError, match=rf"--device {device} needs a torch with CUDA: .*extra \[cuda\]") as caught:
        check_device_packages(device)
    assert caught.value.flag == "--device"


@pytest.mark.parametrize(
    "text",
    [
        "cuda: Optional[str] = '13.0'\n",
        "xcuda = None\n",
        "",
        "cuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n",
    ],
)
def test_any_other_torch_may_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    torch_with(text, tmp_path, monkeypatch)
    check_device_packages("cuda")


def test_a_torch_that_is_not_there_or_cannot_be_read_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_with("cuda = None\n", tmp_path / ".." / tmp_path.name, monkeypatch)
    (tmp_path / "version.py").unlink()
    check_device_packages("cuda")
    monkeypatch.setattr(device_packages, "find_spec", lambda name: None)
    check_device_packages("cuda")


def test_an_npu_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_packages, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"--device npu:1 needs torch-npu, .*extra \[npu\]"):
        check_device_packages("npu:1")


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_cpu_needs_nothing(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(device_packages, "find_spec", lambda name: None)
    check_device_packages(device)


def test_torch_is_not_imported_for_it() -> None:
    code = (
        "import sys\n"
        "from penstock.cli.serve.device_packages import check_device_packages\n"
        "try: check_device_packages('npu')\n"
        "except Exception as error: print(error)\n"
        "check_device_packages('cpu')\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
