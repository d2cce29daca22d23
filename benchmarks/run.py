"""Measure what the gateway costs: steps of a sample beside baselines, and whole samples beside their targets.

    python benchmarks/run.py [--only micro|macro|NAME ...] [--quick] [--rounds N] [--out results.json]
    python benchmarks/run.py --show results.json

Costs are CPU seconds, not wall time, so that other processes on the machine matter least. In the micro part the ways
take turns, and a ratio is the median of the ratios of each round. The macro part runs `gateway bench`, which compares
every token of every sample; the table shows the least and the median of the rounds of a row.

`--out` adds to an existing file: parts of the micro part are replaced, rows of the macro part get further rounds.

Exit code 1 if a result is wrong. `--quick` only checks that everything works: its figures say nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from benchmarks.macro import bench_runs
from benchmarks.macro.rows import ROWS, TARGETS
from benchmarks.micro import forward, serving, store, wire
from benchmarks.tables import figures_table, say
from benchmarks.turns import Figure, Findings, Plan, WrongResult
from gateway.bench.watch import procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

MICRO: dict[str, Callable[[Plan], Coroutine[None, None, Findings]]] = {
    "decode": wire.decode,
    "encode": wire.encode,
    "request": wire.request,
    "poll": wire.poll,
    "generations": wire.generations,
    "store": store.store,
    "forward": forward.forward,
    "serving": serving.serving,
}
MACRO = {row.name: row for row in ROWS}
MICRO_ROUNDS, MACRO_ROUNDS, QUICK_ROUNDS = 7, 3, 2
# The thresholds of a worker, for the gateway's way and the baselines alike.
GC_THRESHOLDS = (10_000, 0, 2_500)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.show is not None:
        show(json.loads(options.show.read_text()))
        return 0
    document = begun(options)
    try:
        run_all(options, document)
    except WrongResult as error:
        say(f"WRONG: {error}")
        return 1
    finally:
        if options.out is not None:
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def begun(options: argparse.Namespace) -> dict[str, Any]:
    """Return a document with what `--out` already holds."""
    empty = {"machine": msgspec.to_builtins(procfs.machine()), "quick": options.quick, "micro": {}, "macro": {}}
    if options.out is None or not options.out.exists():
        return empty
    kept: dict[str, Any] = json.loads(options.out.read_text())
    return empty | {part: kept[part] for part in ("micro", "macro")}


def run_all(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Add results to `document` as they come, so that those before a wrong result are kept."""
    for name in chosen(options.only, "micro", MICRO):
        document["micro"][name] = run_micro(name, options)
    names = chosen(options.only, "macro", MACRO)
    rounds = options.rounds or (1 if options.quick else MACRO_ROUNDS)
    for name, report in bench_runs.run_rows([MACRO[name] for name in names], rounds, quick=options.quick, say=say):
        document["macro"].setdefault(name, []).append(report)
    show(document)


def show(document: dict[str, Any]) -> None:
    say(f"\n{document['machine']}" + "; a quick run, whose figures say nothing" * document["quick"])
    for name, found in document["micro"].items():
        say(f"\n{name}\n")
        say(figures_table([Figure(**figure) for figure in found["figures"]]))
        for note in found["notes"]:
            say(note)
    if document["macro"]:
        say("\n" + bench_runs.targets_table(TARGETS, document["macro"]))
        say("\n" + bench_runs.details_table(document["macro"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["micro", "macro", *MICRO, *MACRO]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="only a few calls and small runs, in a minute or two")
    parser.add_argument(
        "--rounds", type=int, help=f"default: {MICRO_ROUNDS} of the micro part, {MACRO_ROUNDS} of the macro part"
    )
    parser.add_argument("--out", type=Path, help="write all results as JSON")
    parser.add_argument("--show", type=Path, help="run nothing; print the tables of a file that --out wrote")
    return parser.parse_args(arguments)


def chosen(only: Sequence[str] | None, part: str, names: Sequence[str] | dict[str, Any]) -> list[str]:
    """Return the selected `names`, or all of them if their part or nothing was selected."""
    if not only or part in only:
        return list(names)
    return [name for name in names if name in only]


def run_micro(name: str, options: argparse.Namespace) -> dict[str, Any]:
    plan = Plan(options.rounds or (QUICK_ROUNDS if options.quick else MICRO_ROUNDS), options.quick)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    found = uvloop.run(MICRO[name](plan))
    say(f"{name}: {len(found.figures)} figures of {plan.rounds} rounds")
    return asdict(found)


if __name__ == "__main__":
    sys.exit(main())
