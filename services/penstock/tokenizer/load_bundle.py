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
from penstock.tokenizer.bundle_cache import BundleCache

MODEL_FLAG = "MODEL"
_SMALL_JSON_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_JSON_FILES = ("tokenizer.json", *_SMALL_JSON_FILES)
# transformers can build a tokenizer from any of these files.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


async def load_bundle(folder: Path, *, timeout_seconds: float, cache: BundleCache | None = None) -> TokenizerBundle:
    """Load the bundle, or find it in the cache. Raises StartupError naming the file and MODEL."""
    check_folder(folder, whole=False)
    key, found = await asyncio.to_thread(_look_for, folder, cache)
    if found is not None:
        return found
    bundle, child = await _load(folder, timeout_seconds)
    await child.kill()
    await asyncio.to_thread(_keep, folder, cache, key, bundle)
    return bundle


async def load_in_child(
    folder: Path, *, timeout_seconds: float, cache: BundleCache | None = None
) -> tuple[TokenizerBundle, Child]:
    """Load the bundle, or find it in the cache, and return a child that can continue as a template process, or must be
    killed: the one that has loaded it, or a new one.

    Raises StartupError naming the file and MODEL.
    """
    check_folder(folder, whole=False)
    key, found = await asyncio.to_thread(_look_for, folder, cache)
    if found is not None:
        return found, await Child.spawn("penstock.tokenizer.template_process", child_environment())
    bundle, child = await _load(folder, timeout_seconds)
    try:
        await asyncio.to_thread(_keep, folder, cache, key, bundle)
    except BaseException:
        await child.kill()
        raise
    return bundle, child


async def _load(folder: Path, timeout_seconds: float) -> tuple[TokenizerBundle, Child]:
    child = await Child.spawn("penstock.tokenizer.load_process", child_environment())
    try:
        return await _ask(child, folder, timeout_seconds), child
    except BaseException:
        await child.kill()
        raise


def _look_for(folder: Path, cache: BundleCache | None) -> tuple[str | None, TokenizerBundle | None]:
    key = None if cache is None else cache.key(folder)
    return key, None if cache is None or key is None else cache.read(key)


def _keep(folder: Path, cache: BundleCache | None, key: str | None, bundle: TokenizerBundle) -> None:
    """Keep the bundle, unless the folder has changed while it was read."""
    if cache is not None and key is not None and cache.key(folder) == key:
        cache.write(key, bundle)


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
