"""Use tinker-cookbook's own completers with the gateway: tokens to tokens, and messages to a message.

The cookbook gets a `SamplingClient` of the public SDK and knows nothing of the gateway. Its renderers need a tokenizer
from the Hugging Face hub; the one below turns letters into tokens, so that this runs without a download.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import tinker
from tinker import types
from tinker_cookbook.completers import TinkerMessageCompleter, TinkerTokenCompleter

# One token per character, above the ids that a vocabulary reserves.
FIRST_TOKEN = 1000
LETTERS = "abcdefghijklmnopqrstuvwxyz .,?!"


class SpellingRenderer:
    """A renderer with the methods that `TinkerMessageCompleter` calls."""

    def build_generation_prompt(self, messages: list[dict[str, Any]]) -> types.ModelInput:
        text = " ".join(f"{message['role']}. {message['content']}" for message in messages).lower()
        return types.ModelInput.from_ints([FIRST_TOKEN + LETTERS.index(c) for c in text if c in LETTERS])

    def get_stop_sequences(self) -> list[int]:
        return []

    def parse_response(self, tokens: list[int]) -> tuple[dict[str, Any], bool]:
        content = "".join(LETTERS[token % len(LETTERS)] for token in tokens)
        return {"role": "assistant", "content": content}, True


async def complete(options: argparse.Namespace) -> dict[str, Any]:
    client = tinker.ServiceClient().create_sampling_client(base_model=options.base_model)
    renderer = SpellingRenderer()
    of_tokens = TinkerTokenCompleter(client, max_tokens=options.max_tokens)
    of_messages = TinkerMessageCompleter(client, renderer, max_tokens=options.max_tokens)  # type: ignore[arg-type]
    questions = [[{"role": "user", "content": f"{'why? ' * number}"}] for number in range(1, options.questions + 1)]
    prompts = [renderer.build_generation_prompt(question) for question in questions]
    # Like the cookbook's rollouts: many conversations at once, one sample each.
    tokens = await asyncio.gather(*(of_tokens(prompt, stop=[]) for prompt in prompts))
    answers = await asyncio.gather(*(of_messages(question) for question in questions))
    return {
        "prompts": [prompt.to_ints() for prompt in prompts],
        "completions": [{"tokens": found.tokens, "logprobs": found.logprobs} for found in tokens],
        "messages": [answer["content"] for answer in answers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="sim/tiny")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    print(json.dumps(asyncio.run(complete(parser.parse_args()))))


if __name__ == "__main__":
    main()
