"""Accept samples and make the sampling sessions that they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.core import ids
from shared.core.admission import refuse_request
from shared.core.errors import BadRequest, Forbidden, Overloaded
from shared.core.model import ModelRef
from shared.wire import vllm
from shared.wire.sdk import calls
from workers.api import replies, training

if TYPE_CHECKING:
    from shared.core.callers import Caller
    from shared.core.model import SampleSpec, SamplingSession
    from shared.http.request import Request
    from workers.api.replies import Reply
    from workers.parts import WorkerParts

# The SDK derives seq_ids from it (clone * 1e9), and wants it unique per sampling session and never 0.
_CLONES: Final = 999_999_999
_CLONE_TRIES: Final = 8


async def asample(parts: WorkerParts, request: Request) -> Reply:
    """Accept a sample and promise its result; answered before the generation starts."""
    call = await parts.long_work.run(calls.sample_steps(request.body), request.caller.digest)
    session = _session_of(parts, call, request.caller)
    seq_id = call.seq_id if call.seq_id is not None else 0
    target = await parts.adapters.target(session.model)
    # Refuses now what the upstream would refuse later: a prompt that leaves no room, an unknown context length, what it
    # cannot be asked.
    max_tokens = vllm.completion_budget(call.spec, target.context_tokens)
    parts.pool.require_protocol(call.spec, target.upstream_name)
    spec = _with_images_placed(parts, call.spec, target.base_model)
    refusal = refuse_request(call.spec.num_samples, max_tokens, request.caller.limits.max_request_tokens)
    if refusal is not None:
        raise Forbidden(refusal)
    if not ids.is_lone(session.session_id):
        await parts.sessions.require_alive(session.session_id, request.caller)
    sample = await parts.dispatcher.submit(session, seq_id, spec, target, request.caller, request.trace)
    return replies.ok(calls.promise(sample.request_id, ids.sequence_ids(sample.key, spec.num_samples)))


def _with_images_placed(parts: WorkerParts, spec: SampleSpec, model_name: str) -> SampleSpec:
    """Put the model's placeholder in the place of each image. Raises `BadRequest` if it is not known."""
    if not spec.images:
        return spec
    known = {image.model: image.token_id for image in parts.live.settings.image_tokens}
    if model_name not in known:
        raise BadRequest(
            f"the prompt has chunks of type 'image', and which token stands for one with {model_name!r} is not known:"
            f" the gateway's operator must give --image-token {model_name}=ID"
        )
    return vllm.place_images(spec, known[model_name])


def _session_of(parts: WorkerParts, call: calls.SampleCall, caller: Caller) -> SamplingSession:
    if call.sampling_session_id is not None:
        if call.seq_id is None:
            raise BadRequest("seq_id is missing")
        return parts.sessions.get(call.sampling_session_id, caller)
    # Without a sampling session every submission is a sample of its own, under a random id.
    random = parts.random_bytes(ids.RANDOM_BYTES)
    session_id = ids.lone_session_id(random)
    return ids.sampling_session(session_id, random, ModelRef(call.base_model, call.model_path), caller.secret)


async def create_sampling_session(parts: WorkerParts, request: Request) -> Reply:
    """Bind a model for sampling. The same (session, number, model) always gives the same id."""
    call = calls.decode_create_sampling_session(request.body)
    session_id = training.session_name(parts, call.session_id, request)
    model = ModelRef(call.base_model, call.model_path)
    base_model = await _base_model(parts, request, model)
    await parts.adapters.bind(model, base_model)
    if session_id != call.session_id:
        await training.require_session(parts, request, call.session_id, session_id)
    await parts.sessions.require_room(session_id, request.caller)
    number = call.sampling_session_seq_id
    ordinal = str(number).encode() if number is not None else parts.random_bytes(ids.RANDOM_BYTES)
    session = ids.sampling_session(session_id, ordinal, model, request.caller.secret)
    return replies.ok(calls.sampling_session(session.sampling_session_id))


async def _base_model(parts: WorkerParts, request: Request, model: ModelRef) -> str | None:
    """Return the base model of an adapter that the gateway would load, if a training server knows it."""
    if model.model_path is None or parts.pool.catalogue.adapter(model.model_path).directory is None:
        return None
    return await training.base_model_of(parts, request, model.model_path)


async def join_sampling_session(parts: WorkerParts, request: Request) -> Reply:
    """Give a client that was unpickled in another process a number of its own."""
    joined = calls.decode_body(calls.Join, request.body)
    session = parts.sessions.get(joined.sampling_session_id, request.caller)
    for _ in range(_CLONE_TRIES):
        clone_id = 1 + int.from_bytes(parts.random_bytes(8), "big") % _CLONES
        if await parts.store.reserve_clone(session.session_key, clone_id):
            return replies.ok(calls.joined(clone_id))
    raise Overloaded("clones", "no free client number was found; join again")


async def sampler(parts: WorkerParts, request: Request) -> Reply:
    """Return the model of a sampling session; SDKs before 0.38 ask this for the tokenizer's name."""
    session = parts.sessions.get(request.path["sampling_session_id"], request.caller)
    target = await parts.adapters.bind(session.model)
    return replies.ok(calls.sampler(session.sampling_session_id, target.base_model, session.model.model_path))


async def weights_info(parts: WorkerParts, request: Request) -> Reply:
    """Return the base model of sampler weights; a training server would know more."""
    path = calls.decode_body(calls.WeightsInfo, request.body).tinker_path
    target = await parts.adapters.bind(ModelRef(model_path=path))
    return replies.ok(calls.weights_info(target.base_model))
