"""The documents match the code: names, defaults, codes, paths, links, rooms and tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click
import msgspec
import pytest

from gateway import cli
from gateway.admin.app import admin_app
from gateway.admin.report import status
from gateway.admin.view import SlotView, View
from gateway.bench.report.report import Report
from gateway.machine.kernel import Usage
from gateway.settings.table import FLAGS
from shared.channel import Status, UpstreamStatus
from shared.core.faults import FaultClass
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.counters import NAMES as COUNTERS
from shared.counters import Counters
from shared.store.contract import StoreInfo
from shared.store.schema import Keys
from shared.wire.sdk import calls
from tests.unit.test_layout import MAY_IMPORT
from workers.api import app, replies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.settings.flag import Flag

ROOT: Final = Path(__file__).parents[2]
FLAG: Final = re.compile(r"--[a-z][a-z-]*[a-z]")
CODE: Final = re.compile(r"`([^`]+)`")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


README: Final = text_of("README.md")
INTERFACE: Final = text_of("docs/interface.md")
OPERATIONS: Final = text_of("docs/operations.md")
WIRE: Final = text_of("docs/wire.md")
ARCHITECTURE: Final = text_of("docs/architecture.md")
UPSTREAM: Final = text_of("docs/upstream.md")
RELIABILITY: Final = text_of("docs/reliability.md")
SECURITY: Final = text_of("docs/security.md")


def section(text: str, heading: str) -> str:
    """Return a section: from a heading, or the start of one, to the next heading of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    match = re.search(rf"^{re.escape(heading)}.*?(?=^#{{1,{level}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"there is no section {heading!r}"
    return match.group()


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each table row; `\\|` does not end a cell."""
    for line in text.splitlines():
        if line.startswith("| "):
            yield [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def words_in_code(text: str) -> set[str]:
    """Return every code span of a text, and every word in each of them."""
    spans = CODE.findall(text)
    return set(spans) | {word for span in spans for word in re.findall(r"[\w/-]+", span)}


# -- flags and commands -----------------------------------------------------------------------------------------


def serve_rows() -> dict[str, list[str]]:
    found = {}
    for cells in rows(section(INTERFACE, "## `gateway`, the same as")):
        if flag := FLAG.match(cells[0].strip("`")):
            found[flag.group()] = cells
    return found


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_flag_of_serve_is_documented(flag: Flag) -> None:
    cells = serve_rows().get(f"--{flag.name}")
    assert cells is not None, "no row in docs/interface.md"
    signature = f"--{flag.name}" if flag.is_switch else f"--{flag.name} {flag.metavar}"
    assert cells[0] == f"`{signature}`"
    assert cells[1] == flag.default
    assert ("repeatable" in cells[2]) == flag.repeatable


def test_no_flag_of_serve_is_invented() -> None:
    assert set(serve_rows()) == {f"--{flag.name}" for flag in FLAGS}


def command(name: str) -> click.Command:
    found = cli.gateway.get_command(click.Context(cli.gateway), name)
    assert found is not None
    return found


def options_of(name: str) -> set[str]:
    found = command(name)
    below = found.commands.values() if isinstance(found, click.Group) else ()
    parameters = [option for one in (found, *below) for option in one.params if isinstance(option, click.Option)]
    return {text for parameter in parameters for text in (*parameter.opts, *parameter.secondary_opts)}


COMMANDS: Final = cli.gateway.list_commands(click.Context(cli.gateway))


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("serve", "check")])
def test_command_is_documented_with_its_options(name: str) -> None:
    documented = set(FLAG.findall(section(INTERFACE, f"## `gateway {name}")))
    assert options_of(name) <= documented
    known = set().union(*(options_of(other) for other in COMMANDS)) | {"--help"}
    assert documented <= known


@pytest.mark.parametrize("name", ["status", "upstreams", "keys", "demo", "bench", "simulate-vllm"])
def test_the_value_of_an_option_has_the_same_name_in_the_help_and_in_the_document(name: str) -> None:
    found = command(name)
    below = found.commands.values() if isinstance(found, click.Group) else ()
    taking = [
        f"{option.opts[0]} {option.make_metavar(click.Context(one))}"
        for one in (found, *below)
        for option in one.params
        if isinstance(option, click.Option) and not option.is_flag
    ]
    documented = words_in_code(section(INTERFACE, f"## `gateway {name}").replace("\\|", "|"))
    assert [signature for signature in taking if signature not in documented] == []


def test_check_takes_the_flags_of_serve() -> None:
    assert options_of("check") == options_of("serve")
    assert "flags of `gateway serve`" in section(INTERFACE, "## `gateway check`")


def test_flags_in_the_readme_exist() -> None:
    """Check the prose only: `test_deploy.py` checks command lines, and some of those are vLLM's."""
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    known = set().union(*(options_of(name) for name in COMMANDS)) | {"--help"}
    assert set(FLAG.findall(prose)) <= known


def exit_codes() -> set[str]:
    codes = {value for name, value in vars(cli).items() if name.startswith("EXIT_")} - {cli.EXIT_CHECK_FAILED}
    return {str(code) for code in codes}


@pytest.mark.parametrize(
    "text",
    [section(INTERFACE, "### Start, signals"), section(OPERATIONS, "## Exit codes")],
    ids=["interface", "operations"],
)
def test_exit_codes(text: str) -> None:
    assert {cells[0] for cells in rows(text) if cells[0].isdecimal()} == exit_codes()


def test_signals() -> None:
    text = section(INTERFACE, "### Start, signals")
    for signal in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"):
        assert signal in text


# -- the admin address and the report ---------------------------------------------------------------------------


def a_view() -> View:
    upstream = UpstreamStatus("http://a", "up", 0, 0)
    reported = Status(
        in_flight=0,
        in_flight_bytes=0,
        loop_lag_ms_p99=0.0,
        loop_lag_ms_max=0.0,
        store_connected=True,
        sessions=0,
        upstreams=(upstream,),
        counters=Counters().snapshot(),
    )
    slot = SlotView(0, "ready", None, 0, 1, 0.0, Usage(), reported, 0)
    return View(
        url="http://b",
        version="0",
        started_at_s=0.0,
        stopping=False,
        slots=(slot,),
        redis_url="redis://c",
        redis_embedded=False,
        redis=StoreInfo("standalone", "Valkey 9", 0, 0, "noeviction"),
        totals=Counters().snapshot(),
        loop_lag_ms=0.0,
    )


def field_names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from field_names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from field_names(inner)


def test_fields_of_status_are_documented() -> None:
    documented = words_in_code(section(INTERFACE, "### `/status`") + section(INTERFACE, "### Counters"))
    assert set(field_names(status(a_view()))) <= documented


def test_counters_are_documented_and_none_is_invented() -> None:
    documented = {name for cells in rows(section(INTERFACE, "### Counters")) for name in CODE.findall(cells[0])}
    assert documented == set(COUNTERS)


def test_admin_paths_are_documented_and_none_is_invented() -> None:
    class NoControls:
        pass

    served = admin_app(NoControls(), None)  # type: ignore[arg-type] # nothing is asked of it
    paths = {re.sub(r":\w+}", "}", route.path) for route in served.app.routes}  # type: ignore[attr-defined]
    addresses = section(INTERFACE, "## Addresses")
    assert paths == set(re.findall(r"^\| `(?:GET|POST|PUT) (/[^`]*)`", addresses, re.MULTILINE))


def struct_fields(kind: type) -> Iterator[str]:
    """Yield the field names of a struct, an optional struct or a list of structs, and of the structs in it."""
    for struct in (kind, *get_args(kind)):
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct):
            for field in msgspec.structs.fields(struct):
                yield field.name
                yield from struct_fields(field.type)


