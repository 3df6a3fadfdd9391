"""A receiver of traces for tests and figures: collects spans by OTLP over HTTP, follows their parents, draws them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_ROW, _LEFT, _WIDTH, _TOP = 17, 330, 640, 34
_COLORS = {
    "longshore-cli": "#8a8f98",
    "longshore-web": "#3b7dd8",
    "longshore-control": "#2e9e6b",
    "longshore-gpu": "#d9822b",
    "longshore-sampler": "#9b59b6",
}


@dataclass(frozen=True)
class Span:
    """One span, with times in seconds since 1970. `parent` is empty if it has none."""

    trace: str
    span: str
    parent: str
    name: str
    process: str
    begin: float
    end: float
    attributes: dict[str, str | int | float] = field(default_factory=dict)


class Receiver:
    """What a collector at `endpoint` has got. `raw`: the bodies, byte for byte."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.raw: list[bytes] = []

    def spans(self) -> list[Span]:
        return [span for body in list(self.raw) for span in _parsed(body)]


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Receive on loopback until the block ends."""

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.raw.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    received = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def of_run(spans: Sequence[Span], run_id: str) -> list[Span]:
    """Return the spans of the trace that a run's workflow was started in, in order of their start times."""
    trace = next(s.trace for s in spans if s.name.startswith("StartWorkflow:") and run_id in s.attributes.values())
    return sorted((span for span in spans if span.trace == trace), key=lambda span: span.begin)


def picture(spans: Sequence[Span], title: str, hidden: tuple[str, ...] = ()) -> str:
    """Draw spans as an SVG, a row each, children below their parents, in order of their start times.

    `hidden`: prefixes of the names of spans to leave out; their children are shown below their parents.
    """
    known = {span.span: span for span in spans}

    def shown_parent(span: Span) -> str:
        above = known.get(span.parent)
        while above is not None and above.name.startswith(hidden):
            above = known.get(above.parent)
        return above.span if above is not None else ""

    below: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        if not span.name.startswith(hidden):
            below.setdefault(shown_parent(span), []).append(span)

    def walk(parent: str, depth: int) -> Iterator[tuple[int, Span]]:
        for span in below.get(parent, ()):
            yield depth, span
            yield from walk(span.span, depth + 1)

    rows = list(walk("", 0))
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    scale = _WIDTH / (end - begin)
    height = _TOP + _ROW * len(rows) + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 70} {height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="8" y="20" font-size="13">{escape(title)}</text>',
    ]
    for number, (depth, span) in enumerate(rows):
        y, x = _TOP + _ROW * number, _LEFT + (span.begin - begin) * scale
        width = max(1.5, (span.end - span.begin) * scale)
        color = _COLORS.get(span.process, "#555")
        parts.append(f'<text x="{8 + 10 * depth}" y="{y + 12}" fill="#222">{escape(_label(span))}</text>')
        parts.append(f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 5}" fill="{color}"/>')
        if span.end - span.begin >= 0.001:
            told = f"{span.end - span.begin:.3f} s"
            parts.append(f'<text x="{x + width + 4:.1f}" y="{y + 12}" fill="#666">{told}</text>')
    for number, (process, color) in enumerate(_COLORS.items()):
        x, y = 8 + 150 * number, height - 10
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 14}" y="{y}" fill="#222">{process}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _label(span: Span) -> str:
    step = span.attributes.get("longshore.step")
    return f"{span.name} {step}" if step is not None else span.name


def _parsed(body: bytes) -> Iterator[Span]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        of = {each.key: each.value.string_value for each in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                kinds = ((each.key, each.value, each.value.WhichOneof("value")) for each in span.attributes)
                yield Span(
                    trace=span.trace_id.hex(),
                    span=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    name=span.name,
                    process=of["service.name"],
                    begin=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    attributes={key: getattr(value, kind) for key, value, kind in kinds if kind},
                )
