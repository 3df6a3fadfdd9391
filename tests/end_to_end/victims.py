"""The processes of a stack that tests kill, and how."""

import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.end_to_end.stack import Stack, wait_until

LAUNCHER = "megatron_worker.process.launcher"
SAMPLER = "megatron_worker.sampler"

Victim = Callable[[Stack], list[psutil.Process]]


def ranks(stack: Stack) -> list[psutil.Process]:
    """Ranks of workers that have a lease; of those that are kept warm where none has."""
    found = [p for p in stack.processes("megatron_worker") if not {LAUNCHER, SAMPLER} & set(_command(p))]
    return [p for p in found if _is_leased(p)] or found


def a_rank(stack: Stack) -> list[psutil.Process]:
    return ranks(stack)[:1]


def launcher(stack: Stack) -> list[psutil.Process]:
    return stack.processes(LAUNCHER)


def wandb_writer(stack: Stack) -> list[psutil.Process]:
    return stack.processes("activities.tracking.wandb_writer")


def gpu_host(stack: Stack) -> list[psutil.Process]:
    return stack.processes("service.host", "gpu")


def sampler(stack: Stack) -> list[psutil.Process]:
    return stack.processes(SAMPLER)


def a_sampler(stack: Stack) -> list[psutil.Process]:
    return sampler(stack)[:1]


def sampler_host(stack: Stack) -> list[psutil.Process]:
    return stack.processes("service.host", "--role sampler")


def sandboxes(stack: Stack) -> list[psutil.Process]:
    """The processes in which sampler hosts run what users wrote."""
    servers = _children_of_sampler_hosts(stack, "activities.sandbox.child")
    return [child for server in servers for child in server.children(recursive=True)]


def a_box(stack: Stack) -> list[psutil.Process]:
    """The first process of the oldest box in which an agent works."""
    return _children_of_sampler_hosts(stack, "activities.sandbox.box")[:1]


def _children_of_sampler_hosts(stack: Stack, module: str) -> list[psutil.Process]:
    try:
        children = [each for host in sampler_host(stack) for each in host.children()]
    except psutil.NoSuchProcess:
        return []
    return sorted((each for each in children if module in _command(each)), key=lambda each: each.pid)


def control_host(stack: Stack) -> list[psutil.Process]:
    return stack.processes("service.host", "control")


def web_service(stack: Stack) -> list[psutil.Process]:
    return stack.processes("service.app")


def temporal_server(stack: Stack) -> list[psutil.Process]:
    return stack.processes("temporal", "start-dev")


def kill(stack: Stack, victim: Victim, patience_s: float = 30) -> None:
    """SIGKILL, as soon as there is such a process; without patience only what is there now."""
    killed = (
        wait_until(lambda: victim(stack), f"a living {victim.__name__}", patience_s) if patience_s else victim(stack)
    )
    print(f"killing {victim.__name__}: {[process.pid for process in killed]}")
    signal_all(killed, signal.SIGKILL)


def halt(stack: Stack, run_id: str, command: str) -> None:
    """Pause or cancel a run whose ranks stand still until its worker is told, so that it does not end before."""
    held = ranks(stack)
    signal_all(held, signal.SIGSTOP)
    stack.cli(command, run_id)
    wait_until(lambda: any(stack.host_paths.workers.glob(f"*/cancel/{run_id}-*")), "the worker is told")
    signal_all(held, signal.SIGCONT)


def signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _is_leased(rank: psutil.Process) -> bool:
    command = _command(rank)
    return "--root" in command and any(Path(command[command.index("--root") + 1], "leases").glob("*.json"))


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
