"""Environment variables that are passed on to child processes: one allow-list for each kind of process.

Variables that are not listed are removed, so that a secret reaches only the processes that use it.
"""

import os
from collections.abc import Mapping
from typing import Literal

from longshore.server import with_import_path
from shared.jobs.job import WORKER_ID_VARIABLE
from shared.settings import FROM_FILE, Settings

Kind = Literal[
    "temporal", "web", "control", "gpu", "sampler", "worker", "vllm", "wandb", "confined", "decoder", "template"
]
"""`control`, `gpu` and `sampler` are hosts; `worker` is what the latter two start; `vllm` is a sampler host's vLLM;
`wandb` is a control host's writer; `confined` works on strangers' data, which its host has staged;
`decoder` on bodies of requests; `template` renders strangers' templates."""

STACK_MARK = "LONGSHORE_DEV_ROOT"
"""Carried by every process of a `longshore dev` stack, so that the next one finds what a killed one left behind."""

_PREFIX = "LONGSHORE_"

# Names of variables; a name that ends with a star matches all with that prefix.
_SYSTEM = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_*"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "PYTHON*", "VIRTUAL_ENV"),
    *("LONGSHORE_ROOT", STACK_MARK, WORKER_ID_VARIABLE),
)
_NETWORK = (
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
_S3 = ("AWS_*",)
_HUB = ("HF_*", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_*")
_DEVICE = (
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "TORCH*", "PYTORCH_*", "TRITON_*", "CUBLAS_*", "CC", "CXX"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "ATEN_CPU_CAPABILITY"),
)
_TRACES = ("OTEL_*",)  # may hold the key of a trace collector
_VLLM = ("VLLM_*",)
_ALLOWED: dict[Kind, tuple[str, ...]] = {
    "temporal": (*_SYSTEM, "GOGC", "GOMEMLIMIT", "GOMAXPROCS", "GODEBUG"),
    "web": (*_SYSTEM, *_NETWORK, *_S3, *_TRACES, "PG*"),
    "control": (*_SYSTEM, *_NETWORK, *_S3, *_TRACES, *_HUB, "WANDB_*"),
    "gpu": (*_SYSTEM, *_NETWORK, *_S3, *_TRACES, *_DEVICE),
    "sampler": (*_SYSTEM, *_NETWORK, *_S3, *_TRACES, *_DEVICE, *_VLLM),
    # Neither a proxy nor credentials: workers read only local folders; their hosts stage files from a store.
    "worker": (*_SYSTEM, *_DEVICE, *_VLLM),
    # No PYTHON*: vLLM has its own Python.
    "vllm": (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_*", "TZ", "TMPDIR", "XDG_*", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *("MALLOC_*", STACK_MARK, WORKER_ID_VARIABLE, *_DEVICE, *_VLLM),
    ),
    "wandb": (*_SYSTEM, *_NETWORK, "WANDB_*"),
    "confined": ("PATH", "TZ"),
    "decoder": ("PATH", "TZ"),
    "template": ("PATH", "TZ"),
}
_FORKED = {
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",  # a process with threads cannot be forked safely
    "OMP_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # the other pools count memory that they only reserve
    "MALLOC_ARENA_MAX": "2",
}
_SET: dict[Kind, Mapping[str, str]] = {
    "vllm": {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    "wandb": {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"},
    "confined": _FORKED,
    "decoder": _FORKED,
    "template": {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},  # so that grades are reproducible
}

_SERVICES: tuple[Kind, ...] = ("web", "control", "gpu", "sampler")
"""Kinds that read the settings `LONGSHORE_*`; the others get what they need from the process that starts them."""

SECRET_SETTINGS: dict[str, tuple[Kind, ...]] = {
    "api_key": (),  # the service needs only its hash
    "api_key_sha256": ("web",),
    "database_url": ("web",),
    "seal_key": _SERVICES,
    "temporal_api_key": _SERVICES,
    "temporal_tls_key": _SERVICES,
    "grading": ("control",),
    "sampling": ("web", "control"),
    "sampling__api_key": ("control",),
    "sampling__vllm_command": ("sampler",),
    "tinker__max_tokens": _SERVICES,  # no secret, though it is named like one
    "sampling__weights_address": ("sampler",),
    "host_address": ("control", "gpu", "sampler"),
}
"""Settings that hold secrets, and the kinds of process that get them; other settings go to all that read settings."""


def child_environment(kind: Kind, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of `given` that this kind of process may see, and those that are set for its kind."""
    allowed = {name: value for name, value in with_import_path(given).items() if _is_allowed(kind, name)}
    return allowed | dict(_SET.get(kind, {}))


def _is_allowed(kind: Kind, name: str) -> bool:
    listed = (name == entry or (entry.endswith("*") and name.startswith(entry[:-1])) for entry in _ALLOWED[kind])
    return any(listed) or (kind in _SERVICES and _is_setting_of(kind, name))


def _is_setting_of(kind: Kind, name: str) -> bool:
    """Return True if a variable is a setting that this kind of process may see, such as `LONGSHORE_S3__REGION` of `s3`.

    Settings are read without regard to case.
    """
    if not name.upper().startswith(_PREFIX):
        return False
    setting = name[len(_PREFIX) :].lower().removesuffix(FROM_FILE)
    group = setting.split("__")[0]
    allowed = SECRET_SETTINGS.get(setting) or SECRET_SETTINGS.get(group, _SERVICES)
    return group in Settings.model_fields and kind in allowed
