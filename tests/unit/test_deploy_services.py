"""The Kubernetes manifests, the systemd unit and the kernel's settings fit the gateway that they run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import click
import kubernetes_validate
import pytest
import yaml

from gateway import cli
from gateway.admin.app import admin_app
from gateway.commands.findings import own_ports
from gateway.machine.kernel import parse_ports
from gateway.settings.resolve import CONFIG_VARIABLE
from gateway.settings.table import FLAGS
from gateway.supervision.fleet_model import USUAL_PACE
from tests.gateway_views import VIEW
from tests.unit.gateway.admin.test_metrics import families

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
MANIFESTS: Final = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNIT: Final = (DEPLOY / "systemd" / "gateway.service").read_text(encoding="utf-8")
FLAG_DEFAULTS: Final = {flag.name: flag.default for flag in FLAGS}
# Kind -> its API.
KINDS: Final = {
    "Service": "v1",
    "Deployment": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "NetworkPolicy": "networking.k8s.io/v1",
}


def documents() -> list[dict[str, Any]]:
    return [found for path in MANIFESTS for found in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def one(kind: str, name: str = "sampling-gateway") -> dict[str, Any]:
    (found,) = [each for each in documents() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod() -> dict[str, Any]:
    found: dict[str, Any] = one("Deployment")["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    found: dict[str, Any] = pod()["containers"][0]
    return found


def environment() -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container()["env"]}


@pytest.mark.parametrize("document", documents(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_an_object_is_of_a_known_kind_and_complete(document: dict[str, Any]) -> None:
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    assert document["apiVersion"] == KINDS[document["kind"]]
    assert re.fullmatch(r"[a-z][a-z0-9-]*", document["metadata"]["name"])


# What docs/operations.md names as the oldest, and the newest that is known.
KUBERNETES: Final = (
    *re.findall(
        r"\*\*Kubernetes\*\* ([\d.]+\d) and newer", (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    ),
    kubernetes_validate.latest_version(),
)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("document", documents(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_kubernetes_knows_every_field(document: dict[str, Any], version: str) -> None:
    """By the API's own schemas, and no field beside those: a misspelled probe is no probe."""
    assert len(KUBERNETES) == 2
    kubernetes_validate.validate(document, version, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_refused() -> None:
    """Else the schemas would say nothing."""
    wrong = one("Deployment")
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("name", ["sampling-gateway", "gateway-redis"])
def test_selectors_find_the_pods(name: str) -> None:
    deployment = one("Deployment", name)["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert one("Service", name)["spec"]["selector"].items() <= labels.items()


def test_all_else_selects_the_gateway() -> None:
    labels = one("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    target = one("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "sampling-gateway"}
    assert "replicas" not in one("Deployment")["spec"]


def test_named_ports_exist_and_are_those_of_the_gateway() -> None:
    ports = {port["name"]: str(port["containerPort"]) for port in container()["ports"]}
    assert ports == {"http": FLAG_DEFAULTS["port"], "admin": FLAG_DEFAULTS["admin-port"]}
    probes = [container()[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness")]
    rules = [port["port"] for rule in one("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]]
    assert {*probes, *rules, one("Service")["spec"]["ports"][0]["targetPort"]} <= set(ports)


def test_probes_ask_for_paths_that_are_open() -> None:
    app = admin_app(None, "key").app  # type: ignore[arg-type] # nothing is asked of the supervisor
    paths = {route.path for route in app.routes}  # type: ignore[attr-defined]
    for kind in ("startup", "liveness", "readiness"):
        path = container()[f"{kind}Probe"]["httpGet"]["path"]
        assert path in paths
        assert path in ("/livez", "/readyz")


def test_the_pod_outlives_its_drain() -> None:
    pause_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][-1])
    drain_s = float(environment()["GATEWAY_DRAIN_TIMEOUT"])
    assert pod()["terminationGracePeriodSeconds"] >= pause_s + drain_s + USUAL_PACE.drain_grace_s


def test_variables_exist_and_kubernetes_adds_none() -> None:
    assert set(environment()) <= {flag.variable for flag in FLAGS} | {CONFIG_VARIABLE}
    assert pod()["enableServiceLinks"] is False
    assert "GATEWAY_ALLOW_ANONYMOUS" not in environment()
    assert {"GATEWAY_API_KEYS_FILE", "GATEWAY_ADMIN_KEY_FILE"} <= set(environment())


def test_files_are_mounted_where_the_variables_say() -> None:
    mounts = [mount["mountPath"] for mount in container()["volumeMounts"]]
    for name in ("GATEWAY_API_KEYS_FILE", "GATEWAY_ADMIN_KEY_FILE"):
        assert any(environment()[name].startswith(f"{mount}/") for mount in mounts)
    assert {mount["name"] for mount in container()["volumeMounts"]} == {each["name"] for each in pod()["volumes"]}


def test_the_autoscaler_asks_for_a_metric_that_exists() -> None:
    (wanted,) = one("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert wanted["pods"]["metric"]["name"] in {family.name for family in families(VIEW)}


def test_pods_are_no_root() -> None:
    for name in ("sampling-gateway", "gateway-redis"):
        spec = one("Deployment", name)["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert all(not each["securityContext"]["allowPrivilegeEscalation"] for each in spec["containers"])


def test_redis_never_drops_a_result_and_fits_its_limit() -> None:
    (redis,) = one("Deployment", "gateway-redis")["spec"]["template"]["spec"]["containers"]
    assert "--maxmemory-policy noeviction" in redis["args"][0]
    held = re.search(r"--maxmemory (\d+)gb", redis["args"][0])
    assert held is not None
    assert int(held[1]) * 1.3 <= int(redis["resources"]["limits"]["memory"].removesuffix("Gi"))


# -- systemd ----------------------------------------------------------------------------------------------------


def setting(name: str) -> str:
    found = re.search(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    assert found is not None, name
    return found[1]


def test_the_unit_runs_a_command_that_exists() -> None:
    _, command, *rest = setting("ExecStart").split()
    assert command in cli.gateway.list_commands(None)  # type: ignore[arg-type] # no context is needed to list them
    known = {f"--{flag.name}" for flag in FLAGS} | {"--config"}
    assert {word for word in rest if word.startswith("--")} <= known


def test_nothing_but_the_gateway_decides_whether_the_unit_starts() -> None:
    """`gateway check` fails while an upstream is down, and no exit code of ExecStartPre prevents a restart."""
    assert not re.findall(r"^Exec(?:Condition|StartPre)=", UNIT, re.MULTILINE)


def test_the_unit_waits_for_the_drain_and_lets_the_supervisor_do_it() -> None:
    drain_s = float(FLAG_DEFAULTS["drain-timeout"])
    assert int(setting("TimeoutStopSec")) >= drain_s + USUAL_PACE.drain_grace_s
    assert setting("KillMode") == "mixed"
    assert setting("ExecReload").startswith("/bin/kill -HUP")
    assert setting("RestartPreventExitStatus") == "2"


def test_the_kernel_may_queue_what_a_worker_asks_for() -> None:
    assert int(sysctls()["sysctl.conf"]["net.core.somaxconn"]) >= int(FLAG_DEFAULTS["backlog"])


def sysctls() -> dict[str, dict[str, str]]:
    """The kernel's settings, by the file that has them."""
    text = (DEPLOY / "sysctl.conf").read_text(encoding="utf-8")
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]["gateway"]["sysctls"]
    return {
        "sysctl.conf": dict(re.findall(r"^([\w.]+) = (.+)$", text, re.MULTILINE)),
        "compose.yaml": compose,
        "gateway.yaml": {each["name"]: each["value"] for each in pod()["securityContext"]["sysctls"]},
    }


@pytest.mark.parametrize(("name", "values"), sysctls().items(), ids=sysctls())
def test_no_outgoing_connection_gets_a_port_of_ours(name: str, values: dict[str, str]) -> None:
    low, high = (int(port) for port in values["net.ipv4.ip_local_port_range"].split())
    ours = [int(FLAG_DEFAULTS["port"]), int(FLAG_DEFAULTS["admin-port"])]
    if name == "compose.yaml":
        ours.append(9090)  # Prometheus, in the gateway's network
    assert own_ports(ours, (low, high), parse_ports(values["net.ipv4.ip_local_reserved_ports"])) is None


# -- all that is written down -----------------------------------------------------------------------------------

SUFFIXES: Final = (".md", ".yaml", ".json", ".service", ".conf", "")
WRITTEN: Final = [
    path
    for path in (*DEPLOY.rglob("*"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md")
    if path.is_file() and path.suffix in SUFFIXES and not path.name.startswith(".")
]
# Of vLLM, Redis, Docker, kubectl, the kubelet and sysctl, in the files that are about more than the gateway.
FOREIGN: Final = set(
    "--logprobs-mode --shutdown-timeout --model --save --appendonly --maxmemory --maxmemory-policy --requirepass"
    " --profile --rm --no-deps --from-literal --from-file --allowed-unsafe-sysctls --system --config.file"
    " --storage.tsdb.retention.time --quiet --output-document".split()
)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_variables_and_metrics_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    variables = {flag.variable for flag in FLAGS} | {CONFIG_VARIABLE}
    assert set(re.findall(r"\bGATEWAY_[A-Z][A-Z_]+\b", text)) <= variables
    series = {sample.name for family in families(VIEW) for sample in family.samples} | {
        family.name for family in families(VIEW)
    }
    assert set(re.findall(r"\bgateway_[a-z][a-z_0-9]+\b", text)) <= series


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_exit_codes_that_are_named_exist(path: Path) -> None:
    named = re.findall(r"[Ee]xit codes? (\d)(?: and (\d))?", path.read_text(encoding="utf-8"))
    assert {code for pair in named for code in pair if code} <= {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize("path", [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.conf"), ROOT / "docs" / "operations.md"])
def test_flags_that_are_named_exist(path: Path) -> None:
    context = click.Context(cli.gateway)
    commands = [cli.gateway.get_command(context, name) for name in cli.gateway.list_commands(context)]
    known = {text for each in commands if each is not None for option in each.params for text in option.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", path.read_text(encoding="utf-8")))
    assert named <= known | FOREIGN
