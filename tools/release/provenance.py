"""The statement about how artefacts were made: in-toto's form (Statement v1) with SLSA's predicate (Provenance v1).

https://slsa.dev/spec/v1.0/provenance says what the fields mean. Nobody signs it: it says what to compare, and no more.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from typing import Any

REPOSITORY = "https://github.com/penstock/penstock"
BUILD_TYPE = f"{REPOSITORY}/blob/main/docs/learn/release.md"
# Packages that decide about the bytes of artefacts.
_BUILDERS = ("hatchling", "torch", "cyclonedx-bom")


def statement(
    digests: Mapping[str, str], *, commit: str, base: str, release: str, began: datetime, ended: datetime
) -> dict[str, Any]:
    """Make the statement about artefacts.

    digests: file -> SHA-256 in hexadecimal. commit: of the release, which is `base` and the release's own changes.
    began, ended: with a time zone.
    """
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(digests.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"repository": REPOSITORY, "base": base, "version": release},
                "internalParameters": {
                    "python": platform.python_version(),
                    "platform": f"{sys.platform}-{platform.machine()}",
                    "packages": {name: version(name) for name in _BUILDERS},
                },
                "resolvedDependencies": [{"uri": f"git+{REPOSITORY}", "digest": {"gitCommit": commit}}],
            },
            "runDetails": {
                "builder": {"id": f"{REPOSITORY}/tree/main/tools/release"},
                "metadata": {
                    "invocationId": commit,
                    "startedOn": _time(began),
                    "finishedOn": _time(ended),
                },
            },
        },
    }


def _time(moment: datetime) -> str:
    """Format a time as RFC 3339 has it, in UTC."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
