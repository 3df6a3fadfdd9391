"""docs/team_install.md, followed on two machines: network namespaces, PostgreSQL, S3 and a Temporal server.

There is no systemd here: units and their files are read by its rules (systemd.exec(5), systemd.syntax(7)).
"""

import asyncio
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import boto3
import pytest

from longshore.accounts import hash_key
from tests.conftest import S3Server
from tests.end_to_end.stack import PATIENCE_S, wait_until
from tests.end_to_end.test_machines import forward
from tests.ended import end
from tests.machines import Machines, made
from tests.service.postgres import dumped, new_database, postgres, restored

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "team_install.md").read_text()
UNITS = ROOT / "infra" / "systemd"
# What systemd gives to a service that says nothing else.
PLAIN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def environment_of(text: str) -> dict[str, str]:
    """An EnvironmentFile: comments have lines of their own, quotes are taken off, everything else is the value."""
    found = {}
    for line in re.sub(r"\\\n", "", text).splitlines():
        if line.strip() and not line.lstrip().startswith(("#", ";")):
            name, _, value = line.partition("=")
            value = value.strip()
            if value[:1] in ("'", '"') and value[-1:] == value[:1]:
                value = value[1:-1]
            found[name.strip()] = value
    return found


def unit(name: str, instance: str = "") -> dict[str, list[str]]:
    """The settings of a unit's [Service], each with its values in order."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in (UNITS / name).read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line.strip() and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value.replace("%i", instance))
    return found


def files_of_the_page() -> dict[str, str]:
    """The files in /etc/longshore as the page has them, by name."""
    found = {}
    for before, text in re.findall(r"\n\n([^\n](?:(?!\n\n).)*)\n\n```ini\n(.*?)```", PAGE, re.S):
        for name in re.findall(r"`/etc/longshore/(\w+\.env)`", before):
            found[name] = text
    return found


def test_comments_and_quotes_are_read_as_systemd_reads_them() -> None:
    text = "# one\n; two\nA=b # c\nB='[\"x\"]'\n C = d\\\ne\n"
    assert environment_of(text) == {"A": "b # c", "B": '["x"]', "C": "de"}


def test_no_value_of_the_page_holds_a_comment() -> None:
    files = files_of_the_page()
    assert set(files) == {"common.env", "web.env", "gpu.env", "sampler.env"}
    for text in files.values():
        assert not [value for value in environment_of(text).values() if "#" in value or value.endswith(" ")]


@dataclass
class Site:
    """Two machines: `control` has the web service and a control host, `gpu` a GPU host and a sampler host."""

    folder: Path
    machines: Machines
    replaced: dict[str, str]
    key: str
    running: dict[tuple[str, str], subprocess.Popen[bytes]] = field(default_factory=dict)

    def install(self, machine: str) -> None:
        """Write the page's files, filled in."""
        etc = self.folder / machine / "etc"
        etc.mkdir(parents=True)
        (self.folder / machine / "lib").mkdir(mode=0o700)  # the StateDirectory
        wanted = ("common.env", "web.env") if machine == "control" else ("common.env", "gpu.env", "sampler.env")
        for name in wanted:
            text = files_of_the_page()[name].replace("10.0.0.12", self.machines.addresses[machine])
            text = text.replace("/var/lib/longshore", str(self.folder / machine / "lib"))
            for old, new in self.replaced.items():
                text = text.replace(old, new)
            assert "…" not in text and "example" not in text, text
            (etc / name).write_text(text)

    def environment(self, machine: str, name: str, instance: str = "") -> dict[str, str]:
        told = dict(PLAIN)
        for path in unit(name, instance)["EnvironmentFile"]:
            file = self.folder / machine / "etc" / Path(path.removeprefix("-")).name
            if file.exists() or not path.startswith("-"):
                told |= environment_of(file.read_text())
        return told

    def start(self, machine: str, name: str, instance: str = "") -> None:
        [command] = unit(name, instance)["ExecStart"]
        python, *arguments = shlex.split(command)
        assert python == "/opt/longshore/venv/bin/python" and f"{python.removesuffix('python')}pip install" in PAGE
        environment = self.environment(machine, name, instance)

        def start() -> subprocess.Popen[bytes]:
            with (self.folder / machine / f"{instance or 'web'}.log").open("ab") as log:
                return subprocess.Popen([sys.executable, *arguments], env=environment, cwd="/", stdout=log, stderr=log)

        self.running[machine, instance or "web"] = self.machines.on(machine, start)

    def stop(self, machine: str, instance: str) -> None:
        end(self.running.pop((machine, instance)))

    def run(self, machine: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of a person's on a machine; `longshore` is on the path, as the page says."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        path = {"PATH": f"{Path(sys.executable).parent}:{PLAIN['PATH']}", "HOME": str(home)}
        call = partial(
            subprocess.run,
            command,
            env=PLAIN | environment | path,
            cwd=home,
            input=self.key + "\n",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return self.machines.on(machine, call)

    def done(self, *command: str, **environment: str) -> str:
        """What a command on the control machine printed; it succeeded."""
        done = self.run("control", *command, **environment)
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout

    def is_ready(self) -> bool:
        return self.run("control", "curl", "--fail", "--silent", "http://127.0.0.1:8484/readyz").returncode == 0

    def logs(self) -> str:
        return "".join(f"\n== {path}\n{path.read_text()[-2000:]}" for path in self.folder.rglob("*.log"))


@contextmanager
def forwarded(machines: Machines, ports: dict[str, str]) -> Iterator[None]:
    """Let each machine reach what listens on this one: a port there to an address here."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="forwarding", daemon=True).start()
    for name in machines.addresses:
        for port, address in ports.items():
            listener = machines.on(name, partial(socket.create_server, ("127.0.0.1", int(port))))
            serving = asyncio.start_server(partial(forward, address), sock=listener)
            asyncio.run_coroutine_threadsafe(serving, loop).result()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)


def test_two_machines_run_chat_and_are_restored(
    temporal_address: str, s3_server: S3Server, tiny_model: Path, chat_dataset: Path, tmp_path: Path
) -> None:
    key = f"ls-{secrets.token_hex(24)}"
    replaced = {
        "s3://your-bucket": s3_server.uri,
        "https://s3.example.internal": "http://127.0.0.1:9000",
        "AWS_ACCESS_KEY_ID=…": f"AWS_ACCESS_KEY_ID={os.environ['AWS_ACCESS_KEY_ID']}",
        "AWS_SECRET_ACCESS_KEY=…": f"AWS_SECRET_ACCESS_KEY={os.environ['AWS_SECRET_ACCESS_KEY']}",
        "temporal.example.internal:7233": "127.0.0.1:7233",
        "LONGSHORE_SEAL_KEY=…": f"LONGSHORE_SEAL_KEY={secrets.token_hex(32)}",
        "longshore:…@db.example.internal": "longshore@127.0.0.1:5432",
        "https://longshore.example.internal": "http://127.0.0.1:8484",  # there is no TLS proxy here
        "API_KEY_SHA256=…": f"API_KEY_SHA256={hash_key(key)}",
    }
    s3 = boto3.client("s3", endpoint_url=s3_server.endpoint_url)
    s3.create_bucket(Bucket="models")
    for path in tiny_model.iterdir():
        s3.upload_file(str(path), "models", f"tiny/{path.name}")
    with ExitStack() as exits:
        server = exits.enter_context(postgres())
        new_database(server, "longshore")
        machines = exits.enter_context(made("control", "gpu"))
        addresses = {"5432": server.partition("@")[2], "7233": temporal_address}
        addresses["9000"] = s3_server.endpoint_url.removeprefix("http://")
        exits.enter_context(forwarded(machines, addresses))
        site = Site(tmp_path, machines, replaced, key)
        exits.callback(lambda: [site.stop(*each) for each in list(site.running)])
        for machine in machines.addresses:
            site.install(machine)
        site.start("control", "longshore-web.service")
        site.start("control", "longshore-host@.service", "control")
        site.start("gpu", "longshore-host@.service", "gpu")
        site.start("gpu", "longshore-host@.service", "sampler")
        wait_until(site.is_ready, "the service is ready", every_s=1)

        site.done("longshore", "login", "http://127.0.0.1:8484")
        told = site.run("control", "longshore", "doctor").stdout
        assert re.search("ok .*hosts", told) or "host" in told, told
        (tmp_path / "home" / "train.jsonl").write_bytes(chat_dataset.read_bytes())
        trained = site.done(
            *("longshore", "submit", "sft", "--model", "s3://models/tiny", "--dataset", "train.jsonl"),
            *("--name", "first", "--steps", "2", "--max-tokens", "128", "--wait"),
        )
        assert "published: first:v1" in trained
        asked = ("longshore", "chat", "first", "How many crates are on quay 3?", "--max-tokens", "8")
        site.done(*asked)
        assert "nightly job" in site.done(
            "longshore", "keys", "create", "nightly job", "--scope", "read", "--expires", "90d"
        ) + site.done("longshore", "keys", "ls")
        site.done("longshore", "tenants", "create", "harbour", "--gpu-hours", "200")

        site.stop("control", "web")
        dumped(f"{server}/longshore", tmp_path / "longshore.dump")
        restored(server, "longshore", tmp_path / "longshore.dump")
        site.start("control", "longshore-web.service")
        wait_until(site.is_ready, "the service is ready again", every_s=1)
        wait_until(lambda: "first" in site.run("control", "longshore", "models", "ls").stdout, "it has its database")
        web = site.environment("control", "longshore-web.service")
        wait_until(lambda: site.run("control", "longshore", "db", "files", **web).returncode == 0, "they agree")
        assert re.search(r"sft-\w+ +succeeded", site.done("longshore", "ls"))
        assert "nightly job" in site.done("longshore", "keys", "ls")
        site.done(*asked)
