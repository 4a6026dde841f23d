"""The catalogue of `penstock serve --models`: a folder or a file, and the router's file that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.cli.serve.model_catalogue import read_catalogue, to_toml, with_addresses
from penstock.common.errors import StartupError
from penstock.router.models_file import ModelEntry, read_models

KV_BYTES = 1000


def model(root: Path, name: str, weights: int = 10) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "config.json").write_text("{}")
    (root / name / "model.safetensors").write_bytes(b"x" * weights)


def test_each_folder_of_a_folder_is_a_model(tmp_path: Path) -> None:
    model(tmp_path, "b")
    model(tmp_path, "a", weights=20)
    (tmp_path / "notes").mkdir()
    found = read_catalogue(str(tmp_path), 8, KV_BYTES)
    assert found.root == tmp_path
    assert found.file.models == (
        ModelEntry(name="a", tokenizer=(), path="a", memory=1020),
        ModelEntry(name="b", tokenizer=(), path="b", memory=1010),
    )


def test_a_file_names_models_and_the_router_reads_what_is_made_of_it(tmp_path: Path) -> None:
    model(tmp_path, "a")
    model(tmp_path, "deep/b")
    path = tmp_path / "models.toml"
    path.write_text(
        'default = "x"\nmemory = "1GiB"\n[[models]]\nname = "a"\npath = "a"\naliases = ["x"]\n'
        '[[models]]\nname = "b"\npath = "deep/b"\nmemory = 7\nweight = 2\noptions = {dtype = "float32"}\n'
    )
    local = read_catalogue(str(path), 8, KV_BYTES)
    wired = with_addresses(local.file, ["t:1", "t:2"], ["s:1"], 0)
    made = tmp_path / "made.toml"
    made.write_text(to_toml(wired))
    read = read_models(str(made), 8)
    assert read == wired
    assert [(one.tokenizer, one.memory) for one in read.models] == [(("t:1",), 1010), (("t:2",), 7)]
    assert (read.slots, read.memory, read.default) == (("s:1",), 1 << 30, "x")
    assert with_addresses(local.file, ["t:1", "t:2"], ["s:1"], 5000).memory == 5000


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ('path = "../a"', "a: no folder ../a"),
        ('path = "none"', "a: no folder none"),
        ('tokenizer = ["t:1"]', "path: is needed here"),
    ],
)
def test_a_model_that_is_not_below_the_file_is_refused(tmp_path: Path, entry: str, told: str) -> None:
    model(tmp_path, "a")
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner" / "models.toml"
    path.write_text(f'[[models]]\nname = "a"\n{entry}\n')
    with pytest.raises(StartupError, match=told) as refused:
        read_catalogue(str(path), 8, KV_BYTES)
    assert refused.value.flag == "--models"


def test_a_folder_without_models_and_one_with_too_many_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no folder in it has a config\.json"):
        read_catalogue(str(tmp_path), 8, KV_BYTES)
    model(tmp_path, "a")
    with pytest.raises(StartupError, match="--max-models allows 0"):
        read_catalogue(str(tmp_path), 0, KV_BYTES)
