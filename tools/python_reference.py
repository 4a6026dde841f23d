"""Write docs/reference/python-client.md and docs/reference/generator.md from signatures and docstrings.

python tools/python_reference.py

Nothing is imported: the sources are read. A name has its signature and docstring; a class has its fields with
their comments, and its public methods. The pages are plain Markdown, which the forge shows, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
CLIENT, GENERATOR = ROOT / "clients" / "python" / "penstock_client", ROOT / "services" / "penstock" / "generator"
LINE_LENGTH = 100
_PARAGRAPHS = re.compile(r"\n\s*\n")
# Methods with an underscore that a caller uses all the same.
SPECIAL = ("__init__",)


@dataclass(frozen=True, slots=True)
class Part:
    """A heading of a page with names of one module below it, in their order."""

    title: str
    module: Path
    names: tuple[str, ...]
    about: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its file, title, first paragraph and parts."""

    file: str
    title: str
    about: str
    parts: tuple[Part, ...]


CLIENT_PAGE = Page(
    "python-client.md",
    "The Python client",
    "Classes of `penstock_client`, the package `penstock-client`. [Clients](../guide/clients.md) tells how to use "
    "them, [the table of options](options.md) what each keyword of a request means.",
    (
        Part(
            "Clients",
            CLIENT / "_sync.py",
            ("Client", "Stream"),
            "`AsyncClient` and `AsyncStream` have the same methods as coroutines and asynchronous iterators.",
        ),
        Part("Files and batches", CLIENT / "_sync_jobs.py", ("JobsClient",), "`AsyncJobsClient` has the same methods."),
        Part("Lines of a batch", CLIENT / "_batches.py", ("BatchAnswer",)),
        Part(
            "Answers",
            CLIENT / "_types.py",
            (
                "Completion",
                "Choice",
                "Delta",
                "LogprobEntry",
                "ToolCall",
                "Usage",
                "Timings",
                "Scores",
                "Score",
                "Embeddings",
                "WatermarkEvidence",
            ),
        ),
        Part("Tensors of answers", CLIENT / "_tensors.py", ("StepTensors", "Tensor")),
        Part("Models that are loaded by call", CLIENT / "_load_model.py", ("LoadProgress", "UnloadedModel")),
        Part(
            "Configuration",
            CLIENT / "config.py",
            ("ClientConfig", "TLSConfig", "TimeoutConfig", "RetryConfig", "KeepAliveConfig"),
        ),
        Part("Options", CLIENT / "_options.py", ("PromptOptions", "GenerationOptions", "check_options")),
        Part(
            "Errors",
            ROOT / "services" / "penstock" / "common" / "errors.py",
            (
                "PenstockError",
                "InvalidArgument",
                "NotFound",
                "FailedPrecondition",
                "PermissionDenied",
                "Unauthenticated",
                "ResourceExhausted",
                "DeadlineExceeded",
                "Unavailable",
                "Cancelled",
                "Aborted",
                "Internal",
                "Unimplemented",
            ),
        ),
    ),
)
GENERATOR_PAGE = Page(
    "generator.md",
    "The Generator",
    "`penstock.Generator` is the engine in the caller's process. [In your process](../guide/in-your-process.md) tells "
    "how to use it. Answers are those of [the Python client](python-client.md#answers).",
    (
        Part("Generator", GENERATOR / "generator.py", ("Generator",)),
        Part("Streams", GENERATOR / "stream.py", ("TextStream",)),
        Part("Batches", GENERATOR / "ordered_batch.py", ("BatchFailed",)),
        Part("Prefixes that are held", GENERATOR / "prefix_handle.py", ("PrefixHandle",)),
        Part(
            "transformers' manager",
            GENERATOR / "continuous_batching.py",
            ("ContinuousBatchingManager", "GenerationOutput"),
        ),
    ),
)
PAGES = (CLIENT_PAGE, GENERATOR_PAGE)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def page_text(page: Page) -> str:
    """Make a page's text. Raises KeyError for a name that its module lacks."""
    parts = [
        f"# {page.title}\n\n{page.about}\n\nMade from the code by `python tools/python_reference.py` (`make docs`)."
    ]
    for part in page.parts:
        source = part.module.read_text(encoding="utf-8")
        known = {one.name: one for one in ast.parse(source).body if isinstance(one, Definition)}
        parts.append("\n\n".join(filter(None, (f"## {part.title}", part.about))))
        lines = source.splitlines()
        for name in part.names:
            parts += (
                _of_class(known[name], lines) if isinstance(known[name], ast.ClassDef) else _of(known[name], name, 3)
            )
    return "\n\n".join(parts) + "\n"


