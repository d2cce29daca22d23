"""What the admin address answers with."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response


def json_response(body: dict[str, Any], code: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(orjson.dumps(body), code, media_type="application/json")
