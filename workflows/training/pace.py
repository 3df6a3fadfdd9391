"""When a run's last step will be done, by the time between the ends of its steps.

It is measured from the end of the first step that a lease's worker did: neither waiting, nor a worker's start, nor the
warming up in its first step is in it. Another lease may repeat steps, after a while without any: it is measured anew.
"""

from dataclasses import dataclass


@dataclass
class Pace:
    """Ends of steps, the first and the last that one lease's worker did: numbers, and seconds since 1970."""

    _lease: int = 0
    _first: tuple[int, float] | None = None
    _last: tuple[int, float] | None = None

    def take(self, step: int, time: float, lease: int) -> None:
        """A step has ended. What was known before, or of an earlier lease, changes nothing."""
        if self._first is None or lease != self._lease:
            self._lease, self._first, self._last = lease, (step, time), None
        elif step > (self._last or self._first)[0]:
            self._last = step, time

    def end(self, num_steps: int | None, lease: int) -> float | None:
        """When the step of this number ends; None while less than two steps of this lease are known to have."""
        if num_steps is None or self._first is None or self._last is None or lease != self._lease:
            return None
        (first, began), (last, now) = self._first, self._last
        return now + (now - began) / (last - first) * max(0, num_steps - last)
