"""Changes that a release makes: the version everywhere, the changelog's section, the baseline of the protos."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from datetime import date
from pathlib import Path

import pytest
from factories.source_tree import ROOT

from tools.release import release_edits, version_places
from tools.release.changelog import close_section, open_section
from tools.release.version_places import PLACES, next_minor, read_version, write_version

LOG = "# Changes\n\n## Unreleased\n\n- One.\n\n## 0.1.0\n\n- Old.\n"
# Files that keep the version of then.
PAST = ("CHANGELOG.md", "dev/log/", "protos/release/")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files with the version, the protos and the changelog, elsewhere."""
    for name in {place.file for place in PLACES} | {"CHANGELOG.md"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    return tmp_path


def test_every_file_has_the_version_of_pyproject() -> None:
    assert read_version() == version_places.HOME.read(ROOT).pop()


def test_a_file_with_another_version_is_named(copy: Path) -> None:
    chart = copy / "deploy/helm/penstock/Chart.yaml"
    chart.write_text(chart.read_text().replace('appVersion: "', 'appVersion: "7'))
    with pytest.raises(ValueError, match=r"deploy/helm/penstock/Chart\.yaml has 7"):
        read_version(copy)


def test_a_file_that_lost_its_version_is_named(copy: Path) -> None:
    (copy / "kernels/pyproject.toml").write_text("[project]\n")
    with pytest.raises(ValueError, match=r"kernels/pyproject\.toml has no version"):
        read_version(copy)


def test_no_other_file_has_the_version() -> None:
    """A new one would be forgotten by the next release: it belongs into the table."""
    command = ["git", "grep", "-I", "--name-only", "--fixed-strings", "--word-regexp", read_version()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        pytest.skip("no git repository")
    found = {name for name in done.stdout.split() if not name.startswith((*PAST, "tests/"))}
    assert found - {place.file for place in PLACES} == set()


def test_a_release_changes_all_of_them(copy: Path) -> None:
    release_edits.make(copy, "7.8.9", date(2026, 12, 1))
    assert read_version(copy) == "7.8.9"
    old = read_version()
    assert not [place.file for place in PLACES if f'"{old}"' in (copy / place.file).read_text()]
    assert [path.name for path in (copy / "protos" / "release").iterdir()] == ["penstock-7.8.9.binpb"]
    assert "## Unreleased\n\n## 7.8.9 (2026-12-01)\n" in (copy / "CHANGELOG.md").read_text()
    # And the baseline is one that nothing breaks.
    assert release_edits.breaks(copy) == ""


def test_protos_that_break_callers_are_told(copy: Path) -> None:
    text = copy / "protos" / "penstock" / "v1" / "text.proto"
    text.write_text(text.read_text().replace("rpc ListModels(", "rpc ListAll("))
    assert 'RPC "ListModels"' in release_edits.breaks(copy)


@pytest.mark.parametrize("version", ["1", "1.2", "v1.2.3", "1.2.3rc1", "1.2.3\n"])
def test_a_version_has_three_numbers(copy: Path, version: str) -> None:
    with pytest.raises(ValueError, match=r"MAJOR\.MINOR\.PATCH"):
        write_version(copy, version)
    assert read_version(copy) == read_version()


def test_the_next_minor_version_begins_at_zero() -> None:
    assert next_minor("1.9.4") == "1.10.0"


def test_the_section_of_the_next_release_ends_at_the_last_one() -> None:
    assert open_section(LOG) == "- One."
    closed = close_section(LOG, "0.2.0", date(2026, 12, 1))
    assert closed == LOG.replace("## Unreleased\n", "## Unreleased\n\n## 0.2.0 (2026-12-01)\n")


@pytest.mark.parametrize("text", ["# Changes\n\n## 0.1.0\n", close_section(LOG, "0.2.0", date(2026, 12, 1))])
def test_without_changes_there_is_nothing_to_release(text: str) -> None:
    with pytest.raises(ValueError, match="there is nothing to release"):
        close_section(text, "0.3.0", date(2026, 12, 1))


def test_links_of_the_wheels_page_work_away_from_the_repository() -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = "[a](docs/a.md) [b](docs/b.md#c) [d](#d) [e](https://e.example) ![f](f.png)"
    assert hook.absolute_links(page, "https://x/") == (
        "[a](https://x/docs/a.md) [b](https://x/docs/b.md#c) [d](#d) [e](https://e.example) ![f](https://x/f.png)"
    )
