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
    from workers.parts import WorkerParts


async def _complete(path: str, parts: WorkerParts, request: Request) -> Streamed:
    call = await parts.long_work.run(openai.call_steps(request.body), request.caller.digest)
    target = await parts.adapters.bind(_model(call.model))
    most = call.max_tokens or target.context_tokens or 0
    refusal = refuse_request(call.sequences, most, request.caller.limits.max_request_tokens)
    if refusal is not None:
        raise Forbidden(refusal)
    body = call.encode(target.upstream_name)
    parts.counters.openai_requests += 1

    async def run(send: Send) -> None:
        with parts.dispatcher.quota.beside(request.caller, len(body)):
            await parts.openai.pass_on(request, path, body, target.upstream_name, send)

    return Streamed(run)


completions = partial(_complete, "/v1/completions")
chat_completions = partial(_complete, "/v1/chat/completions")


async def models(parts: WorkerParts, request: Request) -> Reply:
    if not parts.pool.catalogue.known:
        await parts.pool.learn_models()
    return replies.ok(openai.models(parts.pool.catalogue.base_models()))


def _model(name: str) -> ModelRef:
    return ModelRef(model_path=name) if name.startswith("tinker://") else ModelRef(base_model=name)
