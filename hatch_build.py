"""The page of the wheel penstock: README.md, with links that work away from the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Of a link's target: no address, no place on the page itself.
_RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")


class Readme(MetadataHookInterface):
    """Gives the text to the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add it, with the links of this version."""
        files = f"{metadata['urls']['Homepage']}/blob/v{metadata['version']}/"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, files)}


def absolute_links(text: str, files: str) -> str:
    """Return a page with `files`, an address, in front of the links to the repository's files."""
    return _RELATIVE_LINK.sub(rf"]({files}\1)", text)
