"""An RL loop with the public tinker SDK, without a GPU: save weights, sample the adapter just saved, score, repeat.

These parts are real: the SDK, the gateway, one adapter per step that it loads on demand, many samples in flight, and
the logprobs of policy and reference. The model is not (a simulated vLLM, unless you use a real one), and neither is the
trainer, which writes an empty adapter where a real one would write weights. README.md beside this file says how to run
it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tinker
from tinker import types

# Every vocabulary has these low ids.
FIRST_TOKEN = 100


@dataclass(frozen=True)
class Rollout:
    """A sampled sequence. `kl` is the divergence of policy and reference, estimated on this sequence alone."""

    step: int
    prompt: list[int]
    seed: int
    choice: int
    tokens: list[int]
    logprobs: list[float]
    reward: float
    advantage: float
    kl: float


class Trainer:
    """Stand in for a `TrainingClient`. Every checkpoint has its own name and directory, for good."""

    def __init__(self, adapters: Path, run_id: str) -> None:
        self._directory = adapters / run_id
        self._run_id = run_id

    def save_weights_for_sampler(self, step: int, learned: float) -> str:
        """Return the `tinker://` path that samples the new weights."""
        checkpoint = f"{step:06}"
        directory = self._directory / checkpoint
        directory.mkdir(parents=True)
        # vLLM looks for this file; adapter_model.safetensors would lie beside it.
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "mean_advantage_learned": learned}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        return f"tinker://{self._run_id}/sampler_weights/{checkpoint}"


def ready(client: Any) -> Any:
    """Return the client: from SDK 0.38 on `create_sampling_client` returns a future of it, before that the client."""
    return client.result() if hasattr(client, "result") else client


def reward_of(tokens: list[int]) -> float:
    """Return the reward of a result, which could be any function; here, the fraction of even tokens."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def sample_step(policy: Any, reference: Any, step: int, options: argparse.Namespace) -> list[Rollout]:
    """Sample one batch: all prompts at once, with `--group-size` sequences each."""
    prompts = [[FIRST_TOKEN + step, *range(FIRST_TOKEN, FIRST_TOKEN + 8), number] for number in range(options.prompts)]
    seeds = [1000 * step + number for number in range(options.prompts)]
    futures = [
        policy.sample(
            prompt=types.ModelInput.from_ints(prompt),
            num_samples=options.group_size,
            sampling_params=types.SamplingParams(max_tokens=options.max_tokens, temperature=1.0, seed=seed),
        )
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    groups = [future.result().sequences for future in futures]
    scores = [
        [reference.compute_logprobs(types.ModelInput.from_ints(prompt + sequence.tokens)) for sequence in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]
    rollouts: list[Rollout] = []
    for prompt, seed, group, of_reference in zip(prompts, seeds, groups, scores, strict=True):
        rewards = [reward_of(sequence.tokens) for sequence in group]
        baseline = statistics.mean(rewards)
        for choice, (sequence, reward, score) in enumerate(zip(group, rewards, of_reference, strict=True)):
            reference_logprobs = score.result()[len(prompt) :]
            kl = sum(sequence.logprobs) - sum(reference_logprobs)
            rollouts.append(
                Rollout(step, prompt, seed, choice, sequence.tokens, sequence.logprobs, reward, reward - baseline, kl)
            )
    return rollouts


def main() -> None:
    options = parse()
    service = tinker.ServiceClient()
    reference = ready(service.create_sampling_client(base_model=options.base_model))
    trainer = Trainer(options.adapters, options.run_id)
    learned = 0.0
    with options.out.open("w") as out:
        for step in range(options.steps):
            began_s = time.monotonic()
            path = trainer.save_weights_for_sampler(step, learned)
            policy = ready(service.create_sampling_client(model_path=path))
            rollouts = sample_step(policy, reference, step, options)
            # A real loop would here call forward_backward and optim_step with tokens, logprobs and advantages.
            learned += statistics.mean(abs(rollout.advantage) for rollout in rollouts)
            out.writelines(json.dumps(asdict(rollout)) + "\n" for rollout in rollouts)
            reward = statistics.mean(rollout.reward for rollout in rollouts)
            kl = statistics.mean(rollout.kl for rollout in rollouts)
            seconds = time.monotonic() - began_s
            print(f"step {step}  {path}  {len(rollouts)} rollouts in {seconds:.2f} s  reward {reward:.3f}  kl {kl:.2f}")
    print(f"done: {options.out}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="sim/tiny")
    parser.add_argument("--adapters", type=Path, default=Path("adapters"), help="where the gateway's --lora-path looks")
    parser.add_argument("--run-id", default=f"rl-{time.time_ns() // 1_000_000}", help="another one for each run")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("rollouts.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
