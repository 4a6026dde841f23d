"""Files of large tokenizers as they were read: found by all that they were made from, and by nothing else."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from penstock.common.checkpoint import demo_folder
from penstock.common.child_io import Child
from penstock.tokenizer import bundle_cache
from penstock.tokenizer.bundle import TokenizerBundle
from penstock.tokenizer.bundle_cache import BundleCache
from penstock.tokenizer.load_bundle import load_bundle, load_in_child

BUNDLE = TokenizerBundle(
    backend='{"é": "\ud800\n"}' + " " * bundle_cache.SMALLEST,
    special_tokens={"eos_token": "</s>"},
    templates={"default": "{{ messages }}\n"},
    model_max_length=None,
    id_limit=7,
    generation_eos_token_ids=[1, 2],
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for path in demo_folder().glob("*token*"):
        shutil.copy(path, made)
    return made


@pytest.fixture
def cache(tmp_path: Path) -> BundleCache:
    return BundleCache(tmp_path / "cache" / "tokenizers", 2)


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in (tmp_path / "cache" / "tokenizers").iterdir())


def key_of(cache: BundleCache, folder: Path) -> str:
    key = cache.key(folder)
    assert key is not None
    return key


def test_a_bundle_comes_back_as_it_was(cache: BundleCache) -> None:
    assert cache.read("a") is None
    cache.write("a", BUNDLE)
    assert cache.read("a") == BUNDLE
    assert cache.read("b") is None


def test_a_small_one_is_not_kept(cache: BundleCache, tmp_path: Path) -> None:
    cache.write("a", TokenizerBundle(backend="{}", special_tokens={}, templates={}))
    assert not (tmp_path / "cache").exists()


def _add_template(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file's content": lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
    "a further file": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
    "a named template": _add_template,
    "one file less": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "a file's name": lambda folder: (folder / "tokenizer_config.json").rename(folder / "special_tokens_map.json"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_name_changes_with(cache: BundleCache, folder: Path, change: str) -> None:
    before = key_of(cache, folder)
    assert key_of(cache, folder) == before
    CHANGES[change](folder)
    assert key_of(cache, folder) != before


def test_the_name_changes_with_the_folders_and_with_releases(
    cache: BundleCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers knows some models by the name of their folder.
    before = key_of(cache, folder)
    other = folder.rename(folder.with_name("other"))
    assert key_of(cache, other) != before
    other.rename(folder)
    assert key_of(cache, folder) == before
    version = metadata.version
    for name in ("transformers", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setattr(metadata, "version", lambda one, name=name: version(one) + ".1" * (one == name))
            assert key_of(cache, folder) != before
    monkeypatch.setattr(bundle_cache, "__version__", "0.0.1")
    assert key_of(cache, folder) != before


def test_weights_are_not_read(cache: BundleCache, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(b"a")
    os.utime(weights, (1, 1))
    before = key_of(cache, folder)
    weights.write_bytes(b"b")
    os.utime(weights, (1, 1))
    assert key_of(cache, folder) == before
    os.utime(weights, (2, 2))
    assert key_of(cache, folder) != before


def test_large_files_are_weights(cache: BundleCache, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(cache, folder)
    monkeypatch.setattr(bundle_cache, "_LARGEST_HASHED", 100)
    large = key_of(cache, folder)
    assert large != before
    os.utime(folder / "tokenizer.json", (1, 1))
    assert key_of(cache, folder) != large


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


@pytest.mark.parametrize(
    "spoil", [_cut, _change, _link, lambda path: path.chmod(0o666), lambda path: path.write_text("")]
)
def test_a_spoiled_file_is_as_good_as_none(cache: BundleCache, tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    cache.write("a", BUNDLE)
    (path,) = (tmp_path / "cache" / "tokenizers").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    spoil(path)
    assert cache.read("a") is None


def test_a_renamed_file_is_as_good_as_none(cache: BundleCache, tmp_path: Path) -> None:
    cache.write("a", BUNDLE)
    (path,) = (tmp_path / "cache" / "tokenizers").iterdir()
    path.rename(path.with_name("b.tokenizer"))
    assert cache.read("b") is None


def test_a_pipe_is_not_waited_for(cache: BundleCache, tmp_path: Path) -> None:
    root = tmp_path / "cache" / "tokenizers"
    root.mkdir(parents=True)
    os.mkfifo(root / "a.tokenizer")
    assert cache.read("a") is None


def test_those_used_last_are_kept_and_remains_removed(cache: BundleCache, tmp_path: Path) -> None:
    root = tmp_path / "cache" / "tokenizers"
    for name, age in (("a", 300), ("b", 200)):
        cache.write(name, BUNDLE)
        then = time.time() - age
        os.utime(root / f"{name}.tokenizer", (then, then))
    (root / "tmpold").write_text("")
    os.utime(root / "tmpold", (1, 1))
    (root / "tmpnew").write_text("")
    assert cache.read("a") == BUNDLE
    cache.write("c", BUNDLE)
    assert kept(tmp_path) == ["a", "c", "tmpnew"]


def test_none_is_read_or_named_where_none_is_kept(tmp_path: Path, folder: Path) -> None:
    assert BundleCache(tmp_path, 0).key(folder) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = BundleCache(tmp_path / "file" / "tokenizers", 2)
    cache.write("a", BUNDLE)
    assert cache.read("a") is None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modules of the processes that are started."""
    spawn, names = Child.spawn, []

    async def noted(module: str, environment: dict[str, str]) -> Child:
        names.append(module.rpartition(".")[2])
        return await spawn(module, environment)

    monkeypatch.setattr(Child, "spawn", noted)
    # The demo model's is small.
    monkeypatch.setattr(bundle_cache, "SMALLEST", 1)
    return names


async def test_the_second_start_reads_no_tokenizer(cache: BundleCache, folder: Path, started: list[str]) -> None:
    first, child = await load_in_child(folder, timeout_seconds=120, cache=cache)
    await child.kill()
    second, child = await load_in_child(folder, timeout_seconds=120, cache=cache)
    await child.kill()
    assert second == first
    assert await load_bundle(folder, timeout_seconds=120, cache=cache) == first
    assert started == ["load_process", "template_process"]
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert (await load_bundle(folder, timeout_seconds=120, cache=cache)).templates != first.templates
    assert started[2:] == ["load_process"]


async def test_a_folder_that_changes_while_it_is_read_is_not_kept(
    cache: BundleCache, folder: Path, tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Child.ask

    async def change(child: Child, message: Any) -> Any:
        answer = await ask(child, message)
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        return answer

    monkeypatch.setattr(Child, "ask", change)
    await load_bundle(folder, timeout_seconds=120, cache=cache)
    assert not (tmp_path / "cache").exists()
