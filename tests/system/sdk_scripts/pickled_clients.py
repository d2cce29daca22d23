"""One sampling client, pickled into other processes, which all sample at once.

In: `model`, `processes` (a list of {name: request} for each).
Out: `answers` (a list of {name: outcome}), `warnings`.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from sdk_session import KeptWarnings, asked, outcome, sampling_client, service, submit, told


def sample_all(client: Any, requests: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    warnings = KeptWarnings()
    futures = {name: submit(client, request) for name, request in requests.items()}
    return {name: outcome(future) for name, future in futures.items()}, warnings.lines


def main() -> None:
    wanted = asked()
    warnings = KeptWarnings()
    with service() as service_client:
        client = sampling_client(service_client, **wanted["model"])
        # The SDK has threads: a fork would copy their locks.
        with multiprocessing.get_context("spawn").Pool(len(wanted["processes"])) as pool:
            done = pool.starmap(sample_all, [(client, requests) for requests in wanted["processes"]], chunksize=1)
    answers = [found for found, _ in done]
    told(answers=answers, warnings=warnings.lines + [line for _, lines in done for line in lines])


if __name__ == "__main__":
    main()
