"""The reference of the Python client and the Generator is what the code says, and has every name that they export."""

from __future__ import annotations

from pathlib import Path

import penstock_client
import pytest

from tools.python_reference import CLIENT_PAGE, GENERATOR_PAGE, PAGES, REFERENCE, Page, Part, page_text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_a_page_is_what_the_code_says(page: Page) -> None:
    """`python tools/python_reference.py` writes it."""
    assert (REFERENCE / page.file).read_text(encoding="utf-8") == page_text(page)


def test_every_exported_name_is_on_the_page_of_the_client() -> None:
    named = {name for part in CLIENT_PAGE.parts for name in part.names}
    # The half for asyncio is told of beside the other.
    twins = {name for name in penstock_client.__all__ if name.startswith("Async")}
    assert named == set(penstock_client.__all__) - twins
    assert all(f"`{twin}`" in page_text(CLIENT_PAGE) for twin in twins)


def test_public_methods_are_there_with_their_arguments() -> None:
    text = page_text(GENERATOR_PAGE)
    assert "#### `Generator.generate_many()`" in text
    assert "    max_in_flight: int | None = None,\n" in text
    assert "_start" not in text


def test_a_class_has_its_fields_methods_and_properties(tmp_path: Path) -> None:
    module = tmp_path / "shop.py"
    module.write_text(
        "class Shop(Place):\n"
        '    """A place that sells.\n\n    It <opens> at nine.\n\n    >>> Shop(name="a")\n    """\n\n'
        "    # Shown above\n    # the door.\n    name: str\n"
        "    kinds: str | None = None  # all where None\n    _hidden: int = 0\n\n"
        '    @property\n    def size(self) -> int:\n        """Number of rooms."""\n\n'
        '    async def sell(self, *what: str, price: float = 1.0, **more: int) -> None:\n        """Sell it."""\n\n'
        '    def _count(self) -> int:\n        """Count."""\n'
    )
    text = page_text(Page("shop.md", "Shop", "A shop.", (Part("All", module, ("Shop",), "What there is."),)))
    assert text.partition("## All\n\n")[2] == (
        "What there is.\n\n### `Shop`\n\n"
        'A place that sells.\n\nIt &lt;opens> at nine.\n\n```python\n>>> Shop(name="a")\n```\n\nBase: `Place`.\n\n'
        "| field | type | default | |\n|---|---|---|---|\n"
        "| `name` | `str` |  | Shown above the door. |\n| `kinds` | `str \\| None` | `None` | all where None |\n\n"
        "#### `Shop.size`\n\n`int`: Number of rooms.\n\n"
        "#### `Shop.sell()`\n\n"
        "```python\nasync def sell(*what: str, price: float = 1.0, **more: int) -> None\n```\n\nSell it.\n"
    )


def test_a_name_that_is_gone_is_an_error(tmp_path: Path) -> None:
    module = tmp_path / "empty.py"
    module.write_text("")
    with pytest.raises(KeyError, match="Gone"):
        page_text(Page("empty.md", "Empty", "", (Part("All", module, ("Gone",)),)))
