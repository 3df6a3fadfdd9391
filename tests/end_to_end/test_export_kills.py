"""Exports whose writer is killed: they end with the same bytes, and nothing is offered until they are whole."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from shared.storage.artifacts import sha256_file
from tests.depth import drawn
from tests.end_to_end.stack import Stack, wait_until
from tests.end_to_end.victims import control_host, kill

pytestmark = [pytest.mark.slow, pytest.mark.drawn]
# Who is killed when: the process that writes, the host below it, the host as it puts what was written into the store.
POINTS = [
    (form, when, victim)
    for form in ("--merged", "--gguf")
    for when, victim in (("writing", "writer"), ("writing", "host"), ("storing", "host"))
]


@pytest.fixture(scope="module")
def exported(fresh_stack: Stack, tiny_model: Path, chat_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A published adapter of a model that takes a while to write: 160 MB."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("wide") / "model")
    wide = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8}
    config = AutoConfig.from_pretrained(tiny_model, **wide, layer_types=["full_attention"] * 8)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(folder)
    options = ("--steps", "1", "--batch-size", "2", "--max-tokens", "64", "--lora-rank", "2", "--lr", "0.1")
    run = ("submit", "sft", "--json", "--model", str(folder), "--dataset", str(chat_dataset), *options, "--wait")
    return f"{fresh_stack.cli(*run).json['run_id']}:v1"


def writer(stack: Stack) -> list[psutil.Process]:
    """The process that has a file of an export open."""
    [host] = control_host(stack)
    return [each for each in host.children(recursive=True) if any("/export" in path for path in _files(each))]


def _files(process: psutil.Process) -> list[str]:
    try:
        return [opened.path for opened in process.open_files()]
    except psutil.Error:
        return []


@pytest.mark.parametrize(("form", "when", "victim"), drawn(POINTS, 1))
def test_a_killed_export_ends_with_the_same_bytes(
    fresh_stack: Stack, exported: str, tmp_path: Path, form: str, when: str, victim: str
) -> None:
    stack, label = fresh_stack, {"--merged": "merged", "--gguf": "gguf-f16"}[form]
    options = ["export", exported, form, *(["--type", "f16"] if form == "--gguf" else [])]
    store, scratch = stack.root / "store", stack.host_paths.scratch

    def written() -> list[Path]:
        folders = scratch.glob("export*") if when == "writing" else store.glob(f"**/exports/{label}")
        return [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.stat().st_size]

    with ThreadPoolExecutor() as beside:
        asked = beside.submit(stack.cli, *options, "--into", str(tmp_path / "killed"))
        wait_until(written, f"it is {when}", every_s=0.005)
        kill(stack, control_host if victim == "host" else writer, patience_s=0)
        assert not list(store.glob(f"**/exports/{label}/manifest.json")), "it had ended before"
        assert not (tmp_path / "killed").exists() or not any((tmp_path / "killed").iterdir())
        assert asked.result().code == 0
    shutil.rmtree(next(store.glob(f"**/exports/{label}")))
    stack.cli(*options, "--into", str(tmp_path / "again"))
    ours, again = (
        {path.name: sha256_file(path) for path in (tmp_path / name).iterdir()} for name in ("killed", "again")
    )
    assert ours == again and ours, json.dumps([ours, again])
    shutil.rmtree(next(store.glob(f"**/exports/{label}")))
