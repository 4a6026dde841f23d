"""tests/unit mirrors the packages: a test that has a module's name lies where the module does."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from factories.source_tree import PACKAGE, ROOT

UNIT = ROOT / "tests" / "unit"
# Of no package of services/penstock.
OTHERS = {"client", "deploy", "docs", "files", "rules", "tools"}


def unit_tests() -> list[Path]:
    """Tests of packages, by their paths in tests/unit."""
    found = (path.relative_to(UNIT) for path in sorted(UNIT.rglob("test_*.py")))
    return [path for path in found if path.parts[0] not in OTHERS]


def imported(path: Path) -> set[str]:
    """Names of the modules of `penstock` that a file imports, or imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    return found


def misplaced() -> dict[Path, Path]:
    """Tests with the name of one module of their room, which they import, in another folder than the module; and where
    each belongs."""
    modules: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        modules[module.parts[0], module.stem].append(module)
    found = {}
    for test in unit_tests():
        named = modules[test.parts[0], test.stem.removeprefix("test_")]
        if any(module.parent == test.parent for module in named) or (PACKAGE / test.parent / test.stem[5:]).is_dir():
            continue
        used = imported(UNIT / test)
        tested = [one for one in named if "penstock." + ".".join(one.with_suffix("").parts) in used]
        if len(tested) == 1:
            found[test] = tested[0].parent / test.name
    return found


def test_every_folder_is_a_package() -> None:
    assert not sorted({str(test.parent) for test in unit_tests() if not (PACKAGE / test.parent).is_dir()})


def test_a_test_with_a_modules_name_lies_where_the_module_does() -> None:
    assert not {str(test): str(wanted) for test, wanted in misplaced().items()}
