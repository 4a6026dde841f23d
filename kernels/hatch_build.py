"""The library of the wheel penstock-kernels: compiled with g++ for the torch that is installed where it is built."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from penstock.common.errors import StartupError
from penstock.generation.devices.native import LIBRARY
from penstock.generation.devices.native.build import compile_library, find_compiler, is_supported
from penstock.generation.devices.native.prebuilt import FACTS, PACKAGE, facts_of, link_arguments, torch_release

# The oldest name that pip knows a glibc by in the form manylinux_MAJOR_MINOR.
OLDEST_GLIBC = (2, 17)


class TorchRelease(MetadataHookInterface):
    """Names the torch that the library fits to as the wheel's dependency."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the dependencies."""
        metadata["dependencies"] = [f"torch~={torch_release(torch.__version__)}.0"]


class Kernels(BuildHookInterface[Any]):
    """Compiles the kernels into the wheel and gives it its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile. Raises StartupError where there are no kernels for this machine, or no compiler."""
        compiler = find_compiler()
        if not is_supported():
            raise StartupError(f"there are no kernels for {platform.machine()}", flag="--kernels")
        if compiler is None:
            raise StartupError("the wheel of the kernels needs a C++ compiler: install g++", flag="--kernels")
        self._scratch = tempfile.TemporaryDirectory()
        folder = Path(self._scratch.name)
        library = folder / f"{LIBRARY}.so"
        compile_library(compiler, library, link_arguments(), progress=_tell)
        library.chmod(0o755)
        facts = folder / FACTS
        facts.write_text(json.dumps(facts_of(library, torch.__version__)) + "\n")
        for path in (library, facts):
            build_data["force_include"][str(path)] = f"{PACKAGE}/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform(library)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        self._scratch.cleanup()


def _platform(library: Path) -> str:
    """Return the tag of the oldest Linux that has each symbol of glibc which the library needs (PEP 600)."""
    symbols = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    needed = {(int(major), int(minor)) for major, minor in re.findall(r"\(?GLIBC_(\d+)\.(\d+)", symbols)}
    major, minor = max(needed | {OLDEST_GLIBC})
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def _tell(done: int, files: int) -> None:
    if done in (0, files) or done % 10 == 0:
        print(f"  {done} of {files} files of kernels", file=sys.stderr, flush=True)
