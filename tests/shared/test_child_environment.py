import re

from pydantic import BaseModel, SecretStr

from shared.child_environment import SECRET_SETTINGS, child_environment
from shared.settings import Settings


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
    always = {"PATH", "LC_ALL", "LONGSHORE_ROOT"}
    told = {
        "temporal": always,
        "web": always | {"AWS_PROFILE", "LONGSHORE_SHAPE", "longshore_database_url", "LONGSHORE_SAMPLING__URL"},
        "gpu": always | {"AWS_PROFILE", "LONGSHORE_SHAPE", "NCCL_DEBUG"},
        "sampler": always
        | {"AWS_PROFILE", "LONGSHORE_SHAPE", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "LONGSHORE_SAMPLING__VLLM_COMMAND"},
        "worker": always | {"AWS_PROFILE", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL"},
        "vllm": {"PATH", "LC_ALL", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL"}
        | {"HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"},
        "wandb": always | {"WANDB_API_KEY", "WANDB_ERROR_REPORTING", "WANDB_SILENT"},
        "template": {"PATH", "LANG"},
    }
    assert {kind: set(child_environment(kind, given)) for kind in told} == told
