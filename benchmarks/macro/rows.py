"""The runs behind the table of targets, and the targets themselves. Pure.

Small: prompts of 128 tokens, results of 64. In steady state a run has ten times as many samples as are in flight; at a
barrier it has just as many, since everything ends at once.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Report = Mapping[str, Any]
    Reports = Mapping[str, Sequence[Report]]

MIB: Final = 1024 * 1024
# A quick run only checks that everything works.
_QUICK_SHARE: Final = 32
_QUICK_CONCURRENCY: Final = 16
_QUICK_TOKENS: Final = 2_048


@dataclass(frozen=True, slots=True)
class Row:
    """One run of `gateway bench`. `mode` is the mode of the simulated vLLM."""

    name: str
    concurrency: int
    samples: int
    mode: Literal["instant", "barrier"] = "instant"
    prompt_tokens: int = 128
    max_tokens: int = 64
    session_poll: bool = False
    workers: int = 2
    client_processes: int = 1

    def quick(self) -> Row:
        concurrency = max(_QUICK_CONCURRENCY, self.concurrency // _QUICK_SHARE)
        return replace(
            self,
            concurrency=concurrency,
            samples=concurrency if self.mode == "barrier" else 2 * concurrency,
            prompt_tokens=min(self.prompt_tokens, _QUICK_TOKENS),
            max_tokens=min(self.max_tokens, _QUICK_TOKENS),
            client_processes=1,
        )

    def arguments(self) -> list[str]:
        """Return the arguments of `gateway bench`; the seed is fixed, so that every run draws the same samples."""
        waiting = "--session-poll" if self.session_poll else "--no-session-poll"
        numbers = {
            "--samples": self.samples,
            "--concurrency": self.concurrency,
            "--prompt-tokens": self.prompt_tokens,
            "--max-tokens": self.max_tokens,
            "--workers": self.workers,
            "--client-processes": self.client_processes,
            "--seed": 1,
        }
        flags = [text for flag, number in numbers.items() for text in (flag, str(number))]
        return [*flags, "--vllm-mode", self.mode, *(("--gen-seconds", "1") if self.mode == "barrier" else ()), waiting]


@dataclass(frozen=True, slots=True)
class Target:
    """An upper limit: `value` of a report of `row` is at most `limit`, or `limit` times that of `relative_to`."""

    what: str
    row: str
    value: Callable[[Report], float | None]
    limit: float
    unit: str
    relative_to: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and its measurements. `met` is judged by the least, since other programs only ever add CPU."""

    target: Target
    limit: float | None
    least: float | None
    median: float | None

    @property
    def met(self) -> bool | None:
        return None if self.limit is None or self.least is None else self.least <= self.limit


def cpu_ms(report: Report) -> float | None:
    """Return the CPU of the worker processes per sample."""
    return _number(report["gateway"]["cpu_ms_per_sample"])


def worker_mib(report: Report) -> float | None:
    """Return the peak memory of the largest worker."""
    peak_bytes = _number(report["gateway"]["peak_rss_bytes_per_worker"])
    return None if peak_bytes is None else peak_bytes / MIB


def healthz_p99_ms(report: Report) -> float | None:
    return _number((report["gateway"]["healthz_ms"] or {}).get("p99"))


def redis_commands(report: Report) -> float | None:
    return _number(report["redis"]["commands_per_sample"])


def redis_cpu_us(report: Report) -> float | None:
    cpu_seconds = _number(report["redis"]["cpu_seconds"])
    return None if cpu_seconds is None else cpu_seconds * 1e6 / report["samples"]["completed"]


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _steady(concurrency: int, **more: Any) -> Row:
    processes = 2 if concurrency > 2_048 else 1
    return Row(f"small-{concurrency}", concurrency, 10 * concurrency, client_processes=processes, **more)


ROWS: Final = (
    *(_steady(concurrency) for concurrency in (512, 2_048, 4_096, 16_384)),
    *(Row(f"barrier-{count}", count, count, "barrier") for count in (512, 2_048, 4_096)),
    Row("session-poll", 2_048, 20_480, session_poll=True),
    Row("results-32k", 32, 256, max_tokens=32_768),
    Row("results-262k", 8, 48, max_tokens=262_144),
    Row("prompts-32k", 64, 512, prompt_tokens=32_768),
    *(Row(f"workers-{workers}", 2_048, 20_480, workers=workers) for workers in (1, 2, 4)),
    Row("short-run", 2_048, 4_096),
    Row("long-run", 2_048, 40_960),
)

TARGETS: Final = (
    Target("small, 512 in flight", "small-512", cpu_ms, 0.40, "ms"),
    Target("small, 2,048 in flight", "small-2048", cpu_ms, 1.3, "ms", relative_to="small-512"),
    Target("small, 4,096 in flight", "small-4096", cpu_ms, 1.3, "ms", relative_to="small-512"),
    Target("small, 16,384 in flight", "small-16384", cpu_ms, 1.5, "ms", relative_to="small-512"),
    Target("small, barrier of 512", "barrier-512", cpu_ms, 0.8, "ms"),
    Target("small, barrier of 2,048", "barrier-2048", cpu_ms, 0.8, "ms"),
    Target("small, barrier of 4,096", "barrier-4096", cpu_ms, 0.8, "ms"),
    Target("small, session poll, 2,048 in flight", "session-poll", cpu_ms, 0.45, "ms"),
    Target("result of 32,768 tokens", "results-32k", cpu_ms, 6.0, "ms"),
    Target("result of 262,144 tokens", "results-262k", cpu_ms, 45.0, "ms"),
    Target("prompt of 32,768 tokens", "prompts-32k", cpu_ms, 1.5, "ms"),
    Target("worker memory, 512 in flight", "small-512", worker_mib, 120.0, "MiB"),
    Target("worker memory, ten times as many samples", "long-run", worker_mib, 1.1, "MiB", relative_to="short-run"),
    Target("healthz p99, barrier of 4,096", "barrier-4096", healthz_p99_ms, 50.0, "ms"),
    Target("healthz p99, results of 262,144", "results-262k", healthz_p99_ms, 250.0, "ms"),
    Target("Redis commands, small", "small-2048", redis_commands, 6.0, ""),
    Target("Redis CPU, small", "small-2048", redis_cpu_us, 40.0, "us"),
    Target("small, 1 worker, beside 2", "workers-1", cpu_ms, 1.15, "ms", relative_to="workers-2"),
    Target("small, 4 workers, beside 2", "workers-4", cpu_ms, 1.15, "ms", relative_to="workers-2"),
)


def judge(target: Target, reports: Reports) -> Verdict:
    values = _values(target, reports.get(target.row, ()))
    limit = _limit(target, reports)
    if not values:
        return Verdict(target, limit, None, None)
    return Verdict(target, limit, min(values), statistics.median(values))


def _limit(target: Target, reports: Reports) -> float | None:
    if target.relative_to is None:
        return target.limit
    others = _values(target, reports.get(target.relative_to, ()))
    return target.limit * min(others) if others else None


def _values(target: Target, reports: Sequence[Report]) -> list[float]:
    return [value for report in reports if (value := target.value(report)) is not None]


def memory_bytes_per_in_flight(small: Report, large: Report) -> float | None:
    """Return the growth of the workers' peak per sample in flight, from two reports that differ in that number."""
    grown = [_number(report["gateway"]["peak_rss_bytes"]) for report in (small, large)]
    more = large["config"]["concurrency"] - small["config"]["concurrency"]
    return None if None in grown or more <= 0 else (grown[1] - grown[0]) / more  # type: ignore[operator]
