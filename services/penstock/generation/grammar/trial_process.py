"""Child process that compiles constraints within time and memory limits, to find out whether they compile.

llguidance has limits of its own, but not on everything: a `multipleOf` of eight digits takes a minute, a large bounded
repetition takes gigabytes. A native call cannot be interrupted, and a Rust stack overflow ends a process. So the first
compilation of a source runs here, where it can be killed. A source that compiled here is then compiled in the service,
where it takes the same time and memory.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from penstock.common import child_io
from penstock.common.child_limits import limit_cpu, limit_memory
from penstock.generation.grammar.grammar_limits import JsonBounds
from penstock.generation.grammar.grammar_tokenizer import GrammarTokenizer
from penstock.generation.grammar.matching import is_too_complex, new_matcher, shorten
from penstock.generation.grammar.schemas.document import write_json
from penstock.generation.grammar.schemas.refusal import ONE_OF, describe
from penstock.generation.grammar.schemas.refused_part import MAX_SECONDS, find_refused_part
from penstock.generation.grammar.spec import ConstraintKind
from penstock.generation.grammar.translate import OPTIONS, Untranslatable, schemas_of, to_lark, tool_of

# Number of tokens of the walk that computes the first masks.
_WALK = 4
# Reasons in place of llguidance's, which name options of its own.
_REASONS = {
    "oneOf": ONE_OF,
    "patternProperties": "has patterns that may match the same key, or that are not regular expressions",
}
_BOUNDS = JsonBounds()


def answer_to(
    tokenizer: GrammarTokenizer, request: dict[str, Any], mask_seconds: float, bounds: JsonBounds = _BOUNDS
) -> dict[str, str]:
    """Return {lark, around} of a constraint that compiles, else {refused} or {too_complex} with a message."""
    try:
        return _answer_to(tokenizer, request, mask_seconds, bounds)
    except MemoryError:  # the limit, which the parent tells by the end of the process
        raise
    except Exception as error:  # unexpected text must not end the process
        return {"refused": f"is not supported: {type(error).__name__} while it was made simple"}


def _answer_to(
    tokenizer: GrammarTokenizer, request: dict[str, Any], mask_seconds: float, bounds: JsonBounds
) -> dict[str, str]:
    try:
        lark = to_lark(ConstraintKind(request["kind"]), request["text"], tuple(request["choices"]), bounds)
    except Untranslatable as error:
        return {"refused": str(error)}
    matcher = new_matcher(tokenizer, lark)
    # With escapes of JSON in both forms.
    source = " ".join((request["text"], lark, *request["choices"], _unescaped(request["text"])))
    if matcher.is_error():
        return _placed(_refusal(matcher, source), tokenizer, lark)
    wrong = _walk(matcher, tokenizer, mask_seconds, source)
    around = request.get("around", "")
    if around and wrong is None:
        try:
            around = to_lark(ConstraintKind.GRAMMAR, around, (), bounds)
        except Untranslatable as error:
            return {"refused": str(error)}
        outer = new_matcher(tokenizer, lark, around)
        source += f" {around}"
        if outer.is_error():
            return _placed(_refusal(outer, source), tokenizer, around)
        wrong = _walk(outer, tokenizer, mask_seconds, source)
    return wrong or {"lark": lark, "around": around}


def _walk(matcher: LLMatcher, tokenizer: GrammarTokenizer, mask_seconds: float, source: str) -> dict[str, str] | None:
    """Return the refusal of a matcher with wrong or slow masks along some first allowed tokens; None: it is good."""
    for _ in range(_WALK):
        # Processor time: on a busy machine a wait for the processor is not the constraint's fault.
        started = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return _refusal(matcher, source)
        if time.thread_time() - started > mask_seconds:
            return {"too_complex": "the tokens that it allows take too long to find"}
        allowed = mask & ((1 << tokenizer.vocab_size) - 1)
        if matcher.is_stopped() or not allowed:
            return None if mask else {"refused": "allows no output"}
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    return None


def _placed(refusal: dict[str, str], tokenizer: GrammarTokenizer, lark: str) -> dict[str, str]:
    """Return a refusal with the place of its cause, if that is in a schema."""

    def is_refused(text: str) -> bool:
        return new_matcher(tokenizer, f"start: %json {text}{OPTIONS}").is_error()

    if "refused" not in refusal:
        return refusal
    schemas = [schema for schema in schemas_of(lark) if isinstance(schema, dict)]
    until = time.thread_time() + MAX_SECONDS
    for schema in schemas:
        if time.thread_time() > until:
            break
        if (len(schemas) == 1 and lark.startswith("start: %json")) or is_refused(write_json(schema)):
            path, keyword = find_refused_part(schema, is_refused)
            return {"refused": tool_of(schema) + describe(path, keyword, _REASONS.get(keyword, refusal["refused"]))}
    return refusal


def _unescaped(text: str) -> str:
    """Return JSON text without its escapes; text of another kind as nothing."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return ""


def _refusal(matcher: LLMatcher, source: str) -> dict[str, str]:
    message = shorten(matcher.get_error(), source)
    if "NoExtensionBias" in (message, matcher.stop_reason()):
        return {"refused": "allows no output"}
    return {"too_complex" if is_too_complex(matcher) else "refused": message}


def main() -> None:
    answers = child_io.claim_stdout()
    settings = child_io.read(sys.stdin.buffer)
    tokenizer = GrammarTokenizer(Path(settings["folder"]), settings["vocab_size"])
    bounds = JsonBounds(**settings["json"])
    limit_memory(settings["memory_bytes"])
    # A process that the kernel or Rust ends leaves no core file of gigabytes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers.write(child_io.pack({"ready": True}))
    answers.flush()
    while True:
        try:
            request = child_io.read(sys.stdin.buffer)
        except EOFError:
            return
        # The parent's limit comes first: its answer gives the reason.
        limit_cpu(settings["cpu_seconds"] + 1)
        answers.write(child_io.pack(answer_to(tokenizer, request, settings["mask_seconds"], bounds)))
        answers.flush()


if __name__ == "__main__":
    main()
