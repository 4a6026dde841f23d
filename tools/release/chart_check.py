"""Check of the Helm chart's archive by helm, which is fetched where it is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.get_helm import NoHelm, find_helm, get_helm


class NotChecked(Exception):
    """There is no helm; the text tells why."""


def check(chart: Path) -> None:
    """Lint and render an archive with its default values. Raises NotChecked, or subprocess.CalledProcessError."""
    try:
        helm = find_helm() or str(get_helm(Path(sys.executable).parent))
    except NoHelm as reason:
        raise NotChecked(str(reason)) from None
    for command in (["lint", "--quiet", "--strict"], ["template", "demo"]):
        # What it complains of stands on standard output, beside the documents.
        done = subprocess.run([helm, *command, str(chart)], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stdout)
            done.check_returncode()
