"""All requests at once, each on the sampling client that it names; then what became of each.

In: `clients` (name -> arguments of create_sampling_client), `requests` (name -> client, prompt, ...).
Out: `answers`, `client_errors`, `base_models`, `offered` (models), `session_id`, `warnings`.
"""

from __future__ import annotations

from typing import Any

from sdk_session import KeptWarnings, asked, failure, outcome, sampling_client, service, submit, told


def main() -> None:
    warnings = KeptWarnings()
    wanted = asked()
    clients: dict[str, Any] = {}
    client_errors: dict[str, Any] = {}
    with service() as service_client:
        for name, model in wanted["clients"].items():
            try:
                clients[name] = sampling_client(service_client, **model)
            except Exception as error:
                client_errors[name] = failure(error)
        futures = {name: submit(clients[request["client"]], request) for name, request in wanted["requests"].items()}
        answers = {name: outcome(future) for name, future in futures.items()}
        base_models = {name: client.get_base_model() for name, client in clients.items()}
        offered = [model.model_name for model in service_client.get_server_capabilities().supported_models]
        session_id = clients["main"].holder.get_session_id()
    told(
        answers=answers,
        client_errors=client_errors,
        base_models=base_models,
        offered=offered,
        session_id=session_id,
        warnings=warnings.lines,
    )


if __name__ == "__main__":
    main()
