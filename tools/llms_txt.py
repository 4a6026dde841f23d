"""Write docs/llms.txt, the list of the site's pages for language models: python tools/llms_txt.py.

A page is a line: its title, and the first sentence of its first paragraph. The order is that of mkdocs.yml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS, NAVIGATION = ROOT / "docs", ROOT / "mkdocs.yml"
OUTPUT = DOCS / "llms.txt"
_CODE = re.compile(r"^```.*?^```[^\n]*$|^ {4}[^\n]*$", re.MULTILINE | re.DOTALL)
_FUNCTION = re.compile(r"!!python/\S+")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_SENTENCE = re.compile(r"(.+?[.:!?])(?=\s|$)")


def pages(entries: list[Any], heading: str = "") -> Iterator[tuple[str, str]]:
    """Yield (heading, page's path) of each entry of a navigation, in order; inner headings belong to the outer one."""
    for entry in entries:
        if isinstance(entry, str):
            yield heading, entry
            continue
        for name, inner in entry.items():
            yield from pages(inner if isinstance(inner, list) else [inner], heading or name)


def summary(text: str) -> tuple[str, str]:
    """Return a page's title and its first sentence, without links. Raises ValueError for a page without a title."""
    first, _, rest = text.lstrip().partition("\n")
    if not first.startswith("# "):
        raise ValueError("a page begins with its title")
    parts = _CODE.sub("", rest).split("\n\n")
    prose = next((part for part in parts if part.strip() and part.strip()[0] not in "#|*<!"), "")
    plain = " ".join(_LINK.sub(r"\1", prose).split())
    sentence = _SENTENCE.match(plain)
    return first.removeprefix("# ").strip(), (sentence[1] if sentence else plain).rstrip(":")


def address(page: str) -> str:
    """Address of a page on the site, from its root."""
    bare = page.removesuffix(".md").removesuffix("index")
    return f"{bare.rstrip('/')}/" if bare else "./"


def listing() -> str:
    """Make the file's text."""
    # Without the functions of extensions that mkdocs.yml names.
    config = yaml.safe_load(_FUNCTION.sub("", NAVIGATION.read_text(encoding="utf-8")))
    home, *others = pages(config["nav"])
    title, about = summary((DOCS / home[1]).read_text(encoding="utf-8"))
    lines, heading = [f"# {title}", "", f"> {about}"], ""
    for own, page in others:
        if own != heading:
            heading = own
            lines += ["", f"## {heading}", ""]
        name, text = summary((DOCS / page).read_text(encoding="utf-8"))
        lines.append(f"- [{name}]({address(page)}): {text}" if text else f"- [{name}]({address(page)})")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the list."""
    OUTPUT.write_text(listing(), encoding="utf-8")


if __name__ == "__main__":
    main()
