"""Other systems' APIs live in `compat`, of the services and of the client; what is below knows none of them."""

from __future__ import annotations

import re

from factories.source_tree import PACKAGE, ROOT, imports, modules

FOREIGN = re.compile(r"mindie|\bsail\b|kserve|inference_hf|GeneratorTorch|EngineLLM|VllmEngineServicer", re.IGNORECASE)
CLIENT = ROOT / "clients" / "python" / "penstock_client"
# What puts them in front or names them to a user: tops of processes, flags, and where an old name tells the new one.
FRONT = {"router.app", "router.config", "generation.app", "generation.config", "generator.generator"}
FRONT_OF_CLIENT = {"sail.py", "__init__.py"}


def is_core(module: str) -> bool:
    return module.split(".")[0] not in {"compat", "cli"} and module not in FRONT


def test_the_core_imports_none_of_them() -> None:
    importers = {module for module, others in imports().items() if any(one.startswith("compat") for one in others)}
    assert {one for one in importers if is_core(one)} == {"gateway.request_fields"}


def test_the_core_names_none_of_them() -> None:
    # The graphs are those of SAIL's models: their document is named as the source.
    known = {"generation.graphs.graph"}
    naming = {module for module, path in modules().items() if is_core(module) and FOREIGN.search(path.read_text())}
    assert naming == known


def test_every_front_names_one() -> None:
    assert not [one for one in FRONT if not FOREIGN.search((PACKAGE / f"{one.replace('.', '/')}.py").read_text())]


def test_the_client_names_none_of_them_beside_its_own_room() -> None:
    naming = {
        path.relative_to(CLIENT).as_posix()
        for path in CLIENT.rglob("*.py")
        if FOREIGN.search(path.read_text()) and "compat" not in path.relative_to(CLIENT).parts
    }
    assert naming == FRONT_OF_CLIENT