def test_fields_of_the_bench_report_are_documented() -> None:
    assert set(struct_fields(Report)) <= words_in_code(section(INTERFACE, "## `gateway bench`"))


def test_each_row_of_the_bench_report_names_the_fields_of_that_part_and_no_others() -> None:
    table = list(rows(section(INTERFACE, "### The report (JSON)")))[1:]
    documented = {name: set(CODE.findall(cells[1])) for cells in table for name in CODE.findall(cells[0])}
    fields = msgspec.structs.fields(Report)
    assert set(documented) == {field.name for field in fields}
    for field in fields:
        flags = {name for name in documented[field.name] if name.startswith("--")}
        assert documented[field.name] - flags == set(struct_fields(field.type)), field.name


# -- the wire ---------------------------------------------------------------------------------------------------


def test_paths_of_the_public_address() -> None:
    served = {f"{method} {path}" for method, path, _ in (*app.HOT, *app.ROUTED)} | {"GET /healthz"}
    documented = {
        f"{method} {path}"
        for cells in rows(section(WIRE, "## Paths"))
        for method, path in re.findall(r"^(GET|POST) `([^`]+)`", cells[0])
    }
    assert documented == served


def test_every_status_is_explained() -> None:
    chosen = {code for _, code in replies.STATUS_OF_ERROR} | set(replies.STATUS_OF_ANSWER.values())
    explained = {int(code) for code in re.findall(r"\b[2-5]\d\d\b", WIRE)}
    assert chosen | {replies.UNEXPECTED} <= explained


@pytest.mark.parametrize("session_poll", [True, False])
def test_flags_for_the_sdk_are_explained(session_poll: bool) -> None:
    sent = msgspec.json.decode(calls.client_config("0.38.0", session_poll=session_poll))
    assert set(sent) <= words_in_code(section(WIRE, "### The flags of"))


