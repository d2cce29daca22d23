"""What is written down to be run must exist: the compose file, the Dockerfile and the commands of the README."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import pytest
import yaml

from gateway.cli import gateway
from gateway.settings.resolve import CONFIG_VARIABLE
from gateway.settings.table import FLAGS
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
COMPOSE: Final = ROOT / "deploy" / "compose.yaml"
DOCKERFILE: Final = ROOT / "deploy" / "Dockerfile"
README: Final = ROOT / "README.md"
VARIABLES: Final = {flag.variable for flag in FLAGS} | {CONFIG_VARIABLE}
ADMIN_PORT: Final = "8001"
FLAG: Final = re.compile(r"--[a-z][a-z-]+")


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    return loaded


def services() -> dict[str, Any]:
    found: dict[str, Any] = compose()["services"]
    return found


def command(name: str) -> click.Command:
    context = click.Context(gateway)
    found = gateway.get_command(context, name)
    assert found is not None, f"there is no command {name!r}"
    return found


def flags_of(name: str) -> set[str]:
    """Every spelling of every option of a command, and of those below it."""
    found = command(name)
    below = found.commands.values() if isinstance(found, click.Group) else ()
    parameters = [parameter for one in (found, *below) for parameter in one.params]
    return {text for parameter in parameters for text in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def check_invocation(words: list[str]) -> None:
    """`words`: what follows `gateway` on a command line."""
    if not words or words[0].startswith("-"):
        words = ["serve", *words]
    name, *rest = words
    unknown = {word.partition("=")[0] for word in rest if FLAG.match(word)} - flags_of(name)
    assert not unknown, f"gateway {name} has no {unknown}"


# -- the compose file -------------------------------------------------------------------------------------------


def test_services_are_those_of_the_header() -> None:
    assert set(services()) == {"gateway", "redis", "vllm", "simulated-vllm", "prometheus", "grafana"}
    assert services()["vllm"]["profiles"] == ["vllm"]
    assert services()["simulated-vllm"]["profiles"] == ["simulate"]
    assert services()["prometheus"]["profiles"] == services()["grafana"]["profiles"] == ["monitoring"]


@pytest.mark.parametrize("path", [COMPOSE, DOCKERFILE, ROOT / "deploy" / "env.example"], ids=lambda path: path.name)
def test_gateway_variables_exist(path: Path) -> None:
    used = set(re.findall(r"\bGATEWAY_[A-Z_]+", path.read_text(encoding="utf-8")))
    assert used
    assert used <= VARIABLES


@pytest.mark.parametrize("name", ["gateway", "simulated-vllm"])
def test_commands_of_services_exist(name: str) -> None:
    check_invocation(services()[name]["command"])


def test_health_is_checked_everywhere() -> None:
    assert "HEALTHCHECK" in DOCKERFILE.read_text(encoding="utf-8")
    without = [name for name, service in services().items() if "healthcheck" not in service and "build" not in service]
    assert not without


def test_admin_port_is_not_published() -> None:
    ports = [port for service in services().values() for port in service.get("ports", ())]
    assert ports
    assert not [port for port in ports if ADMIN_PORT in port]
    assert "GATEWAY_ADMIN_HOST" not in services()["gateway"]["environment"]
    assert f"EXPOSE {ADMIN_PORT}" not in DOCKERFILE.read_text(encoding="utf-8")


def test_only_this_machine_can_connect_by_default() -> None:
    assert [port for service in services().values() for port in service.get("ports", ())]
    for name, service in services().items():
        address = "${PUBLISH_ADDRESS:-127.0.0.1}:" if name == "gateway" else "127.0.0.1:"
        assert all(port.startswith(address) for port in service.get("ports", ())), name


def test_a_password_is_required_and_is_none_that_everybody_knows() -> None:
    named = set(re.findall(r"(?<!\$)\$\{(\w*PASSWORD)([^}]{0,2})", COMPOSE.read_text(encoding="utf-8")))
    # Compose reads the whole file for every profile: Grafana asks for its own when it starts.
    assert named == {("REDIS_PASSWORD", ":?"), ("GRAFANA_PASSWORD", ":-")}
    assert services()["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == "${GRAFANA_PASSWORD:-}"


@pytest.mark.parametrize(("password", "starts"), [("secret", True), ("", False), (None, False)])
def test_grafana_does_not_start_without_a_password(password: str | None, starts: bool) -> None:
    shell, *arguments, script = services()["grafana"]["entrypoint"]
    own = "exec /run.sh"
    assert script.count(own) == 1
    script = script.replace(own, "exec echo started").replace("$$", "$")
    environ = {"PATH": os.environ["PATH"]}
    if password is not None:
        environ["GF_SECURITY_ADMIN_PASSWORD"] = password
    ran = subprocess.run(
        [shell, *arguments, script], capture_output=True, text=True, env=environ, timeout=DEADLINE_S, check=False
    )
    assert (ran.returncode, ran.stdout) == ((0, "started\n") if starts else (1, ""))
    assert ("GRAFANA_PASSWORD" in ran.stderr) is not starts


def test_callers_need_a_key() -> None:
    service = services()["gateway"]
    secret = service["environment"]["GATEWAY_API_KEYS_FILE"].removeprefix("/run/secrets/")
    assert secret in service["secrets"]
    assert secret in compose()["secrets"]
    assert "GATEWAY_ALLOW_ANONYMOUS" not in service["environment"]


def test_redis_never_drops_a_result() -> None:
    words = shlex.split(services()["redis"]["command"][-1])
    assert words[words.index("--maxmemory-policy") + 1] == "noeviction"
    assert words[words.index("--appendonly") + 1] == "no"
    assert words[words.index("--save") + 1] == ""
    assert {"--maxmemory", "--requirepass"} <= set(words)


def test_vllm_reports_processed_logprobs() -> None:
    words = services()["vllm"]["command"]
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"


def test_upstream_is_the_same_name_in_both_profiles() -> None:
    url = services()["gateway"]["environment"]["GATEWAY_UPSTREAM"]
    host = re.search(r"http://([a-z]+):8000", url)
    assert host is not None
    for name in ("vllm", "simulated-vllm"):
        assert host[1] in services()[name]["networks"]["default"]["aliases"]


def test_stop_waits_for_the_drain() -> None:
    service = services()["gateway"]
    grace_s = int(service["stop_grace_period"].removesuffix("s"))
    assert grace_s > int(service["environment"]["GATEWAY_DRAIN_TIMEOUT"])


def test_every_variable_of_the_compose_file_is_in_the_example() -> None:
    # `$$NAME` is the container's own.
    used = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", COMPOSE.read_text(encoding="utf-8")))
    example = (ROOT / "deploy" / "env.example").read_text(encoding="utf-8")
    assert used == set(re.findall(r"^#?([A-Z_]+)=", example, re.MULTILINE))


def _answers(command: tuple[str, ...]) -> bool:
    try:
        found = subprocess.run([*command, "version"], capture_output=True, timeout=DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0


@pytest.fixture(scope="module")
def composer() -> tuple[str, ...]:
    """Docker's plugin, or the command of its own that came before it; `config` needs no daemon of either."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if _answers(command):
            return command
    pytest.skip("docker compose is not installed")


