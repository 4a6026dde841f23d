"""A module that is not installed is answered by the extra that brings it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from penstock.cli import missing_packages
from penstock.cli.command_table import COMMANDS as TABLE
from penstock.cli.missing_packages import COMMANDS, MODULES, missing_package
from penstock.common.errors import StartupError

PROJECT = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Distributions with another name than their module.
DISTRIBUTIONS = {"grpc_reflection": "grpcio-reflection", "opentelemetry": "opentelemetry-sdk"}


def brought(extra: str) -> set[str]:
    """Distributions that an extra lists itself."""
    return {re.split(r"[<>=\[]", one)[0] for one in PROJECT["optional-dependencies"][extra]}


@pytest.mark.parametrize("extra", list(MODULES))
def test_each_extra_brings_its_modules(extra: str) -> None:
    wanted = {DISTRIBUTIONS.get(module, module.replace("_", "-")) for module in MODULES[extra]}
    assert wanted <= brought(extra)


@pytest.mark.parametrize(
    ("module", "words", "told"),
    [
        (
            "torch._C",
            ["infer", "--data-file", "x"],
            "penstock infer needs the package torch: pip install 'penstock[all]'",
        ),
        ("prometheus_client", ["serve"], "pip install 'penstock[all]'"),
        ("prometheus_client", ["serve", "./model"], "pip install 'penstock[all]'"),
        ("prometheus_client", ["serve", "router"], "pip install 'penstock[router]'"),
        (
            "prometheus_client",
            ["inspect"],
            "penstock inspect needs the package prometheus_client: pip install 'penstock[all]'",
        ),
        ("opentelemetry", ["chat"], "pip install 'penstock[tracing]'"),
        ("uvicorn", ["demo"], "pip install 'penstock[all]'"),
        ("mine.own", ["infer"], "penstock infer needs the package mine: it is not installed"),
    ],
)
def test_the_error_names_the_command_the_module_and_the_extra(module: str, words: list[str], told: str) -> None:
    error = missing_package(ModuleNotFoundError(name=module), words)
    assert error is not None
    assert told in error.message


def test_extras_of_commands_are_ours() -> None:
    assert set(COMMANDS.values()) <= PROJECT["optional-dependencies"].keys()
    assert COMMANDS.keys() <= {row.name for row in TABLE}


def test_a_stack_that_lacks_a_package_is_told_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_packages, "find_spec", lambda module: None if module == "torch" else object())
    with pytest.raises(StartupError, match=r"torch is not installed: pip install 'penstock\[all\]'"):
        missing_packages.require_stack()


@pytest.mark.parametrize("module", ["penstock.generation.nothing", "penstock_client.nothing", None])
def test_our_own_modules_are_faults_of_ours(module: str | None) -> None:
    assert missing_package(ModuleNotFoundError(name=module), ["chat"]) is None
