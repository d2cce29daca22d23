"""One client that trains, saves, samples what it saved, loads, and samples a named checkpoint and the base model too.

In: `model`, `requests` (client -> request; the clients are `born`, `named` and `base`).
Out: `loss`, `metrics`, `model_ids`, `saved`, `answers`, `base_models`, `archive`, `session_id`, `warnings`.
"""

from __future__ import annotations

from typing import Any

from sdk_session import RESULT_S, KeptWarnings, asked, outcome, sampling_client, service, submit, told
from tinker import types


def done(future: Any) -> Any:
    return future.result(timeout=RESULT_S) if hasattr(future, "result") else future


def datum() -> types.Datum:
    targets = types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3])
    weights = types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3])
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )


def main() -> None:
    warnings = KeptWarnings()
    wanted = asked()
    with service() as service_client:
        training = done(service_client.create_lora_training_client(base_model=wanted["model"], rank=8))
        loss = done(training.forward_backward([datum()] * wanted["datums"], "cross_entropy"))
        step = done(training.optim_step(types.AdamParams(learning_rate=1e-4)))
        born = done(training.save_weights_and_get_sampling_client())
        state = done(training.save_state("after-one"))
        done(training.load_state(state.path))
        named_path = done(training.save_weights_for_sampler(name="named")).path
        clients = {
            "born": born,
            "named": sampling_client(service_client, model_path=named_path),
            "base": sampling_client(service_client, base_model=wanted["model"]),
        }
        futures = {name: submit(clients[name], request) for name, request in wanted["requests"].items()}
        answers = {name: outcome(future) for name, future in futures.items()}
        base_models = {name: client.get_base_model() for name, client in clients.items()}
        session_id = training.holder.get_session_id()
    told(
        metrics=dict(loss.metrics),
        step=dict(step.metrics or {}),
        model_id=training.model_id,
        saved=[state.path, named_path],
        answers=answers,
        base_models=base_models,
        session_id=session_id,
        warnings=warnings.lines,
    )


if __name__ == "__main__":
    main()
