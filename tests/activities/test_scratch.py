"""Scratch folders: gone with the block, or with the next one after a kill."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from activities.host_context import scratch_folder
from tests.workflows.stand_in import REPOSITORY


def test_a_folder_goes_with_its_block_whatever_happens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), scratch_folder(tmp_path, "pack") as folder:
        (folder / "file").write_text("x")
        raise ValueError("x")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_goes_and_what_is_in_use_stays(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from activities.host_context import scratch_folder\n"
        "with scratch_folder(Path(sys.argv[1]), 'pack'): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, check=False).returncode == -9
    [left] = tmp_path.iterdir()
    with scratch_folder(tmp_path, "pack") as used:
        assert left.exists(), "too new to judge"
        for folder in (left, used):
            os.utime(folder, (0, 0))
        with scratch_folder(tmp_path, "pack"):
            assert not left.exists()
            assert used.exists()
