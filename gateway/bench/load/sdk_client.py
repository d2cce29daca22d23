"""A load client that uses the published SDK as a training script does: ask, wait, compare, count.

It runs under the SDK's interpreter with only the standard library, numpy and the SDK. The SDK is imported when the
client starts, so that the comparison of results can be tested without it. The SDK's requests cannot be seen from
outside, so only calls and their results are counted. `messages.py` defines the messages to and from the driver.
"""

from __future__ import annotations

import asyncio
import base64
import json
import resource
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from gateway.bench.load.expected import Difference, difference, simulator_oracle
from gateway.bench.load.frame import standard_input, until_done
from gateway.bench.load.pacing import at_most
from gateway.bench.load.tally import LoadTally
from gateway.bench.load.workload import Workload, sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.bench.load.expected import Oracle
    from gateway.bench.load.workload import Sample


def complaint(result: Any, wanted: Sample, num_samples: int, oracle: Oracle | None) -> Difference | None:
    """Return what is wrong with a `SampleResponse`; without `oracle`, check only counts and lengths."""
    if len(result.sequences) != num_samples:
        return Difference("wrong number of sequences", f"{num_samples} expected, {len(result.sequences)} received")
    for choice, sequence in enumerate(result.sequences):
        tokens = np.asarray(sequence.tokens, "<i4")
        logprobs = np.asarray(sequence.logprobs or (), "<f4")
        if not tokens.size or tokens.size != logprobs.size:
            return Difference("wrong lengths", f"{tokens.size} tokens, {logprobs.size} logprobs")
        if oracle is not None and (found := difference(tokens, logprobs, wanted, choice, oracle)):
            return found
    return None


def report_of(tally: LoadTally, cpu_seconds: float) -> dict[str, Any]:
    """Return the fields of `messages.ClientReport` that are known here, with bytes in base64 as msgspec reads them."""
    counts = ("completed", "failed", "wrong", "cancelled", "resubmitted", "duplicates", "abandoned_polls")
    values = ("submit_s", "latency_s", "spans_s", "promises_s")
    return {
        **{name: getattr(tally, name) for name in counts},
        **{name: base64.b64encode(getattr(tally, name).tobytes()).decode() for name in values},
        "failures": dict(tally.failures),
        "examples": tally.examples,
        "cpu_seconds": cpu_seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    asyncio.run(_serve_driver())


async def _serve_driver() -> None:
    lines = await standard_input()
    plan = json.loads(await lines.readline())
    try:
        client = await asyncio.to_thread(_sampling_client, plan)
    except Exception as error:
        # The SDK may raise anything here. Nothing else is running yet, and the driver shows the message.
        _send("trouble", message=f"the SDK made no sampling client: {type(error).__name__}: {error}")
        return
    _send("ready", session_poll=None, sdk_version=sys.modules["tinker"].__version__)
    if await lines.readline():
        await _load(plan, client, lines)


def _sampling_client(plan: dict[str, Any]) -> Any:
    import tinker

    service = tinker.ServiceClient(base_url=plan["url"], api_key=plan["api_key"])
    made = service.create_sampling_client(base_model=plan["workload"]["model"])
    # A future since version 0.38, the client itself before.
    return made if type(made) is tinker.SamplingClient else made.result()


async def _load(plan: dict[str, Any], client: Any, lines: asyncio.StreamReader) -> None:
    cpu_s = time.process_time()
    load = SdkLoad(client, Workload(**plan["workload"]), verify=plan["verify"])
    indices = iter(range(plan["first"], plan["samples"], plan["step"]))
    run = asyncio.create_task(load.run(indices, plan["concurrency"]))
    await until_done(run, load.tally, lines, plan["stuck_after_s"], _show)
    _send("report", **report_of(load.tally, time.process_time() - cpu_s))


class SdkLoad:
    """Draw samples through a `tinker.SamplingClient`, and compare each with the expected result."""

    def __init__(self, client: Any, workload: Workload, *, verify: bool) -> None:
        self.tally = LoadTally()
        self._client = client
        self._workload = workload
        self._oracle = simulator_oracle(workload) if verify else None

    async def run(self, indices: Iterator[int], concurrency: int) -> None:
        """Run every sample of `indices`, at most `concurrency` of them between call and result."""
        await at_most(concurrency, indices, self._run_sample)

    async def _run_sample(self, index: int) -> None:
        wanted = sample(self._workload, index)
        called_s = time.monotonic()
        self.tally.submitted += 1
        try:
            future = self._client.sample(*self._request(wanted))
            # Awaitable since version 0.38, a future of threads before.
            result = await (future if hasattr(future, "__await__") else asyncio.wrap_future(future))
        except Exception as error:
            # Whatever the SDK raises, its user sees it as a failed sample.
            self.tally.fail(type(error).__name__, f"sample {wanted.index}: {error}")
            return
        found = complaint(result, wanted, self._workload.num_samples, self._oracle)
        if found is None:
            self.tally.succeed(called_s, called_s, time.monotonic())
        else:
            self.tally.fail(found.kind, f"sample {wanted.index}: {found.detail}", wrong=True)

    def _request(self, wanted: Sample) -> tuple[Any, int, Any]:
        from tinker import types

        params = types.SamplingParams(max_tokens=self._workload.max_tokens, seed=wanted.seed, temperature=1.0)
        return types.ModelInput.from_ints(wanted.prompt.tolist()), self._workload.num_samples, params


def _show(tally: LoadTally) -> None:
    counts = ("submitted", "completed", "failed", "wrong", "cancelled")
    _send("progress", **{name: getattr(tally, name) for name in counts})


def _send(kind: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"type": kind, **values}) + "\n")
    sys.stdout.flush()
