"""penstock-client is a distribution of its own: every file has one owner, and it needs nothing of the services."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CLIENT = ROOT / "clients" / "python"
SERVICES = ROOT / "services"


def settings(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def shared() -> list[str]:
    """SHARED of hatch_build.py, which cannot be imported without hatchling."""
    for node in ast.parse((CLIENT / "hatch_build.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SHARED":
            return list(ast.literal_eval(node.value))
    raise AssertionError("no SHARED")


def client_files() -> list[Path]:
    """Python files of the wheel."""
    owned = [SERVICES / path for path in shared()]
    files = [file for path in owned for file in ([path] if path.is_file() else sorted(path.glob("*.py")))]
    return [*sorted((CLIENT / "penstock_client").rglob("*.py")), *files]


def imports(path: Path) -> Iterator[str]:
    """Modules of penstock that a file imports, for types too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_the_services_wheel_leaves_out_what_the_client_has() -> None:
    left_out = settings(ROOT)["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    assert left_out == [f"services/{path}" for path in shared()]
    assert all((ROOT / path).exists() for path in left_out)


def test_the_client_imports_nothing_of_the_services_but_what_it_has() -> None:
    having = {path.with_suffix("") for path in client_files()}
    foreign = set()
    for path in client_files():
        for name in imports(path):
            module = SERVICES.joinpath(*name.split("."))
            if name.startswith("penstock.") and module.with_suffix(".py").is_file() and module not in having:
                foreign.add(f"{path.relative_to(ROOT)}: {name}")
    assert len(having) > 30
    assert not foreign


def test_both_have_one_version_and_the_services_need_the_client_of_theirs() -> None:
    services, client = settings(ROOT)["project"], settings(CLIENT)["project"]
    assert services["version"] == client["version"]
    assert f"penstock-client=={client['version']}" in services["dependencies"]


def test_the_packages_for_other_languages_have_that_version() -> None:
    version = settings(ROOT)["project"]["version"]
    sdks = ROOT / "clients" / "sdks"
    for file in ("typescript/package.json", "java/pom.xml", "cpp/CMakeLists.txt", "ruby/penstock-client.gemspec"):
        assert version in (sdks / file).read_text(encoding="utf-8"), file
