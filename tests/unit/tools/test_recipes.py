"""Recipes of well-known models: the page says what their configurations need, and these have the published sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.recipes import HEAD, TARGET, needs_of, recipes, row_of

RECIPES = recipes()
PAGE = TARGET.read_text(encoding="utf-8")


def test_the_page_has_the_twenty_in_order_of_size() -> None:
    lines = PAGE.partition(HEAD)[2].partition("\n\n")[0].splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == [name.partition("/")[2] for name in RECIPES]
    sizes = [recipe["parameters"] for recipe in RECIPES.values()]
    assert len(sizes) == 20
    assert sizes == sorted(sizes)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_as_the_page_says(name: str, tmp_path: Path) -> None:
    needs = needs_of(RECIPES[name], tmp_path)
    assert needs.parameters == RECIPES[name]["parameters"], "not the published number of weights"
    assert row_of(name, RECIPES[name], needs) in PAGE
