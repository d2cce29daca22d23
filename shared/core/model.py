"""Values: immutable, compared by their fields, cheap to make, and safe to log. And things, which change.

A sample makes a dozen of them. A frozen dataclass sets each field through `object.__setattr__`, which takes four to ten
times as long as a msgspec struct does.

The nouns: what a sample asks for, and what comes back.

Everything here is frozen and knows nothing of JSON, protobuf, HTTP or Redis.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import msgspec


class Value(msgspec.Struct, frozen=True):
    """An immutable value whose `repr` leaves out bytes: prompts, tokens, results and bodies do not belong in a log."""

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = ", ".join(f"{name}={value!r}" for name, value in values if not isinstance(value, bytes | memoryview))
        return f"{type(self).__name__}({shown})"


class Entity(msgspec.Struct, eq=False):
    """An object with changing state, compared by identity; made in a fifth of a dataclass' time."""


# The SDK gives every unpickled client its own block of seq_ids: seq_id // CLONE_SPAN is the clone.
CLONE_SPAN = 1_000_000_000
MAX_SEQ_ID = 2**63 - 1


class SampleKey(NamedTuple):
    """A sample's key in the store: the short name of its sampling session, and its seq_id."""

    session_key: str
    seq_id: int

    @property
    def clone_id(self) -> int:
        return self.seq_id // CLONE_SPAN


class ModelRef(Value, frozen=True):
    """The model of a sampling session; exactly one of the two is set."""

    base_model: str | None = None
    model_path: str | None = None

    @property
    def name(self) -> str:
        return self.base_model or self.model_path or ""


class SamplingSession(Value, frozen=True):
    """A sampling session as rebuilt from its id alone."""

    sampling_session_id: str
    session_key: str
    session_id: str
    model: ModelRef

    def key(self, seq_id: int) -> SampleKey:
        return SampleKey(self.session_key, seq_id)


class SamplingParams(Value, frozen=True):
    """Sampling parameters as the SDK means them.

    `stop`: None = the model's own EOS stops; `()` = no stops at all, EOS included; otherwise all strings or all
    token ids. `max_tokens`: None = as much as the context leaves. `top_k`: -1 = off.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Image(Value, frozen=True):
    """An image in a prompt. `format`: png or jpeg; `data`: the file in base64, nothing but the characters of that."""

    format: str
    data: bytes


# Stands in a prompt for an image, until the model is known whose placeholder it becomes.
IMAGE_MARK = b"?"


class SampleSpec(Value, frozen=True):
    """One accepted `asample`, still without a Python object per prompt token.

    `prompt`: the token ids as the inside of a JSON array, without the brackets and without white space (`b"1,2,3"`).
    `digest`: 16 bytes over everything that decides the result; equal digests are the same request. `images`: in the
    order of their `IMAGE_MARK`s in `prompt`; `prompt_tokens` is then what the client expects.
    """

    prompt: bytes
    prompt_tokens: int
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    digest: bytes = b""
    images: tuple[Image, ...] = ()

    @property
    def size_bytes(self) -> int:
        images_bytes = sum(len(image.data) for image in self.images) if self.images else 0
        return len(self.prompt) + images_bytes


class Category(Enum):
    """Whose fault a FAILED sample is, in the SDK's words."""

    USER = "user"
    SERVER = "server"
    UNKNOWN = "unknown"


class Failure(Value, frozen=True):
    """Why a sample FAILED or was CANCELLED; shown to the SDK's user."""

    message: str
    category: Category
