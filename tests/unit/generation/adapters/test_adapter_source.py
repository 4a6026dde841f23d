"""Places of adapters in stores: those that an operator allows, and no other."""

from __future__ import annotations

import pytest
from penstock.common.errors import InvalidArgument, StartupError
from penstock.generation.adapters.adapter_source import AllowedStores

STORES = AllowedStores(("hub://me", "s3://team-adapters/prod", "s3://whole.bucket"))


@pytest.mark.parametrize(
    "text",
    [
        "hub://me/legal",
        "hub://me/legal@v1.2",
        "s3://team-adapters/prod",
        "s3://team-adapters/prod/legal/v2",
        "s3://whole.bucket/a b/c=1@x",
    ],
)
def test_places_in_allowed_stores_are_found(text: str) -> None:
    assert str(STORES.source(text)) == text


def test_the_usual_revision_and_slashes_at_the_end_do_not_count() -> None:
    assert str(STORES.source("hub://me/legal@main")) == "hub://me/legal"
    assert str(STORES.source("s3://whole.bucket/a/")) == "s3://whole.bucket/a"


@pytest.mark.parametrize(
    "text",
    [
        "hub://other/legal",
        "hub://me",
        "hub://me/a/b",
        "hub://me/../other",
        "hub://me/a@../../x",
        "hub://me/a@",
        "hub://me/a?x=1",
        "s3://team-adapters/production",
        "s3://team-adapters/prod/../secret",
        "s3://team-adapters",
        "s3://whole.bucket",
        "s3://whole.bucket/",
        "s3://whole.bucket/a//b",
        "s3://whole.bucket/a?list-type=2",
        "s3://other/a",
        "s3://127.0.0.1:80/a",
        "s3://whole.bucket@evil/a",
        "http://169.254.169.254/latest",
        "file:///etc/passwd",
        "s3://whole.bucket/" + "a" * 2000,
        "s3://whole.bucket/\u00e9",
        "",
    ],
)
def test_any_other_place_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        STORES.source(text)
    assert (caught.value.field, caught.value.reason) == ("path", "ADAPTER_PATH")


def test_a_name_may_be_a_hub_id() -> None:
    assert str(STORES.hub_source("me/legal")) == "hub://me/legal"
    assert STORES.hub_source("legal") is None
    assert STORES.hub_source("other/legal") is None
    assert not AllowedStores(())


@pytest.mark.parametrize("text", ["http://x", "s3://", "s3://UPPER", "hub://a/b", "hub:", "s3://bucket/../x", ""])
def test_a_wrong_store_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(StartupError) as caught:
        AllowedStores((text,))
    assert caught.value.flag == "--adapter-store"
