"""An installation whose processes are of several builds: checkouts of this repository, on the packages of this one."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Self

from temporalio.client import Client

from benchmarks.stack_processes import end
from longshore.accounts import hash_key, new_key
from longshore.client import Client as LongshoreClient
from service.dev import QUEUE_OPTIONS, Ports, listens, temporal_binary
from shared.child_environment import Kind, child_environment

_START_S = 120.0
_LEAVE_S = 180.0
_PATIENCE_S = 300.0  # how long clients repeat calls while the web service is replaced
# By default Temporal checks every three minutes if a build has active runs, and reports it three minutes later.
_DRAINAGE_OPTIONS = (
    *("--dynamic-config-value", 'matching.wv.VersionDrainageStatusVisibilityGracePeriod="5s"'),
    *("--dynamic-config-value", 'matching.wv.VersionDrainageStatusRefreshInterval="5s"'),
)


@dataclass(frozen=True)
class Build:
    """A checkout, and the name under which its control hosts serve."""

    name: str
    folder: Path


def checked_out(name: str, folder: Path) -> Path:
    """Write a revision of this repository into a new folder."""
    with tarfile.open(fileobj=BytesIO(_git("archive", "--format=tar", name))) as files:
        files.extractall(folder, filter="data")
    return folder


def revision(name: str) -> str:
    """Return the hash of a revision, abbreviated."""
    return _git("rev-parse", "--short", name).decode().strip()


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=Path(__file__).parents[1], check=True, capture_output=True).stdout


class Installation:
    """One Temporal server, one store and one database below `root`, and processes of builds. A context manager.

    Each host has a separate root below it, as if it ran on another machine.
    """

    def __init__(self, root: Path, opened: Path) -> None:
        """`opened`: below it are models and data."""
        self._root, self._processes = root, dict[tuple[str, str], "subprocess.Popen[bytes]"]()
        self._ports = Ports()
        self.key, self._temporal = new_key()[0], f"127.0.0.1:{self._ports.take(0)}"
        self._port = self._ports.take(0)
        self.url = f"http://127.0.0.1:{self._port}"
        self._settings = {
            "LONGSHORE_API_URL": self.url,
            "LONGSHORE_API_KEY_SHA256": hash_key(self.key),
            "LONGSHORE_TEMPORAL_ADDRESS": self._temporal,
            "LONGSHORE_STORE_URI": (root / "store").as_uri(),
            "LONGSHORE_DATABASE_URL": f"sqlite:///{root / 'longshore.db'}",
            "LONGSHORE_SEAL_KEY": secrets.token_hex(32),
            "LONGSHORE_DOWNLOAD__FILE_ROOTS": json.dumps([str(opened)]),
            "LONGSHORE_DTYPE": "float32",
            "LONGSHORE_CPU_THREADS": "1",
            "LONGSHORE_WANDB_MODE": "disabled",
            "LONGSHORE_RATE_LIMIT__PER_S": "1000",
        }

    def __enter__(self) -> Self:
        self._root.mkdir(parents=True)
        address, _, port = self._temporal.rpartition(":")
        command = [temporal_binary(), "server", "start-dev", "--headless", "--ip", address, "--port", port]
        options = (*QUEUE_OPTIONS, *_DRAINAGE_OPTIONS, "--log-level", "warn")
        self._processes["temporal", ""] = self._started([*command, *options], dict(os.environ), "temporal")
        _until_it_listens(self._temporal)
        return self

    def __exit__(self, *_: object) -> None:
        for key in reversed(list(self._processes)):
            self._end(key)
        self._ports.__exit__(None, None, None)

    def start(self, build: Build, role: Kind) -> None:
        """Start a process of a build, unless it is up."""
        if (build.name, role) in self._processes:
            return
        module = ["service.app", "--port", str(self._port)] if role == "web" else ["service.host", "--role", role]
        command = [sys.executable, "-P", "-m", *module]
        name = f"{role}-{build.name}"
        environment = child_environment(role, self._environment(build, self._root / name))
        self._processes[build.name, role] = self._started(command, environment, name)
        if role == "web":
            _until_it_listens(f"127.0.0.1:{self._port}")

    def stop(self, build: Build, role: Kind) -> None:
        """Tell a process to leave, and wait until it has. Raises TimeoutError."""
        self._end((build.name, role))

    def longshore(self, build: Build, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run the command line of a build."""
        command = [sys.executable, "-P", "-c", "from longshore.server import main; main()", *arguments]
        environment = self._environment(build, self._root / "operator")
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def states(self, build: Build) -> dict[str, str]:
        """The state of each build, from `longshore builds ls` of one of them."""
        said = self.longshore(build, "builds", "ls", "--json")
        return {each["build_id"]: each["state"] for each in json.loads(said.stdout)}

    def client(self) -> LongshoreClient:
        return LongshoreClient(self.url, self.key, patience_s=_PATIENCE_S)

    def build_of(self, run_id: str) -> str:
        """Return the build on which a run's workflow was last."""

        async def asked() -> str:
            described = await (await Client.connect(self._temporal)).get_workflow_handle(run_id).describe()
            info = described.raw_description.workflow_execution_info
            return str(info.versioning_info.deployment_version.build_id)

        return asyncio.run(asked())

    def _environment(self, build: Build, root: Path) -> dict[str, str]:
        theirs = {"PYTHONPATH": str(build.folder), "LONGSHORE_BUILD_ID": build.name, "LONGSHORE_ROOT": str(root)}
        ours = {name: value for name, value in os.environ.items() if not name.startswith("LONGSHORE_")}
        return ours | self._settings | theirs

    def _started(self, command: list[str], environment: dict[str, str], name: str) -> "subprocess.Popen[bytes]":
        with (self._root / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, cwd=self._root, stdout=log, stderr=log)

    def _end(self, key: tuple[str, str]) -> None:
        end(self._processes.pop(key), _LEAVE_S)


def _until_it_listens(address: str) -> None:
    deadline = time.monotonic() + _START_S
    while not listens(address):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens at {address} within {_START_S:g} s")
        time.sleep(0.05)