# -- architecture and upstream ----------------------------------------------------------------------------------


def test_states_are_those_of_the_life_cycle() -> None:
    documented = {cells[0]: cells[1].strip("`") for cells in rows(section(ARCHITECTURE, "## The life of a sample"))}
    for state in State:
        assert documented[state.name] == (state.value or "no record")
    assert len(documented) == len(State) + 2  # the table's head and its rule


@pytest.mark.parametrize("text", [ARCHITECTURE, UPSTREAM], ids=["architecture", "upstream"])
def test_fault_classes_are_explained(text: str) -> None:
    for kind in FaultClass:
        assert kind.value.replace("_", " ") in text


def test_keys_of_the_store_are_documented() -> None:
    keys = Keys("gw")
    sample = SampleKey("K", 0)
    names = {
        keys.sample(sample).replace(":0", ":SEQ"),
        keys.log("K", 0).replace(":0", ":CLONE"),
        keys.open_set("OWNER"),
        keys.lease("OWNER"),
        keys.instances,
        keys.refills,
        keys.roll,
        keys.inbox("OWNER"),
        keys.session("SESSION"),
        keys.sessions_of("TAG"),
        keys.clones("K"),
        keys.upstreams,
        keys.unfetched,
        keys.lock("NAME"),
        keys.announcement("K"),
        keys.control("OWNER"),
        keys.control_all,
    }
    cells = [cells[0] for cells in rows(section(ARCHITECTURE, "## Redis: the keys"))]
    assert set(CODE.findall(" ".join(cells))) == names


# -- links, files, tests ----------------------------------------------------------------------------------------

DOCUMENTS: Final = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
]


def anchors_of(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", text_of(name)):
        path, _, anchor = target.partition("#")
        linked = (ROOT / name).parent / path if path else ROOT / name
        assert linked.exists(), target
        assert not anchor or anchor in anchors_of(linked.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_are_named_exist(name: str) -> None:
    named = re.findall(
        r"\b((?:gateway|workers|shared|tests|benchmarks|deploy|scripts|requirements)/[\w/.-]+\w)", text_of(name)
    )
    assert not [path for path in named if not path.endswith("lock") and not (ROOT / path).exists()]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_threat_has_a_defence_and_a_test() -> None:
    before_figures = SECURITY.partition("\n## Fuzzing")[0]
    tables = [cells for cells in rows(before_figures) if cells[0] not in ("attacker", "resource", "---")]
    threats = [cells for cells in tables if len(cells) == 4]
    assert len(threats) > 30
    for attacker, _, defence, tests in threats:
        assert attacker and defence
        assert "::" in tests, attacker


def test_every_resource_has_its_bounds_and_a_test() -> None:
    resources = list(rows(section(SECURITY, "## Who may hold what")))[2:]
    assert len(resources) > 8
    for resource, *bounds, tests in resources:
        assert len(bounds) == 4 and all(bounds) and "none" not in bounds, resource
        assert "::" in tests, resource


@pytest.mark.parametrize("text", [ARCHITECTURE, RELIABILITY, SECURITY], ids=["architecture", "reliability", "security"])
def test_tests_that_are_named_exist(text: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert named
    assert not [f"{path}::{name}" for path, name in named if name not in functions_of(ROOT / path)]


# -- rooms ------------------------------------------------------------------------------------------------------


def as_path(dotted: str) -> str:
    path = dotted.replace(".", "/")
    return f"{path}.py" if (ROOT / f"{path}.py").exists() else path


def test_rooms_and_what_they_may_import_are_documented() -> None:
    table = list(rows(section(ARCHITECTURE, "## The rooms")))[2:]
    documented = {cells[0].strip("`"): set(CODE.findall(cells[2])) for cells in table}
    assert documented == {as_path(room): {as_path(name) for name in names} for room, names in MAY_IMPORT.items()}


def test_a_sample_travels_through_few_files() -> None:
    way = section(ARCHITECTURE, "## How one sample travels")
    assert len(set(re.findall(r"`((?:workers|shared)/[\w/]+\.py)`", way))) <= 28


@pytest.mark.parametrize("heading", ["## Where to find it", "## How one sample travels"])
def test_names_are_in_a_file_that_is_named_beside_them(heading: str) -> None:
    for part in re.split(r"\n(?=\| |\d+\. )", section(ARCHITECTURE, heading)):
        spans = CODE.findall(part)
        code = "".join(text_of(span) for span in spans if span.endswith(".py"))
        missing = [span for span in spans if span.isidentifier() and not re.search(rf"\b{span}\b", code)]
        assert not missing, part
