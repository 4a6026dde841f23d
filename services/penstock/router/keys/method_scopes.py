"""Scopes of TextService's methods that clients call; any valid key may call the others."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.router.keys.api_key import KeyScope

METHOD_SCOPES: Mapping[str, KeyScope] = {
    "Generate": KeyScope.GENERATE,
    "Chat": KeyScope.GENERATE,
    "DetectWatermark": KeyScope.GENERATE,
    "Score": KeyScope.EMBED,
    "Embed": KeyScope.EMBED,
}
