"""vLLM as a host's sampler: start it at a Unix socket, report when it answers, and end it in time.

    python -m megatron_worker.sampler.vllm --model FOLDER --ready-file FILE ... -- /opt/vllm/bin/vllm [OPTIONS]

It listens at a Unix socket that only this user can open. vLLM itself checks its key only below /v1: inside_vllm/
checks it everywhere, and replaces weights. vLLM gets the key in its environment, which has only listed variables
(shared/child_environment.py). This process ends it when its engine has died or its weights are unknown, on SIGTERM,
and when the parent, or the host of `--host-record`, is gone.
"""

import argparse
import json
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import httpx
import psutil
from pydantic import ValidationError

from longshore.training import Dtype
from megatron_worker.process.startup import PERIOD_S, host_is_gone
from shared.chat.completions import ErrorResponse, SamplerReady
from shared.child_environment import child_environment
from shared.families import read_model_config
from shared.families.model_slices import shape_of
from shared.log_lines import escape_output
from shared.models.end_tokens import GENERATION
from shared.storage.files import reachable, write_atomically
from shared.storage.host_states import has_gpus

_SOCKET = "vllm.sock"
_INSIDE = Path(__file__).parent / "inside_vllm"
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has room for
_ADAPTERS_A_BATCH = 2  # a step's policy, and the one of held-out samples or of a proof
_LOOK_EVERY_S, _LOOK_TIMEOUT_S = 1.0, 30.0
_TERM_GRACE_S = 15.0
# The first error in vLLM's output, which causes the later ones, and the indented line below it, if any. Lines with
# WARNING are skipped: they mention errors that might come.
_CAUSE = re.compile(rb"^(?!.*\bWARNING\b).*?\b(\w+(?:Error|Exception): .*(?:\n +\S.*)?)", re.MULTILINE)
_OUTPUT_BYTES, _CAUSE_BYTES = 4 << 20, 500


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    os.umask(0o077)
    parent = os.getppid()
    if options.end_ids:  # of such a file vLLM takes the end tokens; of "vllm", those that the model's own file names
        config = json.dumps({"eos_token_id": options.end_ids})
        write_atomically(options.ready_file.with_name(GENERATION), config.encode())
    with reachable(options.ready_file.with_name(_SOCKET)) as socket:
        folder = str(Path(socket).parent)
        ready = SamplerReady(
            url="http://vllm",
            socket=socket,
            api_key=secrets.token_urlsafe(24),
            pid=os.getpid(),
            model=str(options.model),
        )
        server = subprocess.Popen(command_of(options, folder), env=environment_of(options, folder, ready.api_key))
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        try:
            why = _watch(server, ready, parent, options)
        finally:
            options.ready_file.unlink(missing_ok=True)
            _end(server)
    # Last, after vLLM's final output: the host reports this line.
    print(why, file=sys.stderr, flush=True)
    return 1


def command_of(options: argparse.Namespace, folder: str) -> list[str]:
    """Return vLLM's command line: the operator's options, then those of the lease, which override them."""
    executable, *own = options.command
    return [
        *(executable, "serve", str(options.model), *own),
        *("--uds", f"{folder}/{_SOCKET}", "--served-model-name", str(options.model)),
        *("--dtype", options.dtype, "--max-model-len", str(options.max_model_len)),
        *("--max-num-seqs", str(options.slots), "--seed", "0", "--load-format", "safetensors"),
        *("--generation-config", folder if options.end_ids else "vllm", "--logprobs-mode", "processed_logprobs"),
        *("--middleware", "longshore_weights.Gate", "--worker-extension-cls", "longshore_weights.Weights"),
        *("--api-server-count", "1"),  # each would admit requests independently
        # If vLLM 0.32 reads a seeded prompt in pieces, it sets its generator back, which torch cannot do on CPUs.
        *(() if has_gpus() else ("--no-enable-chunked-prefill",)),
        *("--no-trust-remote-code", "--disable-fastapi-docs", "--disable-uvicorn-access-log"),
        *(_lora_options(options) if options.max_lora_rank else ()),
        *(("--enable-return-routed-experts",) if tells_routes(options) else ()),
    ]


def tells_routes(options: argparse.Namespace) -> bool:
    """Return True if routes are requested, and the model is a mixture of experts."""
    return options.tell_routes and _is_mixture(options)


