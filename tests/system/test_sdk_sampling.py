"""What users of the published SDKs get: every kind of request through real processes, compared token by token.

One SDK process per version makes all requests at once; each test looks at the answers that it is about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from gateway.simulator.tokens import ASKS_TO_END, EOS, sampled, text_of
from tests.system import expected
from tests.system.sdk_env import VERSIONS, SdkEnv
from tests.system.sdk_run import API_KEY, compute_logprobs, run_script, sample
from tests.system.stack import Stack, running_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The first run installs three environments.
pytestmark = [pytest.mark.slow, pytest.mark.sdk, pytest.mark.timeout(400)]

PROMPT: Final = [101, 102, 103, 104, 105, 106]
MANY: Final = 200
CONTEXT_TOKENS: Final = 2_048
SETUPS: Final = [
    *(pytest.param((version, "auto", "completions"), id=version) for version in VERSIONS),
    # From 0.27.2 on there are two ways of waiting; the older ones have this one only.
    pytest.param(("0.38.0", "off", "completions"), id="0.38.0-off"),
    pytest.param(("0.38.0", "auto", "generate"), id="0.38.0-generate"),
]


@dataclass(frozen=True)
class Run:
    """One SDK process' requests and what came of them."""

    sdk: SdkEnv
    stack: Stack
    session_poll: str
    protocol: str
    requests: dict[str, Any]
    told: dict[str, Any]

    def error(self, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.told["answers"][name]
        assert "error" in answer, answer
        return answer

    def result(self, name: str) -> Any:
        answer = self.told["answers"][name]
        assert "result" in answer, answer
        return answer["result"]

    def checked(self, name: str) -> dict[str, Any]:
        """The answer, after every token and logprob was compared with what the simulated model gives."""
        result: dict[str, Any] = self.result(name)
        expected.check_sequences(result["sequences"], self.stack.model, self.requests[name])
        return result

    def tokens(self, name: str) -> list[list[int]]:
        return [sequence["tokens"] for sequence in self.checked(name)["sequences"]]


def all_requests(sdk: SdkEnv, stack: Stack) -> dict[str, Any]:
    context = CONTEXT_TOKENS
    requests = {
        "one": sample(PROMPT, max_tokens=16, seed=7),
        "four seeded": sample(PROMPT, 4, max_tokens=16, seed=7),
        "four seeded again": sample(PROMPT, 4, max_tokens=16, seed=7),
        "second of four": sample(PROMPT, max_tokens=16, seed=8),
        "unseeded": sample(PROMPT, 2, max_tokens=16),
        "unseeded again": sample(PROMPT, 2, max_tokens=16),
        "greedy": sample(PROMPT, 4, max_tokens=16, temperature=0.0),
        "half": sample(PROMPT, max_tokens=16, seed=7, temperature=0.5),
        "top_p and top_k": sample(PROMPT, max_tokens=16, seed=7, top_p=0.9, top_k=50),
        "stop absent": sample([*PROMPT, ASKS_TO_END], max_tokens=64, seed=3),
        "no stops": sample([*PROMPT, ASKS_TO_END], max_tokens=64, seed=3, stop=[]),
        "stop tokens": sample(PROMPT, max_tokens=16, seed=7, stop=[1, fifth_token(stack)]),
        "stop string": sample(PROMPT, max_tokens=16, seed=7, stop=text_of(fifth_token(stack)) + " "),
        "stop strings": sample(PROMPT, max_tokens=16, seed=7, stop=["never", text_of(fifth_token(stack)) + " "]),
        "no max_tokens": sample([*PROMPT, 1], seed=9, stop=[]),
        "above the context": sample(PROMPT, max_tokens=context - 2, seed=9, stop=[]),
        "prompt as long as the context": sample([1] * context, max_tokens=4),
        "prompt above the context": sample([1] * (context + 5), max_tokens=4),
        "with prompt logprobs": sample(PROMPT, 2, max_tokens=4, seed=7, options={"include_prompt_logprobs": True}),
        "with top prompt logprobs": sample(
            PROMPT, max_tokens=4, seed=7, options={"include_prompt_logprobs": True, "topk_prompt_logprobs": 3}
        ),
        "with top prompt logprobs only": sample(PROMPT, max_tokens=4, seed=7, options={"topk_prompt_logprobs": 3}),
        "compute_logprobs": compute_logprobs(PROMPT),
        "compute_logprobs of one": compute_logprobs(PROMPT[:1]),
        "image": sample(PROMPT, max_tokens=4) | {"prompt": [{"tokens": PROMPT}, {"image": "not really"}]},
        "empty chunk": sample(PROMPT, max_tokens=4, seed=7) | {"prompt": [{"tokens": []}, {"tokens": PROMPT}]},
        "empty prompt": sample([], max_tokens=4),
        "many stops": sample(
            PROMPT, max_tokens=16, seed=7, stop=["never", "a", "b", "c", text_of(fifth_token(stack)) + " "]
        ),
        "too hot": sample(PROMPT, max_tokens=4, temperature=2.5),
    }
    if sdk.release >= (0, 29):
        requests["with top logprobs"] = sample(PROMPT, 2, max_tokens=8, seed=7, options={"topk_sample_logprobs": 3})
    if sdk.release >= (0, 33):
        requests |= _requests_since_0_33()
    for number in range(MANY):
        # Two sampling sessions, whose seq_ids are the same numbers.
        client = "main" if number % 2 else "other"
        requests[f"many {number}"] = sample([200, number // 2, number % 2], max_tokens=8, seed=number, client=client)
    return requests


def fifth_token(stack: Stack) -> int:
    """Of what the seeded requests for `PROMPT` give."""
    return int(sampled(stack.model, PROMPT, 7, 5)[0][4])


def _requests_since_0_33() -> dict[str, Any]:
    target = {"data": [5, -1, 7, -1, 1], "dtype": "int64", "shape": [5, 1]}
    return {
        "last two": sample(
            PROMPT, max_tokens=4, seed=7, options={"include_prompt_logprobs": True, "prompt_logprobs_last_n": 2}
        ),
        "compute the last two": compute_logprobs(PROMPT, prompt_logprobs_last_n=2),
        "alternatives": sample(PROMPT, max_tokens=1, options={"prompt_alt_tokens_k": 2}),
        "targets": sample(PROMPT, max_tokens=1, options={"target_prompt_logprobs": target}),
    }


@pytest.fixture(scope="module", params=SETUPS)
def run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    published_sdk: Callable[[str], SdkEnv],
) -> Iterator[Run]:
    version, session_poll, protocol = request.param
    sdk = published_sdk(version)
    simulator_flags = ["--max-model-len", str(CONTEXT_TOKENS)]
    flags = ["--session-poll", session_poll, "--upstream-protocol", protocol]
    with running_stack(tmp_path_factory.mktemp("sdk"), *flags, simulator_flags=simulator_flags) as stack:
        requests = all_requests(sdk, stack)
        main = {"base_model": stack.model}
        clients = {"main": main, "other": main, "unknown": {"base_model": "no/such-model"}}
        told = run_script(sdk, stack, "run_requests.py", clients=clients, requests=requests)
        yield Run(sdk, stack, session_poll, protocol, requests, told)


def test_one_sample(run: Run) -> None:
    sequence = run.checked("one")["sequences"][0]
    assert len(sequence["tokens"]) == len(sequence["logprobs"]) == 16
    assert sequence["stop_reason"] == "length"


def test_seeded_samples_differ_among_themselves_and_repeat(run: Run) -> None:
    """D5: choice i is the sample of seed + i."""
    tokens = run.tokens("four seeded")
    assert len({tuple(sequence) for sequence in tokens}) == 4
    assert run.tokens("four seeded again") == tokens
    assert run.tokens("one") == tokens[:1]
    assert run.tokens("second of four") == tokens[1:2]


def test_samples_without_a_seed_differ(run: Run) -> None:
    tokens = run.tokens("unseeded") + run.tokens("unseeded again")
    assert len({tuple(sequence) for sequence in tokens}) == 4


def test_greedy_samples_are_identical(run: Run) -> None:
    """D12"""
    tokens = run.tokens("greedy")
    assert tokens == [tokens[0]] * 4


def test_sampled_logprobs_scale_with_the_temperature(run: Run) -> None:
    """D15: those of the prompt do not, which `compute_logprobs` shows below."""
    run.checked("half")
    run.checked("top_p and top_k")


def test_no_stops_at_all_is_not_the_models_own_stops(run: Run) -> None:
    """`[]` runs through the end-of-sequence token to max_tokens; absent ends with it, and it is in the tokens."""
    absent, none = run.checked("stop absent")["sequences"][0], run.checked("no stops")["sequences"][0]
    assert (none["stop_reason"], len(none["tokens"])) == ("length", 64)
    assert absent["stop_reason"] == "stop"
    assert none["tokens"][: len(absent["tokens"])] == absent["tokens"]
    assert absent["tokens"][-1] == EOS


def test_a_stop_token_is_part_of_the_sample(run: Run) -> None:
    sequence = run.checked("stop tokens")["sequences"][0]
    assert (sequence["stop_reason"], len(sequence["tokens"])) == ("stop", 5)
    assert sequence["tokens"][-1] == fifth_token(run.stack)


@pytest.mark.parametrize("name", ["stop string", "stop strings"])
def test_a_stop_string_ends_the_sample_with_the_token_that_completes_it(run: Run, name: str) -> None:
    """The string ends with the blank that the sixth token's text begins with."""
    sequence = run.checked(name)["sequences"][0]
    assert (sequence["stop_reason"], len(sequence["tokens"])) == ("stop", 6)


def test_without_max_tokens_a_sample_takes_what_fits(run: Run) -> None:
    """D11: not the upstream's 16 tokens."""
    for name in ("no max_tokens", "above the context"):
        sequence = run.checked(name)["sequences"][0]
        prompt = run.requests[name]["prompt"][0]["tokens"]
        assert (sequence["stop_reason"], len(sequence["tokens"])) == ("length", CONTEXT_TOKENS - len(prompt))


@pytest.mark.parametrize(("name", "excess"), [("prompt as long as the context", 0), ("prompt above the context", 5)])
def test_a_prompt_that_leaves_no_room_is_refused_in_known_words(run: Run, name: str, excess: int) -> None:
    """D11: users match on this sentence."""
    limit = CONTEXT_TOKENS
    error = run.error(name)
    assert error["error"] == "BadRequestError"
    words = f"Prompt length plus max_tokens exceeds the model's context window: {limit + excess} + 4 > {limit}"
    assert words in error["message"]


def test_prompt_logprobs_come_value_by_value(run: Run) -> None:
    result = run.checked("with prompt logprobs")
    assert len(result["sequences"]) == 2
    expected.check_prompt_logprobs(result["prompt_logprobs"], run.stack.model, PROMPT)
    assert result["topk_prompt_logprobs"] is None
    assert run.checked("one")["prompt_logprobs"] is None


def test_compute_logprobs_is_the_baseline_at_temperature_one(run: Run) -> None:
    """D15"""
    expected.check_prompt_logprobs(run.result("compute_logprobs"), run.stack.model, PROMPT)
    assert run.result("compute_logprobs of one") == [None]


def test_top_prompt_logprobs(run: Run) -> None:
    result = run.checked("with top prompt logprobs")
    expected.check_prompt_logprobs(result["prompt_logprobs"], run.stack.model, PROMPT)
    expected.check_topk_prompt_logprobs(result["topk_prompt_logprobs"], run.stack.model, PROMPT, 3)
    alone = run.checked("with top prompt logprobs only")
    assert alone["topk_prompt_logprobs"] == result["topk_prompt_logprobs"]
    assert alone["prompt_logprobs"] is None


def test_top_logprobs_of_sampled_tokens(run: Run) -> None:
    if run.sdk.release < (0, 29):
        assert "with top logprobs" not in run.requests
        return
    request = run.requests["with top logprobs"]
    for choice, sequence in enumerate(run.checked("with top logprobs")["sequences"]):
        expected.check_topk_logprobs(sequence, run.stack.model, request, choice, 3)


def test_only_the_last_prompt_logprobs(run: Run) -> None:
    if run.sdk.release < (0, 33):
        assert "last two" not in run.requests
        return
    for logprobs in (run.checked("last two")["prompt_logprobs"], run.result("compute the last two")):
        assert logprobs[:-2] == [None] * (len(PROMPT) - 2)
        expected.check_prompt_logprobs(logprobs, run.stack.model, PROMPT, last_n=2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("image", "image"),
        ("empty prompt", "the prompt is empty"),
        ("too hot", "temperature"),
        ("alternatives", "prompt_alt_tokens_k"),
        ("targets", "target_prompt_logprobs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(run: Run, name: str, words: str) -> None:
    """A17 among others: one clear 400."""
    if name not in run.requests:
        assert run.sdk.release < (0, 33)
        return
    error = run.error(name)
    assert error["error"] == "BadRequestError"
    assert words in error["message"]


def test_a_long_stop_list_is_honoured_or_refused_by_name(run: Run) -> None:
    """vLLM's /v1/completions takes four."""
    if run.protocol == "completions":
        error = run.error("many stops")
        assert error["error"] == "BadRequestError"
        assert "stop has 5 strings" in error["message"]
        assert "--upstream-protocol" in error["message"]
    else:
        assert run.tokens("many stops") == run.tokens("stop strings")


def test_an_empty_chunk_counts_for_nothing(run: Run) -> None:
    """A17"""
    assert run.tokens("empty chunk") == [sequence[:4] for sequence in run.tokens("one")]


def test_an_unknown_model_is_refused_by_name(run: Run) -> None:
    error = run.told["client_errors"]["unknown"]
    assert error["error"] in ("NotFoundError", "BadRequestError")
    assert "no/such-model" in error["message"]


def test_many_at_once_are_all_their_own(run: Run) -> None:
    """A5: two sampling sessions with the same seq_ids and different prompts, over changing connections."""
    seen = {tuple(run.tokens(f"many {number}")[0]) for number in range(MANY)}
    assert len(seen) == MANY


def test_sequences_are_labelled(run: Run) -> None:
    """A8"""
    if run.sdk.release >= (0, 26):
        results = [answer["result"] for answer in run.told["answers"].values() if "result" in answer]
        labels = [seq["sequence_id"] for result in results if isinstance(result, dict) for seq in result["sequences"]]
        assert len(set(labels)) == len(labels) > MANY
        assert all(labels)


def test_the_models_are_told(run: Run) -> None:
    assert run.told["base_models"] == {"main": run.stack.model, "other": run.stack.model}
    assert run.told["offered"] == [run.stack.model]


def test_a_closed_client_has_finished_its_session(run: Run) -> None:
    """SDKs before 0.27.2 cannot: their sessions end by silence."""
    connection = run.stack.gateway.connect(API_KEY)
    heartbeat = connection.post("/api/v1/session_heartbeat", {"session_id": run.told["session_id"]})
    connection.close()
    assert heartbeat.status == (410 if run.sdk.release >= (0, 27, 2) else 200)


def test_the_session_poll_is_used_where_it_is_offered(run: Run) -> None:
    """Not before 0.27.2: there it would poll for ever."""
    completed = sum("result" in answer for answer in run.told["answers"].values())
    run.stack.gateway.counter_reaches("completed", completed)
    if run.sdk.release >= (0, 27, 2) and run.session_poll == "auto":
        run.stack.gateway.counter_reaches("session_polls", 1)
    else:
        assert run.stack.gateway.counter("session_polls") == 0


def test_nothing_is_logged_that_would_worry_a_user(run: Run) -> None:
    """A 200 `try_again`, a failing heartbeat or a 429 would each be a warning. What was refused is an error, once."""
    refused = sum("error" in answer for answer in run.told["answers"].values())
    about_refusals = [line for line in run.told["warnings"] if "BadRequestError" in line]
    assert run.told["warnings"] == about_refusals
    assert len(about_refusals) == refused


def test_each_worker_took_its_part(run: Run) -> None:
    assert {"127.0.0.2", "127.0.0.3"} <= set(run.stack.simulator.stats()["by_source_ip"])
