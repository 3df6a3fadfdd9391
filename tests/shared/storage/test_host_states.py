"""What a machine computes fast in, by its devices and never by a clock; and what hosts leave in the store of it."""

from pathlib import Path

import pytest

from shared.storage.host_states import has_fast_bf16, is_bf16_fast, read_fast_bf16, write_fast_bf16
from shared.storage.store import LocalStore

FAST, SLOW = "flags : fpu avx2 avx512f avx512_bf16\n", "flags : fpu avx2 fma avx512f\n"


def machine(root: Path, cpuinfo: str, gpus: int = 0) -> Path:
    """Its /proc."""
    (root / "driver" / "nvidia" / "gpus").mkdir(parents=True)
    (root / "cpuinfo").write_text(cpuinfo)
    for number in range(gpus):
        (root / "driver" / "nvidia" / "gpus" / f"0000:0{number}:00.0").mkdir()
    return root


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, torch: str = "2.13.0") -> None:
    """The only program on PATH, beside a torch of a version."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (folder / "nvidia-smi").chmod(0o755)
    (folder / f"torch-{torch}.dist-info").mkdir()
    (folder / f"torch-{torch}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {torch}\n")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.syspath_prepend(folder)


def test_a_cpu_says_whether_its_bfloat16_is_fast(tmp_path: Path) -> None:
    assert has_fast_bf16(FAST) and has_fast_bf16("Features : fp asimd bf16\n") and not has_fast_bf16(SLOW)
    assert is_bf16_fast(machine(tmp_path / "fast", FAST)) and not is_bf16_fast(machine(tmp_path / "slow", SLOW))
    assert not is_bf16_fast(tmp_path / "no Linux")


@pytest.mark.parametrize(
    ("program", "is_fast"),
    [
        ("echo 9.0; echo 8.0", True),
        ("echo 9.0; echo 7.5", False),
        ("echo '[N/A]'", False),
        ("true", False),
        ("echo Failed to initialize NVML; exit 9", False),
    ],
)
def test_gpus_say_it_where_there_are_any(tmp_path: Path, monkeypatch, program: str, is_fast: bool) -> None:
    nvidia_smi(tmp_path, monkeypatch, program)
    assert is_bf16_fast(machine(tmp_path / "proc", SLOW if is_fast else FAST, gpus=2)) == is_fast


def test_gpus_that_workers_do_not_use_say_nothing(tmp_path: Path, monkeypatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo 9.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not is_bf16_fast(machine(tmp_path / "hidden", SLOW, gpus=1))
    (tmp_path / "cpu").mkdir()
    nvidia_smi(tmp_path / "cpu", monkeypatch, "echo 9.0", torch="2.13.0+cpu")
    assert not is_bf16_fast(machine(tmp_path / "proc", SLOW, gpus=1))


def test_what_was_said_of_a_shape_stays(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert read_fast_bf16(store, "a/b c") is None
    for said in (True, False):
        write_fast_bf16(store, "a/b c", said)
        assert read_fast_bf16(store, "a/b c") is said and read_fast_bf16(store, "a") is None
