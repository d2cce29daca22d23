"""OpenAI's API: three paths, so that evaluation tools can share the address. Nothing else under `/v1` is passed on."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shared.core.admission import refuse_request
from shared.core.errors import Forbidden
from shared.core.model import ModelRef
from shared.wire import openai
from workers.api import replies
from workers.api.replies import Streamed

if TYPE_CHECKING:
    from starlette.types import Send

    from shared.http.request import Request
    from workers.api.replies import Reply
    from workers.parts import Deps


async def _complete(path: str, deps: Deps, request: Request) -> Streamed:
    call = openai.decode_call(request.body)
    target = await deps.adapters.bind(_model(call.model))
    most = call.max_tokens or target.context_tokens or 0
    refusal = refuse_request(call.sequences, most, request.caller.limits.max_request_tokens)
    if refusal is not None:
        raise Forbidden(refusal)
    body = call.encode(target.upstream_name)
    deps.counters.openai_requests += 1

    async def run(send: Send) -> None:
        with deps.dispatcher.quota.beside(request.caller, len(body)):
            await deps.engines.pass_on(request, path, body, target.upstream_name, send)

    return Streamed(run)


completions = partial(_complete, "/v1/completions")
chat_completions = partial(_complete, "/v1/chat/completions")


async def models(deps: Deps, request: Request) -> Reply:
    if not deps.pool.catalogue.known:
        await deps.pool.learn_models()
    return replies.ok(openai.models(deps.pool.catalogue.base_models()))


def _model(name: str) -> ModelRef:
    return ModelRef(model_path=name) if name.startswith("tinker://") else ModelRef(base_model=name)
