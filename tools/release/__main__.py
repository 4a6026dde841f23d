"""Make a release: `make release`, or python -m tools.release [--version X.Y.Z] [--final].

Artefacts are those of a commit that is made in a checkout of its own: the tree's last one, with the new version, the
closed section of the changelog and the new baseline of the protos. They are judged, listed in bills of materials, and
tried away from the repository (tests/e2e/test_release.py). Without --final nothing else happens, and the diff of the
commit is among the artefacts. With it the tree's branch moves on to the commit, and gets the tag. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tools.release import (
    advisories,
    bill_of_materials,
    chart_check,
    foreign_packages,
    images,
    provenance,
    python_packages,
    release_edits,
    version_places,
)
from tools.release.archive import write_archive
from tools.release.changelog import open_section
from tools.release.checkout import ReleaseCheckout, obstacle_to_final
from tools.release.environments import FreshEnvironment

ROOT = Path(__file__).resolve().parents[2]
CHART = "deploy/helm/penstock"
TRIAL = "tests/e2e/test_release.py"
SUMS, PROVENANCE, DIFF, NOTES, IMAGES = "SHA256SUMS", "provenance.json", "release.diff", "NOTES.md", "IMAGES"
# Files about the release: the others are artefacts, and each has a bill.
ABOUT = {SUMS, PROVENANCE, DIFF, NOTES, IMAGES}
# What --without leaves out.
PARTS = ("kernels", "packages", "images", "trial")


class ReleaseBuild:
    """One run: artefacts in `out`, and what was not made, with the reason."""

    def __init__(self, checkout: ReleaseCheckout, out: Path, version: str, without: set[str]) -> None:
        self._checkout, self._out, self._version, self._without = checkout, out, version, without
        self._seconds = checkout.commit_seconds
        self.not_made: dict[str, str] = {}
        # Known ones, of packages that an installation brings.
        self.weaknesses: list[str] = []

    def make_all(self) -> None:
        """Make, judge and list. Raises an exception of the step that fails, which has told why."""
        began = datetime.now(UTC)
        self._make_chart()
        self._make_foreign()
        # After what fails sooner: the kernels take minutes.
        packages = self._make_python()
        self._make_images()
        self._make_bills(packages)
        statement = provenance.statement(
            self._digests(),
            commit=self._checkout.commit,
            base=self._checkout.base,
            release=self._version,
            began=began,
            ended=datetime.now(UTC),
        )
        (self._out / PROVENANCE).write_text(json.dumps(statement, indent=2) + "\n", encoding="utf-8")
        sums = [f"{digest}  {name}\n" for name, digest in self._digests().items()]
        (self._out / SUMS).write_text("".join(sums), encoding="utf-8")

    def _make_python(self) -> list[Path]:
        made: list[Path] = []
        for name in python_packages.FOLDERS:
            if name == "penstock-kernels" and "kernels" in self._without:
                self.not_made[name] = "left out"
                continue
            _print_step(f"{name}: wheel and sdist")
            made += python_packages.build(name, self._checkout.folder, self._out, self._seconds)
        python_packages.check(made, self._checkout.folder)
        return made

    def _make_chart(self) -> None:
        _print_step("Helm chart")
        # What `helm package` makes, without helm: an archive of the chart's folder.
        chart = self._out / f"penstock-{self._version}.tgz"
        write_archive(chart, self._checkout.folder / CHART, "penstock", self._seconds)
        try:
            chart_check.check(chart)
        except chart_check.NotChecked as reason:
            self.not_made["check of the chart by helm"] = str(reason)

    def _make_foreign(self) -> None:
        for name in foreign_packages.NAMES:
            if name != foreign_packages.PROTOS and "packages" in self._without:
                self.not_made[name] = "left out"
                continue
            _print_step(f"{name}: package")
            try:
                foreign_packages.build(name, self._checkout.folder, self._out, self._version, self._seconds)
            except foreign_packages.NotMadeHere as reason:
                self.not_made[name] = str(reason).removeprefix(f"{name}: ")

    def _make_images(self) -> None:
        reason = "left out" if "images" in self._without else images.obstacle()
        if reason is not None:
            self.not_made["images"] = reason
            return
        images.take_wheels(ROOT, self._checkout.folder)
        lines = []
        for role in images.ROLES:
            _print_step(f"image of the {role}")
            lines.append(images.build(role, self._checkout.folder, self._version, self._checkout.commit))
        (self._out / IMAGES).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _make_bills(self, packages: list[Path]) -> None:
        """Write the bill of each artefact beside it."""
        wheels = {path.name.partition("-")[0].replace("_", "-"): path for path in packages if path.suffix == ".whl"}
        for artefact in sorted(path for path in self._out.iterdir() if path.name not in ABOUT):
            name = artefact.name.partition("-")[0].replace("_", "-")
            _print_step(f"bill of materials of {artefact.name}")
            if artefact in wheels.values():
                with tempfile.TemporaryDirectory() as folder:
                    place = FreshEnvironment(Path(folder, "environment"), self._out)
                    # The services' own: what `pip install 'penstock[all]'` brings.
                    extra = "[all]" if name == "penstock" and "penstock-kernels" in wheels else ""
                    place.install(f"{name}{extra}=={self._version}")
                    bill = bill_of_materials.bill_of_package(artefact, name, self._version, place.python)
                    if name == "penstock":
                        self._audit(place.installed())
            else:
                bill = bill_of_materials.bill_of_archive(artefact, name, self._version)
            bill_of_materials.check(bill)
            (self._out / f"{artefact.name}.cdx.json").write_text(bill, encoding="utf-8")

    def _audit(self, installed: dict[str, str]) -> None:
        try:
            self.weaknesses = advisories.known_weaknesses(installed)
        except advisories.NotAnswered as reason:
            self.not_made["search for known weaknesses"] = str(reason)

    def _digests(self) -> dict[str, str]:
        """SHA-256 of every file, by name."""
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(self._out.iterdir())}


def main() -> int:
    """Make a release; returns the exit code."""
    arguments = _arguments()
    out: Path = arguments.out.resolve()
    version: str = arguments.version or version_places.next_minor(version_places.read_version(ROOT))
    tag = f"v{version}"
    if arguments.final and (reason := obstacle_to_final(ROOT, tag)) is not None:
        return _refuse(f"--final: {reason}")
    if arguments.final and arguments.without:
        return _refuse("--final goes with no --without")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, ReleaseCheckout(ROOT, Path(folder, "penstock")) as checkout:
        _print_step(f"release {version} of {checkout.base[:12]}, in {out}")
        notes = open_section((checkout.folder / "CHANGELOG.md").read_text(encoding="utf-8"))
        if said := release_edits.breaks(checkout.folder):
            return _refuse(f"the protos break callers of the last release:\n{said}")
        release_edits.make(checkout.folder, version, datetime.now(UTC).date())
        (out / DIFF).write_text(checkout.make_commit(f"Release {version}") + "\n", encoding="utf-8")
        (out / NOTES).write_text(f"# Penstock {version}\n\n{notes}\n", encoding="utf-8")
        build = ReleaseBuild(checkout, out, version, set(arguments.without))
        build.make_all()
        _list(out)
        for what, reason in build.not_made.items():
            print(f"not made: {what}: {reason}")
        for weakness in build.weaknesses:
            print(f"known weakness: {weakness}")
        if arguments.final and build.weaknesses:
            return _refuse("packages that it brings have known weaknesses; nothing was committed")
        if "trial" not in arguments.without and (code := _try(out)) != 0:
            return _refuse(f"the trial of the artefacts failed ({code}); nothing was committed")
        if arguments.final:
            checkout.move_branch(tag, f"Penstock {version}")
            print(f"committed and tagged {tag}; upload the files of {out} once the commit and the tag are pushed")
        else:
            print(f"a dry run: nothing was committed; {out / DIFF} is what --final would commit and tag {tag}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", help="MAJOR.MINOR.PATCH; by default the next minor one")
    parser.add_argument("--final", action="store_true", help="commit, and tag the commit")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "release", help="emptied first")
    parser.add_argument("--without", nargs="*", default=[], choices=PARTS, help="leave parts out of a dry run")
    return parser.parse_args()


def _try(out: Path) -> int:
    _print_step("trial of the artefacts, away from the repository")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "release", TRIAL]
    environment = {**os.environ, "PENSTOCK_RELEASE": str(out)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _list(out: Path) -> None:
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path.name}")


def _print_step(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def _refuse(reason: str) -> int:
    print(f"no release: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
