"""The rules of CONTRIBUTING.md, held by reading the source. Rooms and their imports: test_rooms.py."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import penstock
import pytest
from factories.source_tree import STUBS
from penstock.compat import mindie

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "services" / "penstock"
CLIENT = ROOT / "clients" / "python" / "penstock_client"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in STUBS)
EVERYTHING = [
    *SOURCES,
    *sorted(CLIENT.rglob("*.py")),
    *(
        path
        for folder in ("tests", "tools", "dev", "benchmarks", "protos")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ),
]
STUB_PACKAGES = tuple(f"penstock.{folder}" for folder in STUBS)
# A stub's message never travels further in than the file that converts it.
STUB_IMPORTERS = {
    "tokenizer": {"app", "convert", "servicer", "decode_stream"},
    "generation": {
        "app",
        *(f"{room}/{path.stem}" for room in ("wire", "rpc") for path in (PACKAGE / "generation" / room).glob("*.py")),
    },
    # A router is all edges, but for the parts that decide.
    "router": {
        path.relative_to(PACKAGE / "router").with_suffix("").as_posix() for path in (PACKAGE / "router").rglob("*.py")
    }
    - {
        "config",
        "frontend/admission",
        "backends/discovery",
        "backends/policy",
        "backends/prefix_index",
    },
    # JobsService; HTTP's routes call the router by the client's own.
    "gateway": {"jobs_messages", "jobs_port", "jobs_servicer"},
    # Options and answers in the client's and the service's own forms.
    "generator": {"requests", "answer_reader"},
    "compat": {
        "kserve/infer_message",
        "kserve/inference_service",
        "vllm/engine_messages",
        "vllm/engine_servicer",
        "vllm/kv_events",
        "vllm/tokenizer_archive",
    },
    "cli": {path.relative_to(PACKAGE / "cli").with_suffix("").as_posix() for path in (PACKAGE / "cli").rglob("*.py")},
}


# A line on which a signature without an annotated result may end.
_END_OF_SIGNATURE = re.compile(r"^\s*(?:(?:async )?def .*\)|\)):", re.MULTILINE)


def inside(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def with_any(words: Iterable[str], paths: list[Path]) -> list[Path]:
    """Leave the files out that cannot have a word in their code: parsing all of them takes a minute."""
    wanted = tuple(words)
    return [path for path in paths if any(word in text_of(path) for word in wanted)]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions too; those under TYPE_CHECKING are not run and not counted."""
    tree = ast.parse(text_of(path))
    unused = {node for block in ast.walk(tree) if is_type_checking(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if node in unused:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def test_stubs_stay_at_the_edges() -> None:
    edges = {PACKAGE / service / f"{name}.py" for service, names in STUB_IMPORTERS.items() for name in names}
    inner = [path for path in SOURCES if path not in edges]
    inner = with_any(STUB_PACKAGES, inner)
    assert not {inside(path) for path in inner if any(name.startswith(STUB_PACKAGES) for name in imports(path))}


def test_blocks_and_tensors_do_not_know_each_other() -> None:
    pool, tensors = PACKAGE / "generation/engine/block_pool.py", PACKAGE / "generation/attention/kv_cache.py"
    assert not any("runner" in name for name in imports(pool))
    assert not any("engine" in name for name in imports(tensors))


def test_the_environment_is_touched_in_one_place() -> None:
    home = PACKAGE / "common" / "environment.py"
    words = {"environ", "getenv", "putenv"}
    elsewhere = with_any(words, [path for path in SOURCES if path != home])
    assert not {inside(path) for path in elsewhere if words & attributes(path)}


def attributes(path: Path) -> set[str]:
    return {node.attr for node in ast.walk(ast.parse(text_of(path))) if isinstance(node, ast.Attribute)}


def test_nothing_is_imported_twice_for_types() -> None:
    repeated = set()
    for path in with_any(["TYPE_CHECKING"], EVERYTHING):
        body = ast.parse(text_of(path)).body
        for block in body:
            if isinstance(block, ast.If) and is_type_checking(block) and names_of(block.body) & names_of(body):
                repeated.add(inside(path))
    assert not repeated


def test_a_served_process_needs_no_part_of_torch_that_it_leaves_unloaded() -> None:
    """`torch.Generator()` needs one (startup/preload.py); forks of tests have all of torch, and would not show it."""
    # The fallback route and the doctor load transformers, and so all of torch.
    loaded = {"self_check.py", "expert_module.py", "module_swaps.py", "doctor.py"}
    calls = re.compile(r"torch\.Generator\((?!\) cannot)")
    found = {path.name for path in with_any(["torch.Generator("], SOURCES) if calls.search(text_of(path))}
    assert found <= loaded


def names_of(body: list[ast.stmt]) -> set[str]:
    """Names that a body's imports bind."""
    lines = (node for node in body if isinstance(node, ast.Import | ast.ImportFrom))
    return {alias.asname or alias.name for node in lines for alias in node.names}


def test_services_do_not_print() -> None:
    assert not {inside(path) for path in with_any(["print("], SOURCES) if "print" in called_names(path)}


def called_names(path: Path) -> set[str]:
    calls = (node for node in ast.walk(ast.parse(text_of(path))) if isinstance(node, ast.Call))
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def test_nothing_is_left_for_later() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    assert not {inside(path) for path in SOURCES if any(word in text_of(path) for word in words)}


def test_everything_is_annotated() -> None:
    missing = {
        f"{inside(path)}:{node.lineno}"
        for path in SOURCES
        if _END_OF_SIGNATURE.search(text_of(path))
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is None and not is_compiled(node)
    }
    assert not missing


def is_compiled(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for a function that Triton compiles: it reads annotations as its own."""
    return any(isinstance(one, ast.Attribute) and one.attr == "jit" for one in node.decorator_list)


def test_configurations_import_light() -> None:
    """The command line reads them for --help."""
    modules = ", ".join(f"penstock.{service}.config" for service in ("tokenizer", "generation", "router"))
    code = f"import sys, {modules}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"[]\n"


def test_no_name_of_this_machine_is_in_a_file() -> None:
    texts = (path for path in EVERYTHING if path != Path(__file__))
    assert not {inside(path) for path in texts if str(ROOT) in text_of(path)}


@pytest.mark.parametrize("package", [penstock, mindie], ids=lambda package: package.__name__)
def test_names_that_are_imported_when_they_are_asked_for_are_where_the_package_says(package: ModuleType) -> None:
    folder = PACKAGE / "generator" if package is penstock else Path(str(package.__file__)).parent
    assert package._HOMES.keys() <= set(package.__all__)
    for name, home in package._HOMES.items():
        assert f"class {name}" in text_of(folder / f"{home}.py")