def rendered(composer: tuple[str, ...], path: Path, profile: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "REDIS_PASSWORD": "secret", "GRAFANA_PASSWORD": "secret", **environ}
    arguments = [*composer, "--file", str(path), "--profile", profile, "config"]
    return subprocess.run(arguments, capture_output=True, text=True, env=environ, timeout=DEADLINE_S, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "added"),
    [("vllm", {"vllm"}), ("simulate", {"simulated-vllm"}), ("monitoring", {"prometheus", "grafana"})],
)
def test_docker_accepts_the_compose_file(composer: tuple[str, ...], profile: str, added: set[str]) -> None:
    found = rendered(composer, COMPOSE, profile)
    assert found.returncode == 0, found.stderr
    read = yaml.safe_load(found.stdout)["services"]
    assert {"gateway", "redis"} | added <= set(read)
    assert read["gateway"]["environment"]["GATEWAY_REDIS_URL"] == "redis://:secret@redis:6379/0"


@pytest.mark.slow
def test_docker_starts_nothing_without_a_password_of_redis(composer: tuple[str, ...]) -> None:
    found = rendered(composer, COMPOSE, "simulate", REDIS_PASSWORD="")
    assert found.returncode != 0
    assert "REDIS_PASSWORD" in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["vllm", "simulate"])
def test_docker_asks_for_no_password_of_what_is_not_started(composer: tuple[str, ...], profile: str) -> None:
    found = rendered(composer, COMPOSE, profile, GRAFANA_PASSWORD="")
    assert found.returncode == 0, found.stderr
    assert "GRAFANA_PASSWORD" not in found.stderr


@pytest.mark.slow
def test_docker_refuses_a_field_that_it_does_not_know(composer: tuple[str, ...], tmp_path: Path) -> None:
    """Else its acceptance would say nothing."""
    wrong = tmp_path / "compose.yaml"
    text = COMPOSE.read_text(encoding="utf-8")
    wrong.write_text(text.replace("stop_grace_period:", "stop_grace_time:"), encoding="utf-8")
    found = rendered(composer, wrong, "vllm")
    assert found.returncode != 0
    assert "stop_grace_time" in found.stderr


# -- the Dockerfile ---------------------------------------------------------------------------------------------


def test_image_is_built_from_the_lock_and_runs_without_root() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert "--require-hashes --requirement requirements/run.lock" in text
    last_stage = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER (?!root\b|0\b)\w+", last_stage, re.MULTILINE)


def test_files_that_the_image_copies_exist() -> None:
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert copied
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore, f"{source} does not reach the build"


def test_entry_point_is_the_command() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    entry = re.search(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)
    default = re.search(r"^CMD (.+)$", text, re.MULTILINE)
    assert entry is not None and json.loads(entry[1]) == ["gateway"]
    assert default is not None
    check_invocation(json.loads(default[1]))


# -- command lines in documents ---------------------------------------------------------------------------------


def shell_lines(path: Path) -> Iterator[str]:
    """Lines of fenced `sh` blocks; a trailing backslash continues."""
    for block in re.findall(r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()


DOCUMENTS: Final = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def gateway_lines() -> list[str]:
    return [line for path in DOCUMENTS for line in shell_lines(path) if re.match(r"(scripts/)?gateway\b", line)]


def test_documents_hold_command_lines() -> None:
    assert gateway_lines()


@pytest.mark.parametrize("line", gateway_lines())
def test_command_lines_of_documents_exist(line: str) -> None:
    check_invocation(shlex.split(line, comments=True)[1:])


def test_scripts_of_documents_exist() -> None:
    named = {name for path in DOCUMENTS for name in re.findall(r"\bscripts/\w+", path.read_text(encoding="utf-8"))}
    assert named
    missing = [name for name in named if not os.access(ROOT / name, os.X_OK)]
    assert not missing
