"""The deployment files against the repository: no engine runs here, but nothing that they name may be missing."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from shared.settings import Settings
from tests.infra.test_helm import documents, rendered

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
CONTAINERFILES = sorted(INFRA.glob("Containerfile.*"))
UNITS = sorted((INFRA / "systemd").glob("*.service"))
OPERATIONS = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        "operations",
        "settings",
        "hardening",
        "hosts",
        "quotas",
        "backup",
        "queues",
        "troubleshooting",
        "kubernetes",
    )
]
PAGES = [*OPERATIONS, ROOT / "docs" / "team_install.md", ROOT / "docs" / "weight_sync.md"]
CHART = sorted(path for path in (INFRA / "helm").rglob("*") if path.is_file())
TEXTS = [*CONTAINERFILES, INFRA / "compose.yaml", INFRA / "env.example", *UNITS, *PAGES, *CHART]
TEXTS += sorted((INFRA / "slurm").iterdir())


def variables(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Every environment variable that sets a field, nested ones included."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from variables(field.annotation, f"{prefix}{name.upper()}__")
        else:
            yield prefix + name.upper()


def strings(value: object) -> Iterator[str]:
    """Every string in a parsed document, and lists of strings as one command line."""
    match value:
        case str():
            yield value
        case list() if all(isinstance(item, str) for item in value):
            yield " ".join(value)
        case list():
            for item in value:
                yield from strings(item)
        case dict():
            for item in value.values():
                yield from strings(item)


def instructions(path: Path) -> list[str]:
    """Instructions of a Containerfile, continued lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", "").splitlines() if line.strip()]


def compose() -> dict:
    return yaml.safe_load((INFRA / "compose.yaml").read_text())


def option_names(module: str) -> set[str]:
    """Options that a module's argparse knows, read from its source."""
    path = ROOT / (module.replace(".", "/") + ".py")
    if not path.exists():
        path = ROOT / module.replace(".", "/") / "__main__.py"
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    texts = [a.value for c in calls for a in c.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return {text for text in texts if text.startswith("--")}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_variables_are_settings(path: Path) -> None:
    known = set(variables(Settings, "LONGSHORE_"))
    named = {name.removesuffix("_FILE") for name in re.findall(r"LONGSHORE_[A-Z0-9_]+", path.read_text())}
    assert named <= known, f"{path.name} names {sorted(named - known)}"


def test_every_setting_is_documented() -> None:
    documented = set(re.findall(r"LONGSHORE_[A-Z0-9_]+", (ROOT / "docs" / "settings.md").read_text()))
    undocumented = {"LONGSHORE_CONTROL_QUEUE", "LONGSHORE_DOWNLOAD__TIMEOUT_S"}
    assert set(variables(Settings, "LONGSHORE_")) - documented <= undocumented


def test_documented_defaults_are_the_defaults() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    settings = Settings()
    for name, value in (
        ("TEMPORAL_ADDRESS", settings.temporal_address),
        ("API_URL", settings.api_url),
        ("SHAPE", settings.shape),
        ("WORKER_IDLE_S", f"{settings.worker_idle_s:g}"),
        ("HEARTBEAT_TIMEOUT_S", f"{settings.heartbeat_timeout_s:g}"),
        ("CANCEL_GRACE_S", f"{settings.cancel_grace_s:g}"),
        ("WANDB_MODE", settings.wandb_mode),
        ("DOWNLOAD__MAX_BYTES", f"{settings.download.max_bytes >> 30} GiB"),
    ):
        [row] = [
            line for line in page.splitlines() if line.startswith("|") and f"`LONGSHORE_{name}`" in line.split("|")[1]
        ]
        assert value in row.split("|")[2], f"{name}: {value}"


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_containerfile_copies_what_exists_and_all_it_imports(path: Path) -> None:
    copied = set()
    for instruction in instructions(path):
        if instruction.startswith("COPY "):
            copied |= set(shlex.split(instruction)[1:-1])
    assert all((ROOT / name).exists() for name in copied), copied
    needed = {
        "pyproject.toml",
        "README.md",
        "requirements",
        "longshore",
        "shared",
        "activities",
        "workflows",
        "service",
    }
    assert needed <= copied
    assert ("megatron_worker" in copied) == path.name.endswith("worker")
    [install] = re.findall(r"requirements/install\.sh (\w+)", path.read_text())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert install in extras


def test_python_of_the_images_is_new_enough() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = tuple(int(part) for part in re.findall(r"\d+", project["requires-python"]))
    [version] = re.findall(
        r"^ARG BASE=python:(\d+)\.(\d+)", (INFRA / "Containerfile.service").read_text(), re.MULTILINE
    )
    assert tuple(map(int, version)) >= least


def test_modules_and_their_options_exist() -> None:
    commands = [text for path in CONTAINERFILES for text in instructions(path)]
    commands = [command.replace('"', "").replace(",", " ").replace("[", "").replace("]", "") for command in commands]
    commands += [*strings(compose()), *(text for manifest in documents(None) for text in strings(manifest))]
    commands += re.findall(r"`((?:python|torchrun)[^`]*)`", "\n".join(path.read_text() for path in OPERATIONS))
    found = [
        match for command in commands if (match := re.search(r"-m\s+(?:longshore\.server\s+)?([a-z_.]+)(.*)", command))
    ]
    assert {match[1] for match in found} >= {"service.app", "service.host", "megatron_worker"}
    for match in found:
        given = set(re.findall(r"--[a-z-]+", match[2]))
        assert given <= option_names(match[1]), f"{match[0]}: {sorted(given - option_names(match[1]))}"


def test_roles_are_those_of_the_host() -> None:
    from typing import get_args

    from service.host import Role

    texts = "\n".join(path.read_text() for path in TEXTS)
    assert set(re.findall(r'--role[\s",]+([a-z]+)', texts)) == set(get_args(Role))


def test_ports_agree() -> None:
    from service.dev.supervisor import API_PORT, TEMPORAL_PORT

    services = compose()["services"]
    assert services["service"]["ports"] == [f"127.0.0.1:{API_PORT}:{API_PORT}"]
    assert services["gpu-host"]["environment"]["LONGSHORE_TEMPORAL_ADDRESS"] == f"temporal:{TEMPORAL_PORT}"
    [cluster] = [m for m in documents(None) if m["kind"] == "Service"]
    assert cluster["spec"]["ports"][0]["port"] == API_PORT
    assert f"EXPOSE {API_PORT}" in (INFRA / "Containerfile.service").read_text()


def test_images_are_pinned_and_ours_carry_our_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = [_default(service["image"]) for service in compose()["services"].values()]
    images += [_default(build["args"]["BASE"]) for s in compose()["services"].values() if (build := s.get("build"))]
    for path in CONTAINERFILES:
        assert re.findall(r"^FROM (\S+)", path.read_text(), re.MULTILINE) == ["${BASE}"], "a digest cannot be given"
        images += re.findall(r"^ARG BASE=(\S+)", path.read_text(), re.MULTILINE)
    images += re.findall(r"image: (\S+)", rendered(None))
    for image in images:
        name, _, tag = image.partition(":")
        if name.startswith("longshore-"):
            assert tag in ("", version)
        else:
            assert re.search(r"\d", tag) and tag != "latest", f"{image} is not pinned"


def _default(image: str) -> str:
    """An image of compose.yaml where no digest of it is given."""
    found = re.fullmatch(r"\$\{[A-Z0-9_]+_(?:IMAGE|BASE):-(.+)\}", image)
    assert found or image.startswith("longshore-"), f"{image} cannot be given by digest"
    return found[1] if found else image


def test_compose_names_what_it_defines() -> None:
    document = compose()
    for name, service in document["services"].items():
        assert set(service.get("depends_on", ())) <= set(document["services"]), name
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in document["volumes"], volume
        build = service.get("build")
        if build:
            assert (INFRA / build["context"] / build["dockerfile"]).resolve().exists(), build
    wanted = set(re.findall(r"\$\{([A-Z_0-9]+)", (INFRA / "compose.yaml").read_text()))
    offered = set(re.findall(r"^([A-Z_0-9]+)=", (INFRA / "env.example").read_text(), re.MULTILINE))
    assert wanted == offered


def test_example_environment_holds_no_secret() -> None:
    given = dict(re.findall(r"^([A-Z_0-9]+)=(.*)$", (INFRA / "env.example").read_text(), re.MULTILINE))
    assert not any(value for name, value in given.items() if "KEY" in name or "PASSWORD" in name)


def test_operations_pages_name_commands_and_paths_that_exist() -> None:
    import typer

    from service.cli.main import app

    page = "\n".join(path.read_text() for path in OPERATIONS)
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"longshore (dev|[a-z]+) (?:RUN|--)|`longshore ([a-z]+)`", page))
    named_commands = {first or second for first, second in named}
    assert named_commands and named_commands <= commands, named_commands - commands
    paths = set(re.findall(r"`((?:infra|requirements|tests|docs)/[\w./-]+)`", page))
    assert len(paths) >= 6
    assert all((ROOT / path).exists() for path in paths), paths


