"""Builds the kernels with the address and undefined-behaviour sanitizers of g++, and runs their tests with that build.

    python tools/sanitize_kernels.py [TESTS ...]

The first wrong access or undefined operation ends pytest with a report of where it is. Both instruction sets are run,
as far as this CPU has them. Leaks are not looked for: Python and torch keep what they have to the end. Some minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock.common.environment import cache_folder, current_environment
from penstock.common.errors import StartupError
from penstock.generation.devices.native import build

from tools._kernel_tests import ROOT, TESTS, found_tests, lay_library

OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def runtime_libraries(compiler: str) -> str:
    """Libraries to load before Python: the sanitizer's, and the C++ library, since the sanitizer watches exceptions."""
    paths = []
    for name in ("libasan.so", "libstdc++.so.6"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        path = Path(found.stdout.strip())
        if not path.is_absolute():
            raise StartupError(f"{compiler} has no {name}: install its sanitizers", flag="--kernels")
        paths.append(str(path.resolve()))
    return " ".join(paths)


def main() -> int:
    """Build and run; the exit code of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="default: the kernels' tests")
    arguments = parser.parse_args()
    tests = found_tests(arguments.tests)
    compiler = build.find_compiler()
    if compiler is None:
        raise StartupError("the native kernels need a C++ compiler: install g++", flag="--kernels")
    start = time.monotonic()
    library = build.build(Path(cache_folder()), compiler=compiler, sanitize=True)
    print(f"built in {(time.monotonic() - start) / 60:.1f} minutes: {library}", flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-sanitized-") as home:
        # The tests build the library and load it: they find this one in its place (tests/factories/models/native.py).
        lay_library(library, build.library_path(Path(home) / "penstock", compiler))
        variables = {
            **current_environment(),
            **OPTIONS,
            "LD_PRELOAD": runtime_libraries(compiler),
            "PENSTOCK_TEST_KERNELS_HOME": home,
        }
        # --capture=sys: the sanitizer writes its report to the file descriptor, and then there is no pytest to show it.
        options = ["-q", "-p", "no:cacheprovider", "--capture=sys", "-m", "not slow"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        code = subprocess.run(command, cwd=ROOT, env=variables).returncode
    print(f"{(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
