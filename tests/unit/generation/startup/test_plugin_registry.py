"""Loading of the server owner's plugins: what cannot be loaded names its flag."""

from __future__ import annotations

import pytest
from factories.engine.plugins import FLAGS
from penstock.common.errors import StartupError
from penstock.generation.options.table import RequestOptions
from penstock.generation.startup.plugin_registry import load_plugins

PLACE = "factories.engine.plugins"


def test_all_are_loaded_by_their_names() -> None:
    found = load_plugins(FLAGS["logits_processor"], FLAGS["stopping_criteria"])
    assert set(found.criteria) == {"multiple", "raising", "exiting"}
    assert found.processors["favour"].__name__ == "Favour"
    assert found.make(RequestOptions()) is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("favour", "expected NAME=MODULE:CLASS"),
        (f"favour={PLACE}", "expected NAME=MODULE:CLASS"),
        (f"a name={PLACE}:Favour", "expected NAME=MODULE:CLASS"),
        ("favour=no_such_module_here:Favour", "ModuleNotFoundError.*PYTHONPATH"),
        (f"favour={PLACE}:Favor", "AttributeError"),
        (f"favour={PLACE}:FLAGS", "FLAGS is no class"),
    ],
)
def test_what_cannot_be_loaded_names_its_flag(text: str, cause: str) -> None:
    with pytest.raises(StartupError, match=cause) as refused:
        load_plugins((text,), ())
    assert refused.value.flag == "--logits-processor"
    with pytest.raises(StartupError, match=cause) as refused:
        load_plugins((), (text,))
    assert refused.value.flag == "--stopping-criteria"


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(StartupError, match="twice"):
        load_plugins((f"a={PLACE}:Favour", f"a={PLACE}:Huge"), ())