def test_state_is_mounted_where_the_images_keep_it() -> None:
    root = "/var/lib/longshore"
    for path in CONTAINERFILES:
        assert f"LONGSHORE_ROOT={root}" in path.read_text()
    for name in ("service", "control-host", "gpu-host", "sampler-host"):
        assert compose()["services"][name]["volumes"][0].endswith(f":{root}")
    pods = [m["spec"]["template"]["spec"] for m in documents(None) if m["kind"] == "Deployment"]
    assert len(pods) == 4
    for pod in pods:
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert {"/tmp", "/home/longshore", root} <= mounts.keys()
        assert set(mounts.values()) <= {volume["name"] for volume in pod["volumes"]}


def test_hosts_offer_the_shape_that_the_service_asks_for() -> None:
    """Or its runs would wait for ever. Compose: one for all; Kubernetes: the settings that all processes share."""
    services = compose()["services"]
    ours = ("service", "gpu-host", "sampler-host")
    [shape] = {services[name]["environment"]["LONGSHORE_SHAPE"] for name in ours}
    assert shape == "${LONGSHORE_SHAPE:-gpu1}"
    [settings] = [m["data"] for m in documents(None) if m["kind"] == "ConfigMap"]
    assert settings["LONGSHORE_SHAPE"]
    for deployment in (m for m in documents(None) if m["kind"] == "Deployment"):
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            assert {"configMapRef": {"name": "longshore-settings"}} in container["envFrom"], container["name"]
            assert "LONGSHORE_SHAPE" not in {entry["name"] for entry in container.get("env", ())}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_what_there_is_and_its_page_says_so(path: Path) -> None:
    [command] = re.findall(r"^ExecStart=\S+/python -P -m longshore\.server (.+)$", path.read_text(), re.MULTILINE)
    module, *options = shlex.split(command)
    assert {option for option in options if option.startswith("--")} <= option_names(module)
    assert path.stem in (ROOT / "docs" / "team_install.md").read_text()
    for file in re.findall(r"^EnvironmentFile=-?(\S+)$", path.read_text(), re.MULTILINE):
        assert file.replace("%i", "gpu") in (ROOT / "docs" / "team_install.md").read_text()