def _of_class(node: Definition, lines: list[str]) -> Iterator[str]:
    assert isinstance(node, ast.ClassDef)
    bases = [ast.unparse(base) for base in node.bases]
    yield f"### `{node.name}`"
    yield _prose(ast.get_docstring(node) or "")
    if bases:
        yield f"Base: {', '.join(f'`{base}`' for base in bases)}."
    fields = [*_fields(node, lines)]
    if fields:
        yield "\n".join(["| field | type | default | |", "|---|---|---|---|", *fields])
    for method in _methods(node):
        yield from _of(method, f"{node.name}.{method.name}", 4)


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the public methods that have a docstring: of overloads the one that is run."""
    for one in node.body:
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) or ast.get_docstring(one) is None:
            continue
        if not one.name.startswith("_") or one.name in SPECIAL:
            yield one


def _of(node: Definition, name: str, depth: int) -> Iterator[str]:
    assert not isinstance(node, ast.ClassDef)
    yield f"{'#' * depth} `{name.removesuffix('.__init__')}{'()' if not _is_property(node) else ''}`"
    told = _prose(ast.get_docstring(node) or "")
    if not _is_property(node):
        yield f"```python\n{_signature(node, name)}\n```"
        yield told
    else:
        yield f"`{ast.unparse(node.returns)}`: {told}" if node.returns is not None else told


def _is_property(node: Definition) -> bool:
    return any(ast.unparse(one) in ("property", "cached_property") for one in node.decorator_list)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """Write a call's signature, on one line where it fits, else with a line for each argument."""
    wanted = [text for text in _arguments(node.args) if text != "self"]
    made_of = name.rpartition(".")[0] if name.endswith("__init__") else node.name
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    prefix = "async def " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{prefix}{made_of}({', '.join(wanted)}){returns}"
    if len(line) <= LINE_LENGTH:
        return line
    return "\n".join([f"{prefix}{made_of}(", *(f"    {one}," for one in wanted), f"){returns}"])


def _arguments(given: ast.arguments) -> Iterator[str]:
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [*given.defaults]
    for one, default in zip(plain, defaults, strict=True):
        yield _argument(one, default)
    if given.vararg is not None:
        yield f"*{_argument(given.vararg, None)}"
    elif given.kwonlyargs:
        yield "*"
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _argument(one, default)
    if given.kwarg is not None:
        yield f"**{_argument(given.kwarg, None)}"


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(one.annotation)}" if one.annotation is not None else ""
    if default is None:
        return f"{one.arg}{kind}"
    return f"{one.arg}{kind} = {ast.unparse(default)}" if kind else f"{one.arg}={ast.unparse(default)}"


def _fields(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """Yield a table's row for each public field of a class, with the comment above it or behind it."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            cells = [one.target.id, ast.unparse(one.annotation), "" if one.value is None else ast.unparse(one.value)]
            shown = [f"`{cell}`" if cell else "" for cell in cells]
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in (*shown, _comment(one, lines)))} |"


def _comment(node: ast.AnnAssign, lines: list[str]) -> str:
    told, above = list[str](), node.lineno - 2
    while above >= 0 and lines[above].lstrip().startswith("#"):
        told.insert(0, lines[above].strip().lstrip("# "))
        above -= 1
    behind = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
    return " ".join(filter(None, [*told, behind]))


def _prose(text: str) -> str:
    """Join the lines of each paragraph of a docstring; examples stay as they are, as code."""
    made = []
    for paragraph in _PARAGRAPHS.split(text.strip()):
        if paragraph.lstrip().startswith(">>>"):
            made.append(f"```python\n{paragraph}\n```")
        else:
            made.append(" ".join(paragraph.split()).replace("<", "&lt;"))
    return "\n\n".join(made)


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        (REFERENCE / page.file).write_text(page_text(page), encoding="utf-8")


if __name__ == "__main__":
    main()
