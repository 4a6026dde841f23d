"""One field is a flag, a variable, a default and a help text."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Literal

import pytest
from penstock.common.config import ChannelConfig, ServerConfig, from_env_and_flags, is_loopback
from penstock.common.errors import StartupError
from penstock.common.options import load, option, options_of
from penstock.common.units import parse_size_or_auto


@dataclass(frozen=True, kw_only=True)
class Example:
    model: str | None = option(None, "The model.", group="Model")
    kv_memory: int | None = option(None, "Memory.", group="Model", parse=parse_size_or_auto, metavar="SIZE|auto")
    max_text_bytes: int = option(1024, "Text.", group="Limits", minimum=1, maximum=4096)
    wait_seconds: float = option(1.5, "Wait.", group="Limits")
    workers: int | None = option(None, "Workers.", group="Limits", minimum=1)
    backend: tuple[str, ...] = option(("a:1",), "Backends.", group="Network")
    level: Literal["low", "high"] = option("low", "Level.", group="Network")
    cache: bool = option(True, "Cache.", group="Network")
    secret: int = option(0, "Secret.", group="Network", secret=True)


def test_defaults_hold_when_nothing_is_given() -> None:
    assert load(Example, {}, {}) == Example()


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default() -> None:
    environ = {"PENSTOCK_WORKERS": "2", "PENSTOCK_MAX_TEXT_BYTES": "2KiB"}
    config = load(Example, {"workers": "3", "wait_seconds": None}, environ)
    assert (config.workers, config.max_text_bytes, config.wait_seconds) == (3, 2048, 1.5)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("model", "org/name", "org/name"),
        ("model", "none", None),
        ("kv_memory", "2GiB", 2 << 30),
        ("kv_memory", "auto", None),
        ("max_text_bytes", "1KiB", 1024),
        ("wait_seconds", "250ms", 0.25),
        ("workers", "none", None),
        ("backend", "a:1, b:2", ("a:1", "b:2")),
        ("backend", ["a:1", "b:2,c:3"], ("a:1", "b:2", "c:3")),
        ("level", "high", "high"),
        ("cache", "off", False),
        ("cache", False, False),
    ],
)
def test_the_type_decides_how_text_is_read(name: str, text: object, value: object) -> None:
    assert getattr(load(Example, {name: text}, {}), name) == value


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("workers", "two", "whole number"),
        ("workers", "0", "at least 1"),
        ("max_text_bytes", "1MiB", "at most 4096"),
        ("max_text_bytes", "big", "512MiB"),
        ("wait_seconds", "soon", "30s"),
        ("level", "middle", "low, high"),
        ("cache", "maybe", "true or false"),
    ],
)
def test_a_wrong_value_names_its_flag(name: str, text: str, says: str) -> None:
    with pytest.raises(StartupError, match=says) as caught:
        load(Example, {name: text}, {})
    assert caught.value.flag == "--" + name.replace("_", "-")


def test_a_wrong_variable_is_named_beside_the_flag() -> None:
    with pytest.raises(StartupError, match="PENSTOCK_WORKERS") as caught:
        load(Example, {}, {"PENSTOCK_WORKERS": "x"})
    assert caught.value.flag == "--workers"


def test_a_flag_that_comes_twice_is_told_as_it_was_typed() -> None:
    def refuse(_text: str) -> tuple[str, ...]:
        raise ValueError("expected a name")

    config = make_dataclass(
        "Listed", [("names", tuple[str, ...], option((), "Names.", group="Test", parse=refuse))], frozen=True
    )
    with pytest.raises(StartupError, match="--names 'a' 'b': expected"):
        load(config, {"names": ["a", "b"]}, {})


def test_a_secret_value_is_not_repeated() -> None:
    with pytest.raises(StartupError) as caught:
        load(Example, {"secret": "hunter2"}, {})
    assert "hunter2" not in caught.value.message


def test_model_is_the_positional_argument() -> None:
    model = next(bound for bound in options_of(Example) if bound.name == "model")
    assert (model.flag, model.env) == ("MODEL", "PENSTOCK_MODEL")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(StartupError, match="no option"):
        load(Example, {"nothing": "1"}, {})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_flag(host: str) -> None:
    assert is_loopback(host)
    from_env_and_flags(ServerConfig, {"host": host})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_plaintext_elsewhere_is_refused_without_the_flag(host: str) -> None:
    with pytest.raises(StartupError) as caught:
        from_env_and_flags(ServerConfig, {"host": host})
    assert caught.value.flag == "--insecure-bind"
    from_env_and_flags(ServerConfig, {"host": host, "insecure_bind": True})
    from_env_and_flags(ServerConfig, {"host": host, "tls_cert": "cert.pem", "tls_key": "key.pem"})


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"tls_cert": "cert.pem"}, "--tls-key"),
        ({"tls_key": "key.pem"}, "--tls-cert"),
        ({"tls_client_ca": "ca.pem"}, "--tls-cert"),
    ],
)
def test_tls_options_go_together(given: dict[str, object], flag: str) -> None:
    with pytest.raises(StartupError) as caught:
        from_env_and_flags(ServerConfig, given)
    assert caught.value.flag == flag


def test_a_service_that_calls_others_is_server_and_channel_in_one() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Both(ServerConfig, ChannelConfig):
        port: int = option(7, "Port.", group="Network")

    both = from_env_and_flags(Both, {"channel_tls_ca": "ca.pem", "keepalive_seconds": "5s"})
    assert (both.port, both.channel_tls_ca, both.keepalive_seconds) == (7, "ca.pem", 5.0)
