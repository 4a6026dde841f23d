"""Outside engine/decoding/ nobody asks which decoding mode a request is in: facts of the mode tell what to do."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

GENERATION = Path(__file__).resolve().parents[4] / "services" / "penstock" / "generation"
DECODING = GENERATION / "engine" / "decoding"
# Makes the options of a mode of what a caller asked for.
MAKER = GENERATION / "options" / "mode_options.py"
# Where a SamplingParams, or what becomes of one, keeps its mode.
MODE_FIELDS = {"mode", "generation_mode"}


@functools.cache
def mode_classes() -> frozenset[str]:
    """Names of the modes' options and strategies."""
    trees = [ast.parse(path.read_text()) for path in DECODING.glob("*.py")]
    found = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    return frozenset(found - {"ModeRegistry", "ModeSpec", "Decision", "DecodingStrategy"})


@functools.cache
def own_options() -> frozenset[str]:
    """Names of the options that some mode has, and others have not."""
    trees = [ast.parse(path.read_text()) for path in DECODING.glob("*.py")]
    modes = [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef) and "DecodingMode" in map(ast.unparse, node.bases)
    ]
    return frozenset(
        line.target.id
        for mode in modes
        for line in mode.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def is_mode(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and (
        node.attr in MODE_FIELDS or (node.attr == "guidance" and "params" in ast.unparse(node.value))
    )


def is_mode_or_local(node: ast.AST) -> bool:
    return is_mode(node) or (isinstance(node, ast.Name) and node.id in MODE_FIELDS)


def is_own_option(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in own_options()


def is_name_of_a_mode(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "GenerationMode"


def questions(source: str, classes: frozenset[str], *, may_make: bool = False) -> Iterator[str]:
    """Expressions of `source` that ask for a mode."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                asked = any(map(is_mode, operands)) or any(map(is_name_of_a_mode, operands))
            case ast.Match():
                asked = is_mode(node.subject)
            case ast.If() | ast.IfExp() | ast.While():
                asked = is_mode(node.test)
            case ast.BoolOp():
                asked = any(map(is_mode, node.values))
            case ast.Call(func=ast.Name(id="isinstance" | "type" | "getattr" | "hasattr")):
                # Whatever it is called, an object that is asked for a mode's option is a mode's.
                asked = any(is_mode_or_local(one) or is_own_option(one) for one in node.args) or not classes.isdisjoint(
                    one.id for argument in node.args for one in ast.walk(argument) if isinstance(one, ast.Name)
                )
            case ast.ImportFrom():
                asked = not may_make and not classes.isdisjoint(alias.name for alias in node.names)
            case ast.Attribute():
                old = {"beams", "contrastive", "assistance", "dola"}
                is_old = node.attr in old and ast.unparse(node.value).split(".")[-1] in ("params", "modes")
                # A class that is reached by its module; messages of protos and torch's modules have names of their own.
                owner = ast.unparse(node.value)
                asked = is_old or (node.attr in classes and not may_make and not owner.endswith(("_pb2", "nn")))
            case _:
                asked = False
        if asked:
            yield ast.unparse(node).splitlines()[0]


def test_nobody_outside_decoding_asks_which_mode_a_request_is_in() -> None:
    classes = mode_classes()
    assert {"BeamOptions", "DolaOptions", "BeamSearch"} <= classes
    assert {"num_beams", "penalty_alpha"} <= own_options()
    found = {
        path.relative_to(GENERATION).as_posix(): asked
        for path in sorted(GENERATION.rglob("*.py"))
        if path.parent != DECODING and (asked := list(questions(path.read_text(), classes, may_make=path == MAKER)))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "x = sequence.params.mode is PLAIN",
        "x = params.generation_mode == GenerationMode.BEAM_SEARCH",
        "x = kind is GenerationMode.SAMPLE",
        "x = isinstance(request.params.mode, DecodingMode)",
        "x = isinstance(options, BeamOptions)",
        "x = type(params.mode)",
        "x = params.beams is not None",
        "x = self.params.contrastive",
        "x = params.guidance is not None",
        "if params.mode: pass",
        "match params.mode:\n    case _: pass",
        "from penstock.generation.engine.decoding.beam_options import BeamOptions",
        "x = getattr(params.mode, 'num_beams', 1)",
        "import penstock.generation.engine.decoding.beam_options as b\nx = isinstance(mode, b.BeamOptions)",
        "from penstock.generation.engine.decoding import beam_options\nx = beam_options.BeamOptions",
        "x = hasattr(mode, 'num_beams')",
        "x = getattr(anything, 'penalty_alpha', None)",
    ],
)
def test_a_question_is_seen(source: str) -> None:
    assert list(questions(source, mode_classes()))


@pytest.mark.parametrize(
    "source", ["x = params.mode.streams", "x = params.guidance.is_on", "if params.mode.keeps_hidden_states: pass"]
)
def test_a_fact_is_no_question(source: str) -> None:
    assert not list(questions(source, mode_classes()))