def _is_mixture(options: argparse.Namespace) -> bool:
    place = options.model / "config.json"
    config = read_model_config(json.loads(place.read_bytes()), str(place), any_family=True)
    return shape_of(config).routes is not None


def _lora_options(options: argparse.Namespace) -> list[str]:
    """Return options for adapters; `rank_pattern` has twice the rank for experts that PEFT stacks."""
    rank = options.max_lora_rank * (2 if _is_mixture(options) else 1)
    room = next((each for each in _LORA_RANKS if each >= rank), _LORA_RANKS[-1])
    return ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", str(_ADAPTERS_A_BATCH)]


def environment_of(options: argparse.Namespace, folder: str, api_key: str) -> dict[str, str]:
    """Return vLLM's environment: what it needs, and the operator's variables except those that would open it up."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # if there is no GPU: threads take any free core
        "VLLM_HOST_IP": "127.0.0.1",
        # Without which vLLM 0.32 tells no routes.
        **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if tells_routes(options) else {}),
        **child_environment("vllm"),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "PYTHONPATH": str(_INSIDE),
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_RPC_BASE_PATH": folder,
        "VLLM_API_KEY": api_key,
    }


def _watch(server: "subprocess.Popen[bytes]", ready: SamplerReady, parent: int, options: argparse.Namespace) -> str:
    """Write the ready file when vLLM answers. Returns when vLLM is of no use any more, or to nobody, and why."""
    look_at = 0.0
    while server.poll() is None:
        if os.getppid() != parent or (options.host_record and host_is_gone(options.host_record)):
            return "vLLM ends: its host is gone"
        if time.monotonic() > look_at:
            answer, is_ready = health(ready), options.ready_file.exists()
            status = answer.status_code if answer is not None else None
            if status == httpx.codes.OK and not is_ready:
                write_atomically(options.ready_file, ready.model_dump_json().encode())
            if status == httpx.codes.SERVICE_UNAVAILABLE and is_ready:
                return f"vLLM is of no use any more: {_error_text(answer) or _cause()}"
            look_at = time.monotonic() + _LOOK_EVERY_S
        time.sleep(PERIOD_S)
    told = " (routing_replay: off asks for no routes, which need CUDA and vLLM 0.32)" if tells_routes(options) else ""
    return f"vLLM ended with exit code {server.returncode}{told}: {_cause()}"


def health(ready: SamplerReady) -> httpx.Response | None:
    """Return vLLM's answer to a health check; None without one, as while it starts or is busy."""
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=ready.socket), timeout=_LOOK_TIMEOUT_S) as client:
            return client.get(f"{ready.url}/health")
    except httpx.TransportError:
        return None


def _error_text(answer: httpx.Response | None) -> str | None:
    """Return the error text of an answer about weights that could not be replaced; None if the engine has died."""
    try:
        return ErrorResponse.model_validate_json(answer.content).error.message if answer is not None else None
    except ValidationError:
        return None


def _cause() -> str:
    """Return the first error in the output, which vLLM writes to the same file as this process."""
    output = Path("/proc/self/fd/1")
    if not stat.S_ISREG(os.fstat(1).st_mode):
        return "see its output"
    with output.open("rb") as file:
        found = _CAUSE.search(file.read(_OUTPUT_BYTES))
    return " ".join(found[1][:_CAUSE_BYTES].decode(errors="replace").split()) if found else "it names no error"


def _end(server: "subprocess.Popen[bytes]") -> None:
    """End vLLM and its processes. Asked, they leave nothing in /dev/shm."""
    family = psutil.Process().children(recursive=True)
    server.terminate()
    for process in psutil.wait_procs(family, _TERM_GRACE_S)[1]:
        process.kill()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatron_worker.sampler.vllm", description="vLLM as a host's sampler.")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--ready-file", type=Path, required=True, help="where the socket and the key are written")
    parser.add_argument("--host-record", type=Path, help="a worker.json: leave when that host is gone")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--slots", type=int, default=32, help="sequences a step")
    parser.add_argument("--max-model-len", type=int, default=4096, help="prompt and completion together, in tokens")
    parser.add_argument("--max-lora-rank", type=int, default=0, help="of adapters; 0: it takes none")
    parser.add_argument("--tell-routes", action="store_true", help="of a mixture: the experts of each token")
    parser.add_argument("--end-ids", type=int, nargs="*", default=[], help="tokens that end a sample")
    parser.add_argument("command", nargs="+", help="vLLM's executable and options, behind --")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
