"""The simulator's model function: fixed values, and what a client relies on when it checks a result."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.simulator import tokens as oracle
from gateway.simulator.tokens import (
    ASKS_TO_END,
    EOS,
    GREEDY_SEED,
    IMAGE,
    UNSEEDED,
    VOCAB,
    alternatives,
    end_position,
    expanded,
    find_seed,
    image_tokens,
    prompt_alternatives,
    prompt_logprobs,
    reported,
    sampled,
)

PROMPT = [10, 11, 12]


@pytest.mark.parametrize(
    ("model", "seed", "tokens", "logprobs"),
    [
        ("sim/tiny", 7, [19534, 4751, 17718, 10140], [-6.762633323669434, -6.510709285736084, -8.15712833404541]),
        ("sim/tiny", GREEDY_SEED, [21046, 16349, 9648, 22549], [-2.6097283363342285, -11.983369827270508]),
        ("lora/a", 7, [6872, 15006, 23726, 5499], [-0.19860665500164032, -3.4139206409454346]),
    ],
)
def test_golden_values(model: str, seed: int, tokens: list[int], logprobs: list[float]) -> None:
    """Copies of the file check results elsewhere, so its values must never change."""
    drawn, values = sampled(model, PROMPT, seed, 4)
    assert (str(drawn.dtype), str(values.dtype)) == ("int32", "float32")
    assert drawn.tolist() == tokens
    assert values[: len(logprobs)].tolist() == logprobs


def test_golden_prompt_values() -> None:
    values = prompt_logprobs("sim/tiny", PROMPT)
    assert np.isnan(values[0])
    assert values[1:].tolist() == [-5.823722839355469, -9.74952507019043]
    ids, theirs = prompt_alternatives("sim/tiny", PROMPT, 2)
    assert ids[1].tolist() == [25772, 1691]
    assert theirs[1].tolist() == [-0.22082680463790894, -0.620826780796051]


def test_integer_keys_are_those_of_arrays() -> None:
    """`find_seed` draws from arrays of keys, `sampled` from keys made one by one."""
    for base, part in [(0, 0), (123, -3), (2**64 - 1, 2**70), (1 << 63, UNSEEDED)]:
        in_array = oracle._draws(base ^ (part & (2**64 - 1)), 1)[0]
        assert oracle._key(base, part) == int(in_array)


def test_longer_draws_begin_with_the_shorter() -> None:
    short, long = sampled("m", PROMPT, 1, 5), sampled("m", PROMPT, 1, 500)
    assert np.array_equal(short[0], long[0][:5])
    assert np.array_equal(short[1], long[1][:5])


@given(
    prompt=st.lists(st.integers(8, VOCAB - 1), min_size=1, max_size=8),
    seed=st.integers(-(2**63), 2**63 - 1),
    n=st.integers(0, 40),
)
def test_draws_are_tokens_and_logprobs(prompt: list[int], seed: int, n: int) -> None:
    tokens, logprobs = sampled("m", prompt, seed, n)
    assert len(tokens) == len(logprobs) == n
    assert ((tokens > EOS) & (tokens < VOCAB)).all()
    assert ((logprobs <= 0) & np.isfinite(logprobs)).all()


def test_another_model_prompt_or_seed_shows_in_the_first_token() -> None:
    ours = sampled("m", PROMPT, 1, 1)[0][0]
    others = [
        sampled("m2", PROMPT, 1, 1),
        sampled("m", [*PROMPT, 13], 1, 1),
        sampled("m", PROMPT[::-1], 1, 1),
        sampled("m", PROMPT, 2, 1),
    ]
    assert ours not in [tokens[0] for tokens, _ in others]


def test_only_a_prompt_that_asks_for_it_ends() -> None:
    assert end_position("m", PROMPT) is None
    at = end_position("m", [10, ASKS_TO_END])
    assert at is not None
    assert sampled("m", [10, ASKS_TO_END], 1, at + 1)[0][at] == EOS
    assert EOS not in sampled("m", [10, ASKS_TO_END], 1, at)[0]


def test_a_drawn_seed_is_found_again() -> None:
    for seed in (0, 4242, UNSEEDED - 1):
        assert find_seed("m", PROMPT, sampled("m", PROMPT, seed, 3)[0]) == seed
    tokens = sampled("m", PROMPT, 5, 3)[0]
    assert find_seed("other", PROMPT, tokens) != 5


def test_reported_logprobs_scale_with_the_temperature() -> None:
    """D15: differences double from temperature 1 to 0.5; greedy reports those of temperature 1."""
    values = sampled("m", PROMPT, 1, 8)[1]
    assert np.array_equal(reported(values, 1.0), values)
    assert np.array_equal(reported(values, 0.0), values)
    assert np.array_equal(np.diff(reported(values, 0.5)), 2 * np.diff(values))


def test_alternatives_are_distinct_and_best_first() -> None:
    ids, logprobs = alternatives("m", PROMPT, 3, 50, 20)
    assert ids.shape == logprobs.shape == (50, 20)
    assert all(len(set(row)) == 20 for row in ids.tolist())
    assert (np.diff(logprobs, axis=1) < 0).all()


def test_the_file_stands_alone(tmp_path: Path) -> None:
    """The file must work with numpy alone, without our package."""
    found = importlib.util.find_spec("gateway.simulator.tokens")
    assert found is not None and found.origin is not None
    (tmp_path / "tokens_copy.py").write_text(Path(found.origin).read_text())
    script = (
        "import sys, tokens_copy; print(tokens_copy.sampled('sim/tiny', [10, 11, 12], 7, 1)[0][0]);"
        "assert not {name.split('.')[0] for name in sys.modules} & {'gateway', 'shared', 'orjson'}"
    )
    # -I would hide the copy too; in another directory ours are found by nothing but the editable install.
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "19534"


def test_images_take_the_places_of_their_marks() -> None:
    first, second = image_tokens(b"one"), image_tokens(b"two")
    assert first != second
    tokens, places = expanded([8, IMAGE, 9, IMAGE], [b"one", b"two"])
    assert tokens == [8, *first, 9, *second]
    assert [tokens[offset : offset + length] for offset, length in places] == [first, second]
    assert IMAGE not in tokens


@pytest.mark.parametrize("images", [[], [b"one"], [b"one", b"two", b"three"]])
def test_images_must_have_places(images: list[bytes]) -> None:
    with pytest.raises(ValueError, match="placeholders"):
        expanded([8, IMAGE, 9, IMAGE], images)
