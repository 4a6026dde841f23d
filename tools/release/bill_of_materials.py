"""Bills of materials in CycloneDX's JSON (version 1.6), one for each artefact.

A package's lists what an installation of it brought, package by package; an archive's lists its files.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

LICENSE = "Apache-2.0"


def bill_of_package(artefact: Path, name: str, version: str, python: Path) -> str:
    """Return the bill of a Python package: what the environment of `python` has, where it was installed."""
    command = [str(Path(sys.executable).with_name("cyclonedx-py")), "environment", "--output-reproducible"]
    done = subprocess.run([*command, "--of", "JSON", str(python)], capture_output=True, text=True, check=True)
    bom = Bom.from_json(json.loads(done.stdout))  # type: ignore[attr-defined]  # made by a decorator
    component = next(component for component in bom.components if component.name == name)
    bom.components.remove(component)
    component.hashes.add(_digest(artefact.read_bytes()))
    bom.metadata.component = component
    return _written(bom)


def bill_of_archive(artefact: Path, name: str, version: str) -> str:
    """Return the bill of an archive: its files with their digests."""
    bom = Bom()
    bom.metadata.component = Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        licenses=[LicenseExpression(LICENSE)],
        bom_ref=artefact.name,
        hashes=[_digest(artefact.read_bytes())],
        components=[
            Component(name=path, type=ComponentType.FILE, hashes=[_digest(content)], bom_ref=path)
            for path, content in _files(artefact)
        ],
    )
    return _written(bom)


def check(text: str) -> None:
    """Hold a bill to CycloneDX's schema. Raises ValueError."""
    if (error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise ValueError(f"the bill of materials is not CycloneDX: {error}")


def _digest(content: bytes) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(content).hexdigest())


def _files(artefact: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the paths and contents in an archive; of another file, itself."""
    if artefact.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(artefact) as archive:
            yield from ((name, archive.read(name)) for name in sorted(archive.namelist()))
    elif artefact.name.endswith((".tar.gz", ".tgz")):
        with tarfile.open(artefact) as packed:
            for member in packed.getmembers():
                if (content := packed.extractfile(member)) is not None:
                    yield member.name, content.read()
    else:
        yield artefact.name, artefact.read_bytes()


def _written(bom: Bom) -> str:
    """Return it as JSON, without the time and the random number: the bill of the same artefact is the same."""
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    document.pop("serialNumber", None)
    document["metadata"].pop("timestamp", None)
    return json.dumps(document, indent=2) + "\n"
