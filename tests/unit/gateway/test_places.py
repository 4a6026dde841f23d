"""Bytes of bodies: who gives way where there are too many."""

from __future__ import annotations

import pytest
from penstock.gateway.http_errors import HttpError
from penstock.gateway.places import ANYBODY, BodyBytes


def test_a_tenant_has_its_share_of_all_bodies_bytes() -> None:
    bodies, given_up = BodyBytes(100, 0.5), list[str]()
    other = bodies.open(lambda: given_up.append("other"), "b")
    other.take(30)
    first = bodies.open(lambda: given_up.append("first"), "a")
    first.take(40)
    second = bodies.open(lambda: given_up.append("second"), "a")
    # Its own older one gives way, though there is room for all.
    second.take(20)
    assert given_up == ["first"]
    second.whole()
    third = bodies.open(lambda: given_up.append("third"), "a")
    with pytest.raises(HttpError, match="--tenant-share") as refused:
        third.take(31)
    assert (refused.value.status, given_up, bodies.held) == (429, ["first"], 50)
    for body in (other, first, second, third):
        body.close()
    assert bodies.held == 0


def test_callers_without_a_token_have_no_share_of_their_own() -> None:
    bodies, given_up = BodyBytes(100, 0.5), list[str]()
    bodies.open(lambda: given_up.append("old"), ANYBODY).take(60)
    bodies.open(lambda: given_up.append("new"), ANYBODY).take(40)
    assert (given_up, bodies.held) == ([], 100)
    bodies.open(lambda: given_up.append("newest"), "a").take(1)
    assert given_up == ["old"]
