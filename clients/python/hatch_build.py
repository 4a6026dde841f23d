"""Files of the wheel penstock-client from other places in the repository: stubs, modules shared with them, protos.

The wheel `penstock` has none of these and depends on this one, so every file has one owner. In the client alone there
is no `penstock/__init__.py`: `penstock` is a namespace package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
# Modules of the services that the client needs: path below `services` and in the wheel.
SHARED = (
    "penstock/v1",
    "penstock/common/environment.py",
    "penstock/common/errors.py",
    "penstock/common/hf_fields.py",
    "penstock/common/proxies.py",
    "penstock/common/request_context.py",
    "penstock/common/shown_url.py",
    "penstock/common/units.py",
)
# Path in the repository -> in the wheel.
PROTOS = {
    "protos/penstock/v1": "penstock_client/protos/penstock/v1",
    "protos/penstock.binpb": "penstock_client/protos/penstock.binpb",
}


class SharedFiles(BuildHookInterface[Any]):
    """Adds the files, from the repository or from a source distribution, where they lie as in the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name them to the builder, except for an editable install, which finds them by path."""
        if version == "editable":
            return
        if not (REPOSITORY / "services" / SHARED[0]).is_dir():
            # In a source distribution the protos are in the package's own folder.
            build_data["force_include"].update({str(HERE / path): path for path in SHARED})
            return
        for here, there in {**{f"services/{path}": path for path in SHARED}, **PROTOS}.items():
            build_data["force_include"][str(REPOSITORY / here)] = there
