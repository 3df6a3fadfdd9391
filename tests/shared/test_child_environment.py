import re
from typing import get_args

from pydantic import BaseModel, SecretStr

from activities.hosts.workers import worker_environment
from shared.child_environment import SECRET_SETTINGS, Kind, child_environment
from shared.settings import S3Settings, Settings


def secret_fields(model: type[BaseModel], place: str = "") -> set[str]:
    """Of what is a secret by its type or its name."""
    found = set()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= secret_fields(kind, f"{place}{name}__")
        elif "SecretStr" in str(kind) or kind is SecretStr or re.search(r"key|secret|token|password", name):
            found.add(place + name)
    return found


def test_of_every_secret_among_the_settings_it_is_said_who_is_told():
    assert {"api_key", "database_url", "sampling__api_key"} <= secret_fields(Settings)
    missing = {name for name in secret_fields(Settings) if not {name, name.split("__")[0]} & SECRET_SETTINGS.keys()}
    assert missing == set()


def test_a_process_is_told_what_is_listed_for_its_kind_and_no_more():
    given = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "AWS_PROFILE": "x",
        "HTTPS_PROXY": "http://user:password@proxy",
        "HF_TOKEN": "x",
        "WANDB_API_KEY": "x",
        "NCCL_DEBUG": "INFO",
        "GITHUB_TOKEN": "x",
        "LONGSHORE_ROOT": "/root",
        "LONGSHORE_SHAPE": "cpu",
        "longshore_database_url": "x",
        "LONGSHORE_SAMPLING__URL": "x",
        "LONGSHORE_SAMPLING__API_KEY": "x",
        "LONGSHORE_SAMPLING__VLLM_COMMAND": "x",
        "LONGSHORE_UNKNOWN": "x",
        "VLLM_LOGGING_LEVEL": "x",
    }
    always, s3 = {"PATH", "LC_ALL", "LONGSHORE_ROOT", "PYTHONPATH"}, {"AWS_PROFILE", "HTTPS_PROXY"}
    forked = {"LANG", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "ARROW_DEFAULT_MEMORY_POOL", "MALLOC_ARENA_MAX"}
    told = {
        "temporal": always,
        "web": always | s3 | {"LONGSHORE_SHAPE", "longshore_database_url", "LONGSHORE_SAMPLING__URL"},
        "gpu": always | s3 | {"LONGSHORE_SHAPE", "NCCL_DEBUG"},
        "sampler": always
        | s3
        | {"LONGSHORE_SHAPE", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "LONGSHORE_SAMPLING__VLLM_COMMAND"},
        "worker": always | {"NCCL_DEBUG", "VLLM_LOGGING_LEVEL"},
        "vllm": {"PATH", "LC_ALL", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL"}
        | {"HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"},
        "wandb": always | {"HTTPS_PROXY", "WANDB_API_KEY", "WANDB_ERROR_REPORTING", "WANDB_SILENT"},
        "confined": {"PATH", "HTTPS_PROXY"} | forked,
        "decoder": {"PATH"} | forked,
        "template": {"PATH", "LANG"},
    }
    assert {kind: set(child_environment(kind, given)) for kind in told} == told
    store = ("web", "control", "gpu", "sampler")
    assert [kind for kind in get_args(Kind) if "AWS_PROFILE" in child_environment(kind, given)] == list(store)
    settings = Settings(s3=S3Settings(endpoint_url="http://s3", region="x"))
    assert not [name for name in worker_environment(settings) if "S3" in name]


def test_a_secrets_file_is_named_to_whom_the_secret_is_told():
    given = {f"LONGSHORE_{name}_FILE": "/run/x" for name in ("SEAL_KEY", "DATABASE_URL", "SAMPLING__API_KEY", "OTHER")}
    told = {kind: child_environment(kind, given).keys() & given.keys() for kind in get_args(Kind)}
    assert told["web"] == {"LONGSHORE_SEAL_KEY_FILE", "LONGSHORE_DATABASE_URL_FILE"}
    assert told["control"] == {"LONGSHORE_SEAL_KEY_FILE", "LONGSHORE_SAMPLING__API_KEY_FILE"}
    assert told["gpu"] == told["sampler"] == {"LONGSHORE_SEAL_KEY_FILE"}
    assert not any(names for kind, names in told.items() if kind not in ("web", "control", "gpu", "sampler"))
