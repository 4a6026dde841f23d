"""The gem of a release."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from tools import make_sdks
from tools.release import foreign_packages

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("gem", "grpc_tools_ruby_protoc")


@pytest.mark.skipif(any(shutil.which(name) is None for name in TOOLS), reason="no ruby with gRPC's compiler")
def test_a_release_has_a_gem_that_is_the_same_when_it_is_built_again(tmp_path: Path) -> None:
    built = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        try:
            files = foreign_packages.build("ruby", ROOT, folder, make_sdks.version(), 1_764_547_200)
        except foreign_packages.NotMadeHere as reason:
            pytest.skip(str(reason))
        (gem,) = [path for path in files if path.suffix == ".gem"]
        built.append(gem.read_bytes())
    assert built[0] == built[1]
    with tarfile.open(gem) as outer, tarfile.open(fileobj=outer.extractfile("data.tar.gz")) as data:
        assert "lib/penstock/v1/text_services_pb.rb" in data.getnames()
