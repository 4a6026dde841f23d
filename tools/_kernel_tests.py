"""The tests of the C++ kernels, and a build of the kernels laid where they look for one."""

from __future__ import annotations

import shutil
from pathlib import Path

from penstock.generation.devices.native.trust import digest, digest_path

ROOT = Path(__file__).resolve().parents[1]
# All tests of the kernels' inputs and outputs.
TESTS = (
    "tests/unit/generation/**/test_native_*.py",
    "tests/unit/generation/layers/linear/test_compact.py",
    "tests/unit/generation/layers/linear/test_tiles.py",
    "tests/unit/generation/layers/test_expert*.py",
    "tests/unit/generation/layers/test_head_products.py",
    "tests/unit/generation/layers/test_latent_rows.py",
    "tests/unit/generation/weights/test_packed_layout.py",
    "tests/numerics/models/test_fused_layers.py",
    "tests/numerics/models/test_fused_head.py",
    "tests/numerics/models/test_fused_taps.py",
    "tests/numerics/models/test_adapter_kernels.py",
    "tests/numerics/engine/test_steady_decode.py",
    "tests/numerics/engine/test_wanted_rows.py",
    "tests/numerics/engine/test_shared_in_step.py",
    "tests/numerics/models/test_int8_kv.py",
)


def found_tests(patterns: list[str]) -> list[str]:
    """Return the files or tests of `patterns`, relative to the repository.

    Raises FileNotFoundError for one that finds none.
    """
    tests: list[str] = []
    for pattern in patterns:
        path, separator, test = pattern.partition("::")
        found = sorted(str(one.relative_to(ROOT)) for one in ROOT.glob(path))
        if not found:
            raise FileNotFoundError(pattern)
        tests += [one + separator + test for one in found]
    return tests


def lay_library(library: Path, place: Path) -> None:
    """Copy `library` to `place` below the folder that the tests are given as PENSTOCK_TEST_KERNELS_HOME, with the
    digest of its bytes.

    A link would not do: a start refuses one, and the tests would compile another library.
    """
    place.parent.mkdir(parents=True, mode=0o700)
    shutil.copyfile(library, place)
    place.chmod(0o755)
    digest_path(place).write_text(digest(place))
