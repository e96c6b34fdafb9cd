"""What the server counts, in Prometheus' text format at /metrics.

    thoughtbubbles_requests_total{route,status}      HTTP requests
    thoughtbubbles_finished_total{finish}            completions: end, stop, length, cancelled, timeout, error
    thoughtbubbles_waiting                           completions that wait for a row
    thoughtbubbles_rows{state}                       rows of the cache: reading, generating, free
    thoughtbubbles_tokens_total{kind}                read, of prompts; shared: copied from another row; generated
    thoughtbubbles_streams_total                     streams that predicted generated tokens; divide by those
    thoughtbubbles_time_to_first_token_seconds       histogram, from submission, so with the time in the queue
    thoughtbubbles_time_per_token_seconds            histogram: mean of a completion after its first token

Every engine has its own registry.
"""

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thoughtbubbles.generate.engine import Engine

NAME = "thoughtbubbles"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        counter = partial(Counter, namespace=NAME, registry=self.registry)
        histogram = partial(Histogram, namespace=NAME, registry=self.registry)
        self.requests = counter("requests", "HTTP requests", ["route", "status"])
        self.finished = counter("finished", "Completions, by why they ended", ["finish"])
        self.first_token = histogram(
            "time_to_first_token_seconds", "From submission to the first token", buckets=FIRST_TOKEN_BUCKETS
        )
        self.per_token = histogram(
            "time_per_token_seconds", "Mean of a completion, after its first token", buckets=PER_TOKEN_BUCKETS
        )

    def watch(self, engine: Engine) -> None:
        """The engine's own counts are read when they are asked for."""
        self.registry.register(EngineStats(engine))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class EngineStats(Collector):
    def __init__(self, engine: Engine):
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        now = self.engine.stats()
        yield GaugeMetricFamily(f"{NAME}_waiting", "Completions that wait for a row", value=now.waiting)
        rows = GaugeMetricFamily(f"{NAME}_rows", "Rows of the cache", labels=["state"])
        for state, n in (("reading", now.reading), ("generating", now.generating), ("free", now.free)):
            rows.add_metric([state], n)
        yield rows
        tokens = CounterMetricFamily(f"{NAME}_tokens", "Tokens", labels=["kind"])
        counts = ("read", now.tokens_read), ("shared", now.tokens_shared), ("generated", now.tokens_generated)
        for kind, n in counts:
            tokens.add_metric([kind], n)
        yield tokens
        yield CounterMetricFamily(
            f"{NAME}_streams", "Streams of the bubbles that predicted generated tokens", value=now.streams
        )


class RequestCounter:
    """ASGI middleware: counts requests by route and status, those that the guard rejects too."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            route = getattr(scope.get("route"), "path", "other")  # never the path as sent: anybody can send any
            self.metrics.requests.labels(route, str(status)).inc()
