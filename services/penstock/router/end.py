"""grpc.aio's end-of-stream marker, which its type stubs do not know."""

from __future__ import annotations

from typing import Any, cast

import grpc

END: object = cast("Any", grpc.aio).EOF
