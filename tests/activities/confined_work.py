"""Functions that tests call in a confined child."""

import ctypes
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from activities.sandbox.child import ask, sign
from activities.sandbox.kernel import write_frame
from shared.errors import CorruptArtifact, InvalidInput, StoreUnavailable


def echo(text: str) -> str:
    return text


def environment(_: None) -> dict[str, str]:
    return dict(os.environ)


def ask_often(questions: list[str]) -> list[str]:
    return [ask(question.encode()).decode() for question in questions]


def count(up_to: int) -> Iterator[int]:
    yield from range(up_to)


def grow_python(_: None) -> None:
    sign("rows.jsonl:3")
    kept = [bytearray(16 << 20) for _ in range(1 << 20)]
    assert not kept


def grow_native(_: None) -> None:
    """As a library does that aborts when it gets no more."""
    sign("rows.jsonl:4")
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    while pointer := libc.malloc(ctypes.c_size_t(16 << 20)):
        ctypes.memset(pointer, 1, 16 << 20)
    os.abort()


def spin(_: None) -> None:
    sign("rows.jsonl:5")
    while True:
        pass


def wait(note: str) -> None:
    sign("rows.jsonl:6")
    Path(note).write_text(str(os.getpid()))
    time.sleep(600)


def write_note(note: str) -> None:
    Path(note).touch()


def work_long_and_say_so(num_signs: int) -> float:
    """More processor time than one step may take, in several."""
    for number in range(num_signs):
        sign(f"rows.jsonl:{number}")
        end = time.process_time() + 0.7
        while time.process_time() < end:
            pass
    return time.process_time()


def fail(kind: str) -> None:
    match kind:
        case "input":
            raise InvalidInput("it is wrong", "rows.jsonl:7")
        case "corrupt":
            raise CorruptArtifact("it changed", "a/b")
        case "away":
            raise StoreUnavailable("not now")
        case "disk":
            raise OSError(28, os.strerror(28), "/somewhere")
        case "stack":
            ctypes.string_at(0)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            raise KeyError("a bug")


def take_and_die(num_bytes: int) -> None:
    kept = bytearray(num_bytes)
    kept[::4096] = b"x" * len(range(0, num_bytes, 4096))
    os.kill(os.getpid(), signal.SIGKILL)


def write(folder: str) -> None:
    with Path(folder, "large").open("wb") as file:
        while True:
            file.write(bytes(1 << 20))


def pids(_: None) -> Iterator[int]:
    yield os.getpid()
    time.sleep(600)


def notes(folder: str) -> int:
    """How many such children there are while this one is, as the folder tells."""
    mine = Path(folder, uuid.uuid4().hex)
    mine.touch()
    time.sleep(0.05)
    num_now = sum(1 for _ in Path(folder).iterdir())
    mine.unlink()
    return num_now


def look_round(folder: str) -> dict[str, str]:
    """What a child may read, write and start."""
    root, found = Path(folder), list[str]()
    tried: dict[str, Callable[[], object]] = {
        name: lambda name=name: (root / name).read_text()  # type: ignore[misc]
        for name in ("seen/rows", "seen/link", "other", "/etc/passwd", "/proc/self/environ")
    }

    def made() -> str:
        (root / "made" / "file").write_text("made")
        return (root / "made" / "file").read_text()

    def ran() -> str:
        thread = threading.Thread(target=found.append, args=("it ran",))
        thread.start()
        thread.join()
        return found[0]

    tried["write seen"] = lambda: (root / "seen" / "more").write_text("")
    tried |= {"write made": made, "socket": socket.socket, "fork": os.fork}
    tried |= {"execute": lambda: os.execv("/bin/true", ["true"]), "thread": ran}
    told = {}
    for name, call in tried.items():
        try:
            told[name] = str(call())
        except OSError as error:
            told[name] = type(error).__name__
    return told


def send(frame: str) -> None:
    """What a child may send whose code is not ours any more."""
    write_frame(3, frame.encode())
    time.sleep(600)
