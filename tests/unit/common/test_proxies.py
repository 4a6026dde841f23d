"""Proxies of the environment: loopback never goes through one, and the exceptions count."""

from __future__ import annotations

import pytest
from penstock.common.proxies import is_this_machine, proxy_of, proxy_options, through_proxy

PROXY = "http://me:secret@proxy.corp:3128"
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy", "NO_PROXY")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", PROXY)
    return monkeypatch


HERE = ("127.0.0.1:8000", "127.9.9.9:1", "localhost:50051", "LOCALHOST:1", "a.localhost:1", "[::1]:50051", "::1")
NAMED = ("dns:///localhost:50051", "dns://8.8.8.8/localhost:1", "ipv4:127.0.0.1:1", "ipv6:[::1]:1", "unix:/tmp/x")
SEVERAL = ("ipv4:127.0.0.1:80,127.0.0.1:81", "ipv6:[::1]:80,[::1]:81")
ANYWHERE = ("0.0.0.0:1", "[::]:1", "[::ffff:127.0.0.1]:1", "unix-abstract:x")
FAR = ("10.0.0.5:8000", "router.corp:50051", "dns:///router.corp:50051", "[2001:db8::1]:1")


@pytest.mark.parametrize("address", [*HERE, *NAMED, *SEVERAL, *ANYWHERE])
def test_this_machine_is_behind_no_proxy(address: str) -> None:
    assert proxy_of(address) is None
    assert proxy_options(address) == [("grpc.enable_http_proxy", 0)]
    assert through_proxy(address) == ""


@pytest.mark.parametrize("address", FAR)
def test_another_machine_is_and_the_password_is_not_told(address: str) -> None:
    assert proxy_of(address) == ("http_proxy", PROXY)
    assert proxy_options(address) == []
    told = through_proxy(address)
    assert "http://proxy.corp:3128 of http_proxy" in told
    assert "secret" not in told


def test_one_of_several_addresses_may_be_elsewhere() -> None:
    assert "connections to 10.0.0.5 go through" in through_proxy("ipv4:127.0.0.1:80,10.0.0.5:80")


def test_a_variable_that_is_no_url_is_told_and_not_repeated(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("http_proxy", "http://me:secret@[proxy:3128")
    told = through_proxy("router.corp:50051")
    assert "http_proxy" in told
    assert "secret" not in told


@pytest.mark.parametrize("name", ["no_grpc_proxy", "no_proxy", "NO_PROXY"])
@pytest.mark.parametrize("listed", ["router.corp", ".corp", "a.b, corp", "*", "*.corp"])
def test_an_exception_counts(environment: pytest.MonkeyPatch, name: str, listed: str) -> None:
    environment.setenv(name, listed)
    assert proxy_of("router.corp:50051") is None


def test_an_exception_of_another_host_does_not(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("no_proxy", "outer.corp,ter.corp,10.0.0.0/8")
    assert proxy_of("router.corp:1") is not None
    assert proxy_of("10.1.2.3:1") is None
    assert proxy_of("11.1.2.3:1") is not None


def test_grpcs_own_variable_goes_first(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("grpc_proxy", "other:1")
    assert proxy_of("router.corp:1") == ("grpc_proxy", "other:1")
    environment.delenv("grpc_proxy")
    environment.delenv("http_proxy")
    assert proxy_of("router.corp:1") is None


def test_names_of_this_machine() -> None:
    assert is_this_machine("localhost.")
    assert not is_this_machine("localhost.corp")
    assert not is_this_machine("")
