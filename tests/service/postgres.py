"""A real PostgreSQL of the tests' own, from the system's packages."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.conftest import free_port

OWNER = "longshore"


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of a fresh server, without the name of a database. Skips where there is none to start."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    if os.getuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("PostgreSQL does not run as root, and there is no setpriv")
    programs = found[-1].parent
    folder = Path(tempfile.mkdtemp(prefix="longshore-postgres-"))  # pytest's own folders are closed to other users
    # It refuses to run as root.
    other = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.getuid() == 0 else []
    if other:
        shutil.chown(folder, "nobody", "nogroup")
    port = free_port()
    data, log = folder / "data", (folder / "server.log").open("wb")
    try:
        initdb = [*other, programs / "initdb", "-D", data, "-U", OWNER, "--auth=trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(initdb, check=True, stdout=log, stderr=log, cwd=folder)
        options = ["-p", str(port), "-k", folder, "-h", "127.0.0.1", "-F"]
        server = subprocess.Popen([*other, programs / "postgres", "-D", data, *options], stdout=log, stderr=log)
        try:
            url = f"postgresql://{OWNER}@127.0.0.1:{port}"
            _wait_for(url)
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # at once; asked by SIGTERM it waits for its last client
            server.wait()
    finally:
        log.close()
        shutil.rmtree(folder)


def dumped(url: str, path: Path) -> None:
    """Save a database, as docs/backup.md says."""
    subprocess.run([_program("pg_dump"), "--format=custom", f"--file={path}", url], check=True)


def restored(server_url: str, name: str, path: Path) -> None:
    """Put a saved database in the place of the one of this name."""
    with psycopg.connect(f"{server_url}/postgres", autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
    url = new_database(server_url, name)
    subprocess.run([_program("pg_restore"), f"--dbname={url}", path], check=True)


def _program(name: str) -> Path:
    return sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))[-1]


def new_database(server_url: str, name: str) -> str:
    """The URL of an empty database."""
    with psycopg.connect(f"{server_url}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return f"{server_url}/{name}"


def _wait_for(url: str) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(f"{url}/postgres").close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
