"""Rates of keys: what is left, and how long to wait."""

from __future__ import annotations

import pytest
from penstock.common.errors import ResourceExhausted
from penstock.router.keys.api_key import KeyQuotas
from penstock.router.keys.key_rates import KeyRates


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_flow_back_by_the_minute() -> None:
    clock = Clock()
    rates, quotas = KeyRates(clock=clock), KeyQuotas(requests_per_minute=6)
    for _ in range(6):
        rates.enter(quotas)
    with pytest.raises(ResourceExhausted) as caught:
        rates.enter(quotas)
    assert caught.value.retry_after_seconds == pytest.approx(10.0)
    assert caught.value.metadata == {"quota": "requests_per_minute", "limit": "6", "remaining": "0"}
    clock.now = 10.0
    rates.enter(quotas)
    with pytest.raises(ResourceExhausted):
        rates.enter(quotas)


def test_a_refused_request_holds_nothing() -> None:
    rates, quotas = KeyRates(), KeyQuotas(concurrent_requests=1)
    rates.enter(quotas)
    with pytest.raises(ResourceExhausted, match="concurrent_requests"):
        rates.enter(quotas)
    rates.leave()
    rates.enter(quotas)
    assert rates.running == 1


def test_tokens_that_were_not_used_are_given_back_up_to_the_quota() -> None:
    clock = Clock()
    rates, quotas = KeyRates(clock=clock), KeyQuotas(tokens_per_minute=60)
    rates.take_tokens(quotas, 60)
    rates.give_tokens(quotas, 50)
    rates.take_tokens(quotas, 50)
    with pytest.raises(ResourceExhausted) as caught:
        rates.take_tokens(quotas, 5)
    assert caught.value.retry_after_seconds == pytest.approx(5.0)
    clock.now = 1000.0
    rates.give_tokens(quotas, 50)
    with pytest.raises(ResourceExhausted) as caught:
        rates.take_tokens(quotas, 61)
    assert caught.value.retry_after_seconds is None
    assert caught.value.metadata["remaining"] == "60"


def test_a_smaller_quota_holds_at_once() -> None:
    clock = Clock()
    rates = KeyRates(clock=clock)
    rates.enter(KeyQuotas(requests_per_minute=100))
    for _ in range(2):
        rates.enter(KeyQuotas(requests_per_minute=2))
    with pytest.raises(ResourceExhausted):
        rates.enter(KeyQuotas(requests_per_minute=2))
