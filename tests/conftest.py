"""Makes tests/factories importable as `factories` however pytest is started."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))
# On a busy machine an example that takes long, or is made slowly, is not a failure.
_SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("penstock", deadline=None, suppress_health_check=_SLOW)
hypothesis.settings.load_profile("penstock")
# The first test that needs the C++ kernels compiles them: a minute, several on a busy machine.
_WITH_COMPILATION_SECONDS = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of the kernels more time."""
    for item in items:
        module = getattr(item, "module", None)
        if any(hasattr(module, name) for name in ("use_native", "use_instruction_set", "use_packing")):
            item.add_marker(pytest.mark.timeout(_WITH_COMPILATION_SECONDS))
