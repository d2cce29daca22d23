"""One choice of a `/v1/completions` reply: numbers go from the parser's buffers into numpy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from shared.wire import json_arrays
from shared.wire.vllm.scores import ReplyError, are_decimal, in_int32, numbers, sampled_logprobs, token_ids, topk_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shared.core.result import TopK
    from shared.wire.json_arrays import JsonValue

_TOKEN_KEY: Final = "token_id:"
_TOKEN: Final = re.compile(_TOKEN_KEY + "[0-9]+")


def count_tokens(choice: JsonValue) -> int:
    """Count the tokens of a choice, in whichever form they are given."""
    ids = choice.get("token_ids")
    scored = choice.get("logprobs")
    values = scored.get("token_logprobs") if scored is not None else None
    return max(len(listed) if listed is not None else 0 for listed in (ids, values))


def sampled(choice: JsonValue) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the sampled tokens and their logprobs. Raises `ReplyError`."""
    scored = choice.get("logprobs")
    if scored is None:
        raise ReplyError("without logprobs")
    listed = choice.get("token_ids")
    # A vLLM older than `return_token_ids` gives the ids as `token_id:N` texts only.
    ids = token_ids(listed) if listed is not None else _ids_of(json_arrays.plain(scored["tokens"]))
    return ids, sampled_logprobs(scored["token_logprobs"])


def sampled_topk(choice: JsonValue, k: int, tokens: int) -> TopK:
    """Return the k best at each of the `tokens` places. Raises `ReplyError`."""
    rows = json_arrays.plain(choice["logprobs"]["top_logprobs"])
    if len(rows) != tokens:
        raise ReplyError(f"with {tokens} token ids and {len(rows)} rows of top_logprobs")
    ids = _ids_of([key for row in rows for key in row])
    return topk_rows(ids, numbers([value for row in rows for value in row.values()]), [len(row) for row in rows], k)


def prompt_rows(reply: JsonValue, first_choice: JsonValue) -> JsonValue:
    """Return the rows of `prompt_logprobs`, or None. With several choices each repeats them."""
    return first_choice.get("prompt_logprobs")


def _ids_of(texts: Sequence[Any]) -> NDArray[np.int64]:
    """Return the ids of `token_id:N` texts. There may be a million, so each step handles all of them at once."""
    digits = [text[len(_TOKEN_KEY) :] for text in texts if type(text) is str and text.startswith(_TOKEN_KEY)]
    if len(digits) != len(texts) or not are_decimal(digits):
        wrong = next(text for text in texts if not _TOKEN.fullmatch(str(text)))
        raise ReplyError(f"with a token written as {str(wrong)[:20]!r} instead of {_TOKEN_KEY}N")
    return in_int32(digits)
