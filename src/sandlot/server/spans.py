"""Spans of requests for OpenTelemetry, where its SDK is installed and its own environment variables say where they go.

Each span is named after its route and carries a sandbox's id, never what was said. Where a request brings a trace with
it (`traceparent`), the span is a part of that.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_WANTED = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Spans:
    """Those of one server."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("sandlot")

    def begin(self, headers: dict[bytes, bytes]) -> Span:
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        carried = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers.items()
            if name in (b"traceparent", b"tracestate")
        }
        return self._tracer.start_span("request", context=extract(carried), kind=SpanKind.SERVER)

    def end(self, span: Span, told: dict[str, Any]) -> None:
        from opentelemetry.trace import StatusCode

        span.update_name(f"{told['method']} {told['route']}")
        span.set_attributes(
            {
                "http.request.method": told["method"],
                "http.route": told["route"],
                "http.response.status_code": told["status"],
                "sandlot.request": told["request"],
                **({"sandlot.sandbox": told["sandbox"]} if told["sandbox"] else {}),
            }
        )
        if told["status"] >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Sends what is left; blocks until that is done, for seconds where nobody takes it."""
        self._provider.shutdown()


def configured() -> Spans | None:
    """None: the environment says nothing of traces, or the SDK is not installed."""
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return None
    if not any(os.environ.get(name) for name in _WANTED):
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

        out: SpanExporter
        if exporter == "console":
            out = ConsoleSpanExporter()
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            out = OTLPSpanExporter()
    except ImportError:
        return None
    name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "sandlot"}
    provider = TracerProvider(resource=Resource.create(name))
    provider.add_span_processor(BatchSpanProcessor(out))
    return Spans(provider)
