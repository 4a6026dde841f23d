"""Scope of what a gateway keeps for a caller."""

from __future__ import annotations

import pytest
from penstock.gateway.endpoint import owner_of


@pytest.mark.parametrize("shown", [b"bearer mine", b"BEARER  mine", b"Bearer mine "])
def test_one_token_has_one_scope_however_it_is_written(shown: bytes) -> None:
    assert owner_of(shown) == owner_of(b"Bearer mine")


def test_other_callers_have_scopes_of_their_own() -> None:
    assert len({owner_of(one) for one in (b"Bearer mine", b"Bearer Mine", b"Basic mine", b"Bearer ", None)}) == 5
