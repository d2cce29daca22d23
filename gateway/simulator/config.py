"""The configuration of a simulated vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LoraMode = Literal["any", "files", "off"]
Mode = Literal["instant", "latency", "barrier"]


@dataclass(frozen=True, slots=True)
class SimulatorConfig:
    """The settings of one simulated vLLM.

    `mode`: `instant` answers at once. `latency` takes `gen_seconds` per request, `max_num_seqs` at a time. `barrier`
    holds all requests and answers them together, once `barrier_size` (0: any number) have arrived or none has arrived
    for `barrier_idle_s`. `lora`: adapters are loaded from any path, only where files are, or not at all. `scale_out`:
    serve `/inference/v1/generate`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    models: tuple[str, ...] = ("sim/tiny",)
    max_model_len: int = 131_072
    mode: Mode = "instant"
    gen_seconds: float = 1.0
    max_num_seqs: int = 0  # 0: no limit
    barrier_idle_s: float = 0.2
    barrier_size: int = 0
    raw_logprobs: bool = False
    lora: LoraMode = "any"
    scale_out: bool = True
    # uvicorn's default, and so vLLM's.
    keep_alive_s: float = 5.0
    backlog: int = 65_535
