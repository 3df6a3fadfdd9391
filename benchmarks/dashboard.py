"""The Grafana dashboard without Grafana: its panels, drawn from a real Prometheus' answers to their own queries."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import until
from benchmarks.slurm_cluster import free_port
from benchmarks.stack_processes import end

FOLDER = Path(__file__).parents[1] / "infra" / "observability"
EVERY_S = 1.0
_LABEL = re.compile(r"{{(\w+)}}")
_LEGENDS = 8  # of a panel; Grafana's scrolls
_COLUMNS, _WIDE, _HIGH, _HEAD = 24, 0.6, 0.36, 2  # the dashboard's grid; inches of a place in it; places of the title


@dataclass(frozen=True)
class Line:
    """A series of a panel: a value each EVERY_S, NaN where there is none."""

    legend: str
    unit: str
    values: Sequence[float]


class Refused(Exception):
    """An expression that Prometheus does not take."""


class Prometheus:
    """One that runs here, at `url`."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def series(self, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
        """Return the answer to a query over a span of time, in seconds since 1970. Raises Refused."""
        asked = {"query": expression, "start": str(begin), "end": str(end), "step": str(EVERY_S)}
        answer = self._client.post("/api/v1/query_range", data=asked).json()
        if answer["status"] != "success":
            raise Refused(f"{expression}: {answer['error']}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, int]) -> Iterator[Prometheus]:
    """Run Prometheus with the alert rules until the block ends. `targets`: ports of /metrics, by their instance."""
    folder.mkdir()
    scraped = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": instance}} for instance, port in targets.items()
    ]
    config = {
        "global": {"scrape_interval": f"{EVERY_S:g}s", "evaluation_interval": f"{EVERY_S:g}s"},
        "rule_files": [str(FOLDER / "alerts.yaml")],
        "scrape_configs": [{"job_name": "longshore", "static_configs": scraped}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    program, address = shutil.which("prometheus"), f"127.0.0.1:{free_port()}"
    if program is None:
        raise FileNotFoundError("no prometheus on the PATH: Debian's package `prometheus` has it")
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        found = Prometheus(f"http://{address}")
        until(found.is_ready, "Prometheus", 60, 0.1)
        yield found
    finally:
        end(process)


def panels(window: str) -> list[dict[str, Any]]:
    """Return the dashboard's panels, rows left out, with a window of time in place of its variable."""
    text = (FOLDER / "dashboard.json").read_text().replace("$window", window)
    return [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]


def lines_of(panel: dict[str, Any], asked: Prometheus, begin: float, end: float) -> list[Line]:
    """Return a panel's lines over a span of time.

    Raises Refused: an expression is not understood, has no series, or none with a label that its legend names.
    """
    lines = []
    overrides = {each["matcher"]["options"]: each["properties"] for each in panel["fieldConfig"]["overrides"]}
    for target in panel["targets"]:
        units = [p["value"] for p in overrides.get(target["refId"], ()) if p["id"] == "unit"]
        answer, legend = asked.series(target["expr"], begin, end), target["legendFormat"]
        known = {name for series in answer for name in series["metric"]}
        if not answer or set(_LABEL.findall(legend)) - known:
            raise Refused(f"{panel['title']}: {target['expr']}: {len(answer)} series, with the labels {sorted(known)}")
        for series in answer:
            at = {round((float(when) - begin) / EVERY_S): float(value) for when, value in series["values"]}
            lines.append(
                Line(
                    legend=_LABEL.sub(partial(_of_labels, series["metric"]), legend).strip(),
                    unit=units[0] if units else panel["fieldConfig"]["defaults"]["unit"],
                    values=[at.get(place, math.nan) for place in range(round((end - begin) / EVERY_S) + 1)],
                )
            )
    return lines


def _of_labels(labels: dict[str, str], found: re.Match[str]) -> str:
    return labels.get(found[1], "")


def draw(
    drawn: Sequence[tuple[dict[str, Any], list[Line]]], title: str, marks: Mapping[str, float], file: Path
) -> None:
    """Draw panels where the dashboard has them, time in minutes. `marks`: seconds at which something happened."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    pyplot.rcParams.update({"font.size": 8, "axes.prop_cycle": pyplot.cycler(color=pyplot.get_cmap("tab10").colors)})
    rows = [panel for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"] if panel["type"] == "row"]
    grid = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel, _ in drawn) + _HEAD
    figure = pyplot.figure(figsize=(_COLUMNS * _WIDE, grid * _HIGH))

    def place(at: dict[str, int], right: float, down: float) -> tuple[float, float]:
        return (at["x"] + right) / _COLUMNS, 1 - (_HEAD + at["y"] + down) / grid

    figure.text(*place({"x": 0, "y": 0}, 0.4, -1.4), title, fontsize=12, weight="bold")
    told = "   ".join(f"{number}: {what}" for number, what in enumerate(marks, 1))
    figure.text(*place({"x": 0, "y": 0}, 0.4, -0.5), told, color="#555")
    for row in rows:
        figure.text(*place(row["gridPos"], 0.4, 0.8), row["title"], fontsize=10, weight="bold", color="#333")
    for panel, lines in drawn:
        at = panel["gridPos"]
        left, bottom = place(at, 1.2, at["h"] - 2.4)
        axes = figure.add_axes((left, bottom, (at["w"] - 2.2) / _COLUMNS, (at["h"] - 3.3) / grid))
        axes.set_title(panel["title"], loc="left", fontsize=8.5, weight="bold")
        if panel["type"] == "bargauge":
            _draw_bars(axes, lines)
        else:
            _draw_lines(axes, lines, panel["fieldConfig"]["defaults"]["unit"])
            for number, (_, second) in enumerate(marks.items(), 1):
                axes.axvline(second / 60, color="#999", linewidth=0.7, linestyle=":")
                axes.annotate(
                    str(number), (second / 60, 1), xycoords=("data", "axes fraction"), fontsize=6, color="#555"
                )
    figure.savefig(file, dpi=110)
    with Image.open(file) as whole:
        few = whole.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    few.save(file, optimize=True)  # a third of the bytes


def _draw_bars(axes: Any, lines: Sequence[Line]) -> None:
    """Draw the last value of each line."""
    last = [next((value for value in reversed(line.values) if not math.isnan(value)), math.nan) for line in lines]
    bars = axes.barh([line.legend for line in lines], last, height=0.5)
    axes.bar_label(bars, [_in_unit(value, line.unit) for value, line in zip(last, lines, strict=True)], padding=3)
    axes.set_xlim(0, 1.2 * max(last))
    axes.set_xticks([])


def _draw_lines(axes: Any, lines: Sequence[Line], unit: str) -> None:
    """Draw lines; those of another unit than the panel's use the right axis. The highest lines have a legend."""
    from matplotlib.ticker import MultipleLocator

    right: Any = axes.twinx() if any(line.unit != unit for line in lines) else None
    drawn = []
    for number, line in enumerate(lines):
        side = axes if line.unit == unit else right
        minutes = [place * EVERY_S / 60 for place in range(len(line.values))]
        drawn += side.plot(minutes, line.values, color=f"C{number % 10}", linewidth=1.1, label=line.legend)
    for side, its_unit in ((axes, unit), (right, next((line.unit for line in lines if line.unit != unit), unit))):
        if side is not None:
            side.set_ylim(bottom=0)
            side.set_xlim(0, (len(lines[0].values) - 1) * EVERY_S / 60)
            if its_unit == "bytes":
                side.yaxis.set_major_locator(MultipleLocator(50 * 2**20))
            elif its_unit == "s" and (top := side.get_ylim()[1]) > 120:
                side.yaxis.set_major_locator(MultipleLocator(60 * math.ceil(top / 300)))
            side.yaxis.set_major_formatter(lambda value, _, unit=its_unit: _in_unit(value, unit))
            side.tick_params(labelsize=7, length=2)
            side.spines["top"].set_visible(False)
    axes.grid(alpha=0.25)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} min")
    order = sorted(range(len(lines)), key=lambda number: -_highest(lines[number].values))
    shown = [drawn[number] for number in sorted(order[:_LEGENDS])]
    names = [line.get_label() for line in shown]
    columns = 1 if max(map(len, names)) > 40 else 2 if max(map(len, names)) > 22 else 4
    place = {"loc": "upper left", "bbox_to_anchor": (-0.03, -0.1), "frameon": False, "borderpad": 0.2}
    more = f"and {len(lines) - len(shown)} more" if len(lines) > len(shown) else None
    axes.legend(
        shown,
        names,
        fontsize=6.5,
        ncol=columns,
        title=more,
        title_fontsize=6.5,
        handlelength=1.2,
        labelspacing=0.2,
        **place,
    )


def _highest(values: Sequence[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=0.0)


def _in_unit(value: float, unit: str) -> str:
    """Return a number as Grafana writes it in one of the dashboard's units."""
    match unit:
        case "s" if 0 < value < 1:
            return f"{value * 1000:.3g} ms"
        case "s":
            return f"{value / 60:g} min" if value >= 60 and value % 60 == 0 else f"{value:.3g} s"
        case "percentunit":
            return f"{value * 100:.3g} %"
        case "bytes":
            return f"{value / 2**20:.0f} MiB" if value < 2**30 else f"{value / 2**30:.2f} GiB"
    end = {"Bps": "B/s", "reqps": "req/s", "short": ""}[unit]
    for factor, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {sign}{end}"
    return f"{value:.3g} {end}".strip()
