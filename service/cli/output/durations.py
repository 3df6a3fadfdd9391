"""Parse and format durations."""

import re

from service.cli.exits import USAGE, Stop

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds_of(text: str, option: str) -> int:
    """Parse 90s, 90m, 6h or 1d into seconds. Raises Stop, with the option's name."""
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if found is None:
        raise Stop(f"{option}: {text!r} is no time: write it as 90m, 6h or 1d", USAGE)
    return int(found[1]) * _UNITS[found[2]]


def span(seconds: float) -> str:
    """Format seconds in their two largest units: 3d 4h, 2h 10m, 4m 30s, 12s."""
    left = max(0, round(seconds))
    for (unit, length), (smaller, part) in (
        (("d", 86_400), ("h", 3600)),
        (("h", 3600), ("m", 60)),
        (("m", 60), ("s", 1)),
    ):
        if left >= length:
            rest = left % length // part
            return f"{left // length}{unit}" + (f" {rest}{smaller}" if rest else "")
    return f"{left}s"
