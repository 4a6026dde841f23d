"""Tests of the installer of `make`: settings of pip as variables of uv, and where pip has to do it."""

from __future__ import annotations

import pytest

from tools.install import variables_of


@pytest.mark.parametrize(
    ("listed", "variables"),
    [
        ("", {}),
        (":env:.cert='/ca.pem'\nglobal.timeout='9'\nfreeze.all='true'\n", {"SSL_CERT_FILE": "/ca.pem"}),
        ("global.index-url='https://user:token@one/simple'", {"UV_DEFAULT_INDEX": "https://user:token@one/simple"}),
        ("global.index-url='https://one'\ninstall.index-url='https://two'", {"UV_DEFAULT_INDEX": "https://two"}),
        (":env:.index-url='https://here'\nglobal.index-url='https://one'", {"UV_DEFAULT_INDEX": "https://here"}),
        ("global.constraint='/bounds.txt'", {"UV_CONSTRAINT": "/bounds.txt"}),
        (":env:.find-links='/a /b'\nglobal.extra-index-url='https://more'", {"UV_FIND_LINKS": "/a,/b"}),
        ("global.no-index='1'\nglobal.find-links='/wheels'", None),
        (":env:.require-hashes='true'", None),
    ],
)
def test_settings_of_pip_are_handed_on(listed: str, variables: dict[str, str] | None) -> None:
    assert variables_of(listed) == variables
