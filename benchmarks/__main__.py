"""The benchmarks' one entry: `python -m benchmarks` lists them, `python -m benchmarks NAME --help` tells one's flags.

A benchmark is a module of this folder with `add_flags(parser)` and `main(options, report)`, which returns its exit
status, or None for 0. The first line of its docstring is its line in the list. `--json FILE` is a flag of all of them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The tests' factories start services, for benchmarks, too.
sys.path[:0] = [str(HERE.parent / folder) for folder in (".", "tests")]
from benchmarks._processes import stop_on_sigterm
from benchmarks._report import Report


def line_of(path: Path) -> str | None:
    """Return the first line of a benchmark's docstring, None for any other module; without an import: most have
    torch's."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    is_benchmark = any(isinstance(one, ast.FunctionDef) and one.name == "add_flags" for one in tree.body)
    return (ast.get_docstring(tree) or "").partition("\n")[0] if is_benchmark else None


def benchmarks() -> dict[str, str]:
    """Return the benchmarks' names with a line each."""
    return {path.stem: line for path in sorted(HERE.glob("[a-z]*.py")) if (line := line_of(path)) is not None}


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's flags."""
    module = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_flags(parser)
    parser.add_argument("--json", "--out", dest="json", type=Path, help="file for the result; - is standard output")
    parser.set_defaults(run=module.main)
    return parser


def main(arguments: list[str]) -> int:
    """Run what the command line says; return the exit status."""
    path = HERE / f"{arguments[0] if arguments else ''}.py"
    if not path.is_file() or line_of(path) is None:
        is_asked = arguments[:1] in ([], ["-h"], ["--help"])
        if not is_asked:
            print(f"no benchmark is named {arguments[0]!r}; there are", file=sys.stderr)
        known = benchmarks()
        width = max(map(len, known))
        print(*(f"{name:{width}}  {line}" for name, line in known.items()), sep="\n")
        return 0 if is_asked else 2
    stop_on_sigterm()
    options = parser_of(arguments[0]).parse_args(arguments[1:])
    return options.run(options, Report(arguments[0], options)) or 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
