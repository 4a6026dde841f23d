"""The version of the release: its home is pyproject.toml, and other files repeat it.

    python -m tools.release.version_places [VERSION]

writes VERSION into all of them. Without VERSION it tells the version, and fails if a file has another one.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")
# Stands for the version in the text of a place.
_HERE = "@"


@dataclass(frozen=True, slots=True)
class VersionPlace:
    """A file that has the version, once or more often, and the text around it."""

    file: str
    text: str

    @property
    def _pattern(self) -> re.Pattern[str]:
        before, after = map(re.escape, self.text.split(_HERE))
        return re.compile(f"({before})({VERSION.pattern})(?={after})")

    def read(self, root: Path) -> set[str]:
        """Return the versions that the file has. Raises ValueError naming a file without one."""
        found = {match[2] for match in self._pattern.finditer((root / self.file).read_text(encoding="utf-8"))}
        if not found:
            raise ValueError(f"{self.file} has no version in {self.text!r}")
        return found

    def write(self, root: Path, version: str) -> None:
        """Put a version into the file."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(self._pattern.sub(rf"\g<1>{version}", text), encoding="utf-8")


HOME = VersionPlace("pyproject.toml", '\nversion = "@"')
# Formats that cannot read another file, and files that are read alone.
REPEATED = (
    VersionPlace("pyproject.toml", '"penstock-client==@"'),
    VersionPlace("pyproject.toml", '"penstock-kernels==@;'),
    VersionPlace("services/penstock/__init__.py", '__version__ = "@"'),
    VersionPlace("clients/python/pyproject.toml", '\nversion = "@"'),
    VersionPlace("kernels/pyproject.toml", '\nversion = "@"'),
    VersionPlace("kernels/pyproject.toml", '"penstock[generation]==@"'),
    VersionPlace("clients/node/package.json", '"version": "@"'),
    VersionPlace("clients/sdks/typescript/package.json", '"version": "@"'),
    VersionPlace("clients/sdks/java/pom.xml", "<artifactId>penstock-client</artifactId>\n  <version>@</version>"),
    VersionPlace("clients/sdks/ruby/penstock-client.gemspec", 'spec.version = "@"'),
    VersionPlace("clients/sdks/cpp/CMakeLists.txt", "VERSION @ LANGUAGES"),
    VersionPlace("deploy/docker/Dockerfile", "ARG VERSION=@"),
    VersionPlace("deploy/docker/Dockerfile.npu", "ARG VERSION=@"),
    VersionPlace("deploy/docker/check_stack.py", "'PENSTOCK_VERSION', '@'"),
    VersionPlace("docker-compose.yml", "PENSTOCK_VERSION:-@}"),
    VersionPlace("docker-compose.npu.yml", "PENSTOCK_VERSION:-@}"),
    VersionPlace("deploy/helm/penstock/Chart.yaml", "\nversion: @"),
    VersionPlace("deploy/helm/penstock/Chart.yaml", 'appVersion: "@"'),
    VersionPlace("deploy/kserve/runtimes.yaml", "penstock/penstock-stack:@"),
    VersionPlace("docs/guide/kubernetes-platforms.md", "penstock/penstock-stack:@"),
    VersionPlace("deploy/kustomize/base/penstock.yaml", 'app.kubernetes.io/version: "@"'),
    *(
        VersionPlace("deploy/kustomize/base/penstock.yaml", f"image: penstock-{role}:@")
        for role in ("tokenizer", "generation", "router", "gateway")
    ),
    VersionPlace("docs/guide/deployment.md", "penstock-router:@"),
    VersionPlace("docs/reference/openapi.json", '"version": "@"'),
)
PLACES = (HOME, *REPEATED)


def read_version(root: Path = ROOT) -> str:
    """Return the version. Raises ValueError naming a file that has another one, or none."""
    (version,) = HOME.read(root)
    for place in REPEATED:
        if (others := place.read(root) - {version}) != set():
            raise ValueError(f"{place.file} has {', '.join(sorted(others))}, and {HOME.file} {version}")
    return version


def write_version(root: Path, version: str) -> None:
    """Put a version into every place. Raises ValueError for one that is not MAJOR.MINOR.PATCH."""
    if VERSION.fullmatch(version) is None:
        raise ValueError(f"a version is MAJOR.MINOR.PATCH, and {version!r} is not")
    for place in PLACES:
        place.write(root, version)


def next_minor(version: str) -> str:
    """Return the version of the next release that adds something: 1.3.0 after 1.2.4."""
    major, minor, _ = version.split(".")
    return f"{major}.{int(minor) + 1}.0"


def main(arguments: list[str]) -> int:
    """Write or tell the version; returns the exit code."""
    try:
        if arguments:
            write_version(ROOT, arguments[0])
        print(read_version())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
