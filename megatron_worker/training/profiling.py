"""Traces the next optimizer steps of a job with torch's profiler, if its host asks for a trace."""

import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shared.storage.staging import ProfileRequest


class StepProfiler:
    """Looks for a request at each step's end, and traces this rank's steps from there on.

    Used as a context of a job: what was traced until its end is written then. Other jobs of the worker have their turns
    between two steps, and their operations are in the trace, too. It has names and times, and no data.

    `log`: the job's, on rank 0; other ranks have None, and do nothing.
    """

    _is_busy: ClassVar[bool] = False  # torch has one profiler a process

    def __init__(self, log: str | None) -> None:
        self._log = log
        self._request: ProfileRequest | None = None
        self._profile: profile | None = None
        self._left = 0
        self._step: record_function

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._profile is not None:
            self._step.__exit__(None, None, None)
            self._write()

    def at_boundary(self) -> None:
        """To be called before the first step, and after each."""
        if self._log is None:
            return
        if self._profile is not None:
            self._step.__exit__(None, None, None)
            self._left -= 1
            if self._left == 0:
                self._write()
            else:
                self._step = _marked_step()
        elif not StepProfiler._is_busy and (path := ProfileRequest.path(self._log)).exists():
            self._begin(path)

    def _begin(self, path: Path) -> None:
        self._request = ProfileRequest.model_validate_json(path.read_bytes())
        path.unlink()
        devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile, self._left = profile(activities=[ProfilerActivity.CPU, *devices]), self._request.steps
        StepProfiler._is_busy = True
        self._profile.start()
        self._step = _marked_step()

    def _write(self) -> None:
        """Write the trace, if there is one. A disk without room for it is no fault of the job."""
        if self._profile is None or self._request is None or self._log is None:
            return
        taken, self._profile = self._profile, None
        taken.stop()
        StepProfiler._is_busy = False
        path = self._request.trace(self._log)
        temporary = path.with_name(f".{path.name}")
        try:
            taken.export_chrome_trace(str(temporary))
            temporary.rename(path)
        except OSError as error:
            print(f"the trace of profile {self._request.profile_id} cannot be written: {error}", file=sys.stderr)
            with suppress(OSError):
                temporary.unlink()


def _marked_step() -> record_function:
    """Begin a span in the trace that covers a step."""
    mark = record_function("optimizer step")
    mark.__enter__()
    return mark
