"""The files of deployment and of an open project, locks, alert rules and queries, against the repository."""

import ast
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from shared.settings import Settings
from tests.infra.observability import FOLDER, expressions
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
    from service.dev import API_PORT, TEMPORAL_PORT

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

    from service.cli.command import app

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


REQUIREMENTS = Path(__file__).parents[2] / "requirements"
SETS = ("run", "worker", "dev")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes by package."""
    text = (REQUIREMENTS / "locked" / f"{name}.txt").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        package, _, rest = line.partition("==")
        found[normal(package)] = (rest.split()[0], len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", rest)))
    return found


def constraints() -> dict[str, str]:
    lines = (REQUIREMENTS / "constraints.txt").read_text().splitlines()
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_locks_have_every_version_but_torch_once() -> None:
    versions: dict[str, str] = {}
    for name in SETS:
        for package, (version, hashes) in locked(name).items():
            assert hashes, f"{package} has no hash"
            assert package not in versions, f"{package} is in two sets"
            versions[package] = version
    wanted = {package: version for package, version in constraints().items() if package != "torch"}
    assert versions.pop("setuptools"), "it builds the editable install"
    assert versions == wanted, "make lock"


def test_a_set_of_the_control_plane_has_no_torch() -> None:
    assert not {"torch", "triton", "transformers", "megatron-core"} & locked("run").keys()
    assert not {"pytest", "ruff", "mkdocs"} & (locked("run") | locked("worker")).keys()


@pytest.mark.parametrize("extra", ["server", "worker", "dev"])
def test_install_takes_the_sets_of_its_extra(extra: str) -> None:
    text = (REQUIREMENTS / "install.sh").read_text()
    [sets] = re.findall(rf"^    {extra}\) sets=\((.+)\) ;;$", text, re.MULTILINE)
    assert sets.split() == list(SETS[: ["server", "worker", "dev"].index(extra) + 1])
    assert "--require-hashes --no-deps" in text


def test_install_refuses_a_set_that_is_none() -> None:
    done = subprocess.run([REQUIREMENTS / "install.sh", "everything"], capture_output=True, text=True)
    assert done.returncode == 2 and "no such set of packages: everything" in done.stderr


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def steps(path: Path) -> list[dict]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_licence_is_named_and_not_copied() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert f"SPDX-License-Identifier: {PROJECT['project']['license']}" in text
    [author] = PROJECT["project"]["authors"]
    assert author["name"] in text and "apache.org/licenses/LICENSE-2.0" in text
    assert len(text) < 1000, "the full text is not ours"


def test_changelog_has_a_part_for_this_version_and_for_what_comes() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    kinds = set(re.findall(r"^### (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_client_depends_on_httpx_and_pydantic_alone_and_is_typed() -> None:
    names = {re.split(r"[^\w-]", wanted)[0] for wanted in PROJECT["project"]["dependencies"]}
    assert names == {"httpx", "pydantic"}
    assert (ROOT / "longshore" / "py.typed").exists()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_exists(path: Path) -> None:
    for step in steps(path):
        command = step.get("run", "")
        assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= make_targets()
        for name in re.findall(r"bash (\S+)", command):
            assert (ROOT / name).exists(), name
        for image in re.findall(r"infra/Containerfile\S*matrix\.image", command):
            assert image and {p.suffix for p in (ROOT / "infra").glob("Containerfile.*")} == {".service", ".worker"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_few_rights_and_pinned_actions(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert document["permissions"] == {"contents": "read"}
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), "GitHub's own actions, of a named version"
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
        assert "${{ github.event" not in step.get("run", ""), "an event's text in a shell is a stranger's command"


def test_commits_have_subjects_of_72_characters_at_most(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    (tmp_path / "infra").mkdir()
    shutil.copy(ROOT / "infra" / "check_subjects.sh", tmp_path / "infra")
    git("init", "--quiet")
    for subject, status in (("Begin", 0), ("é" * 72, 0), ("Merge " + "x" * 70, 1)):
        git("commit", "--quiet", "--allow-empty", "--message", subject)
        done = subprocess.run(["bash", "infra/check_subjects.sh", ":/Begin"], cwd=tmp_path, capture_output=True)
        assert done.returncode == status, subject


def test_a_release_has_the_notes_of_its_version_alone() -> None:
    def notes(version: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", ROOT / "infra" / "release_notes.sh", version]
        return subprocess.run(command, capture_output=True, text=True)

    mine = notes("Unreleased")
    assert mine.returncode == 0 and "### Added" in mine.stdout and "## [" not in mine.stdout
    assert notes("0.0.0").returncode == 1 and "0.0.0" in notes("0.0.0").stderr


def test_a_tag_releases_every_image_once_all_is_checked() -> None:
    release = yaml.safe_load(WORKFLOWS[1].read_text())
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert all(job["needs"] == "check" for name, job in release["jobs"].items() if name != "check")
    [images] = [job["strategy"]["matrix"]["image"] for job in release["jobs"].values() if "strategy" in job]
    assert {f"Containerfile.{image}" for image in images} == {p.name for p in (ROOT / "infra").glob("Containerfile.*")}


def test_hooks_are_the_tools_of_the_environment() -> None:
    document = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in document["repos"]] == ["local"]
    tools = {Path(hook["entry"].split()[0]) for repo in document["repos"] for hook in repo["hooks"]}
    assert tools == {Path(".venv/bin") / name for name in ("ruff", "mypy", "lint-imports")}
    assert all((ROOT / tool).exists() for tool in tools)


@pytest.mark.parametrize("path", [p for p in TEMPLATES if p.name != "config.yml"], ids=lambda path: path.name)
def test_issue_templates_are_forms_and_name_commands_that_exist(path: Path) -> None:
    import typer

    from service.cli.command import app

    document = yaml.safe_load(path.read_text())
    assert document["name"] and document["description"]
    assert len({part["id"] for part in document["body"]}) == len(document["body"])
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"`longshore ([a-z]+)", path.read_text())) <= commands


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_commands_of_the_root_pages_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    assert set(re.findall(r"^    make ([a-z-]+)", text, re.MULTILINE)) <= make_targets()


def promtool(*arguments: str | Path) -> None:
    if (program := shutil.which("promtool")) is None:
        pytest.skip("no promtool: Debian's package `prometheus` has it")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_when_it_should_and_not_before() -> None:
    promtool("check", "rules", FOLDER / "alerts.yaml")
    promtool("test", "rules", Path(__file__).with_name("alerts_test.yaml"))


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load(Path(__file__).with_name("alerts_test.yaml").read_text())["tests"]
    fired: dict[str, set[bool]] = {}
    for each in (each for test in tests for each in test["alert_rule_test"]):
        fired.setdefault(each["alertname"], set()).add(bool(each["exp_alerts"]))
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert fired == {rule["alert"]: {True, False} for rule in rules}


def test_prometheus_understands_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """As expressions of rules: `promtool` reads those."""
    rules = [{"record": "a:query", "expr": each.replace("$window", "5m")} for each in expressions().values()]
    assert len(rules) > 30
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yaml")
