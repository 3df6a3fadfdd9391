"""What a host finds that it lacks, and says in words."""

import os
import sys
import time
from pathlib import Path

from activities.hosts import standing
from activities.hosts.standing import Fitness, disk_lacks, missing_packages, trial_lacks


def trial(program: str, timeout_s: float = 60.0) -> tuple[str, ...]:
    return trial_lacks([sys.executable, "-c", program], {}, timeout_s)


def test_packages_that_are_missing_are_named() -> None:
    assert missing_packages(("pydantic", "no-such-package")) == (
        "no-such-package is not installed: pip install no-such-package",
    )


def test_a_disk_that_cannot_be_written_or_is_nearly_full_is_told(tmp_path: Path) -> None:
    assert disk_lacks(tmp_path / "new") == ()
    (tmp_path / "file").touch()
    [told] = disk_lacks(tmp_path / "file" / "root")
    assert told.startswith("the disk of LONGSHORE_ROOT cannot be written: ")
    [told] = disk_lacks(tmp_path, least_bytes=1 << 60)
    assert told.endswith(f" MiB free, and {1 << 40} are the least")


def test_a_trial_that_fails_dies_or_hangs_is_told() -> None:
    assert trial("""print("noise"); print('[]')""") == ()
    assert trial("""print('["cuda:1 fails"]')""") == ("cuda:1 fails",)
    [told] = trial("import os; os.kill(os.getpid(), 9)")
    assert told == "a tiny pass on its devices ended with signal 9"
    [told] = trial("raise SystemExit('no driver')")
    assert told == "a tiny pass on its devices ended with exit code 1: no driver"
    [told] = trial("import time; time.sleep(60)", timeout_s=0.3)
    assert told == "a tiny pass on its devices did not end within 0.3 s"


def test_devices_are_tried_where_packages_and_disk_allow_it(tmp_path: Path, monkeypatch) -> None:
    assert Fitness("gpu", tmp_path)() == (), "this machine can work"
    monkeypatch.setattr(standing, "WORKER_PACKAGES", ("no-such-package",))
    assert len(Fitness("gpu", tmp_path)()) == 1


def test_a_check_that_was_passed_holds_for_an_hour_on_the_same_installation(tmp_path: Path, monkeypatch) -> None:
    check = Fitness("gpu", tmp_path)
    assert not check.passed_lately(), "nobody has checked"
    assert check() == () and check.passed_lately()
    assert not Fitness("sampler", tmp_path).passed_lately(), "it loads other packages"
    assert not Fitness("gpu", tmp_path, {"OMP_NUM_THREADS": "7"}).passed_lately()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert not check.passed_lately(), "other devices"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    [mark] = tmp_path.glob("passed-*")
    for at in (time.time() - 3700, time.time() + 3700):
        os.utime(mark, (at, at))
        assert not check.passed_lately(), "too long ago, or by a clock that went wrong"
    os.utime(mark)
    assert check.passed_lately()
    monkeypatch.setattr(standing, "WORKER_PACKAGES", ("no-such-package",))
    assert not check.passed_lately(), "other packages"
    assert check() and not list(tmp_path.glob("passed-*")), "it lacks something: the next host checks first"
