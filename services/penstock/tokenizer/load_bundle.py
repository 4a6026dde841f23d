"""Loader of a model folder as a TokenizerBundle, or one clear line about its fault."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

from penstock.common.child_io import Child, ChildEnded
from penstock.common.environment import child_environment
from penstock.common.errors import StartupError
from penstock.tokenizer.bundle import TokenizerBundle

MODEL_FLAG = "MODEL"
_SMALL_JSON_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_JSON_FILES = ("tokenizer.json", *_SMALL_JSON_FILES)
# transformers can build a tokenizer from any of these files.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


async def load_bundle(folder: Path, *, timeout_seconds: float) -> TokenizerBundle:
    """Load the bundle. Raises StartupError naming the file and MODEL."""
    bundle, child = await load_in_child(folder, timeout_seconds=timeout_seconds)
    await child.kill()
    return bundle


async def load_in_child(folder: Path, *, timeout_seconds: float) -> tuple[TokenizerBundle, Child]:
    """Load the bundle, and return the child that did: it can continue as a template process, or must be killed.

    Raises StartupError naming the file and MODEL.
    """
    check_folder(folder, whole=False)
    child = await Child.spawn("penstock.tokenizer.load_process", child_environment())
    try:
        return await _ask(child, folder, timeout_seconds), child
    except BaseException:
        await child.kill()
        raise


async def _ask(child: Child, folder: Path, timeout_seconds: float) -> TokenizerBundle:
    try:
        async with asyncio.timeout(timeout_seconds):
            answer = await child.ask({"folder": str(folder)})
    except TimeoutError:
        raise _broken(folder, f"it did not load within {timeout_seconds:g} s") from None
    except ChildEnded as error:
        raise _broken(folder, f"the loading process ended with status {child.returncode}") from error
    if "error" in answer:
        # Perhaps with a clearer line.
        check_folder(folder)
        raise _broken(folder, answer["error"])
    return TokenizerBundle(**answer["bundle"])


def check_folder(folder: Path, *, whole: bool = True) -> None:
    """Check the folder as far as possible without transformers. Raises StartupError naming the file and MODEL.

    `whole` False: do not parse tokenizer.json, which may be large and which transformers parses anyway.
    """
    if not folder.is_dir():
        raise StartupError(f"{folder} is not a folder; {MODEL_FLAG} names a model folder", flag=MODEL_FLAG)
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise StartupError(f"{folder} has no tokenizer: tokenizer.json is missing; check {MODEL_FLAG}", flag=MODEL_FLAG)
    for name in _JSON_FILES if whole else _SMALL_JSON_FILES:
        _check_json(folder / name)
    for path in [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]:
        if path.is_file():
            _check_text(path)


def _check_json(path: Path) -> None:
    if not path.is_file():
        return
    text = _check_text(path)
    value: object = None
    # RecursionError: nested deeper than any tokenizer.
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object; check {MODEL_FLAG}", flag=MODEL_FLAG)


def _check_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(
            f"{path} cannot be read ({type(error).__name__}); check {MODEL_FLAG}", flag=MODEL_FLAG
        ) from error


def _broken(folder: Path, why: str) -> StartupError:
    path = folder / "tokenizer.json"
    first_line = why.strip().partition("\n")[0][:300]
    return StartupError(
        f"{path if path.is_file() else folder}: the tokenizer cannot be loaded: {first_line}; check {MODEL_FLAG}",
        flag=MODEL_FLAG,
    )
