"""The numbers of a server, in the text form of Prometheus.

What it counts itself is about requests, by route and never by what was asked for: no label has a sandbox, a tenant or a
key in it, so there are never more of them than routes. How many sandboxes were made and ended, and how the warm pools
do, is the node's own account, told anew each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sandlot.api import PoolInfo

# Upper bounds in seconds: a warm create takes two milliseconds, a cold one eight, a command as long as it likes.
_QUICK = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_LONG = (*_QUICK, 120, 300, 600, 1800, 3600)

# Which requests have a histogram of their own, and its name.
_TIMED = {
    ("POST", "/v1/sandboxes"): "create",
    ("POST", "/v1/sandboxes/{sandbox_id}/run"): "run",
    ("POST", "/v1/sandboxes/{sandbox_id}/shells/{shell_id}/run"): "shell",
}
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class _Node(Collector):
    """The node's account, as it was last told."""

    def __init__(self) -> None:
        self.requests = 0  # that are being answered
        self.counts: Mapping[str, int] = {}
        self.pools: Iterable[PoolInfo] = ()

    def collect(self) -> Iterator[Metric]:
        endings = dict(self.counts)
        yield CounterMetricFamily("sandlot_creates", "Sandboxes that were begun", value=endings.pop("created", 0))
        yield GaugeMetricFamily("sandlot_requests_running", "Requests that are being answered", value=self.requests)
        yield GaugeMetricFamily("sandlot_live", "Sandboxes that live or are made", value=endings.pop("running", 0))
        ends = CounterMetricFamily("sandlot_ends", "Sandboxes that ended", labels=["reason"])
        for reason, count in endings.items():
            ends.add_metric([reason], count)
        yield ends
        ready = GaugeMetricFamily("sandlot_pool_ready", "Warm sandboxes that wait", labels=["image", "profile"])
        hits = CounterMetricFamily("sandlot_pool_hits", "Creates that a warm one served", labels=["image", "profile"])
        misses = CounterMetricFamily("sandlot_pool_misses", "Creates that found none", labels=["image", "profile"])
        for pool in self.pools:
            for family, value in ((ready, pool.ready), (hits, pool.hits), (misses, pool.misses)):
                family.add_metric([pool.image, pool.profile.value], value)
        yield from (ready, hits, misses)


class _Seen(NamedTuple):
    """Where the requests of one method, route and status are counted: finding it each time would cost more."""

    requests: Counter
    sent: Counter
    received: Counter
    timed: Histogram | None


class Metrics:
    """Those of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._node = _Node()
        self._registry.register(self._node)
        ProcessCollector(registry=self._registry)
        here = self._registry
        self._requests = Counter("sandlot_requests", "Requests", ["method", "route", "status"], registry=here)
        self._sent = Counter("sandlot_sent_bytes", "Bytes of answers, output among them", ["route"], registry=here)
        self._received = Counter("sandlot_received_bytes", "Bytes of requests", ["route"], registry=here)
        self._timed = {
            what: Histogram(f"sandlot_{what}_seconds", f"How long a good {what} took", buckets=buckets, registry=here)
            for what, buckets in (("create", _QUICK), ("run", _LONG), ("shell", _LONG))
        }
        self._seen: dict[tuple[str, str, int], _Seen] = {}

    def begin(self) -> None:
        """A request that will be answered: `request` is called for each."""
        self._node.requests += 1

    def request(self, method: str, route: str, status: int, seconds: float, received: int, sent: int) -> None:
        """One that was answered."""
        self._node.requests -= 1
        asked = (method if method in _METHODS else "other", route, status)
        seen = self._seen.get(asked)
        if seen is None:
            what = _TIMED.get((method, route)) if status < 300 else None
            seen = self._seen[asked] = _Seen(
                self._requests.labels(asked[0], route, str(status)),
                self._sent.labels(route),
                self._received.labels(route),
                None if what is None else self._timed[what],
            )
        seen.requests.inc()
        seen.sent.inc(sent)
        seen.received.inc(received)
        if seen.timed is not None:
            seen.timed.observe(seconds)

    def text(self, counts: Mapping[str, int], pools: Iterable[PoolInfo]) -> bytes:
        self._node.counts, self._node.pools = counts, pools
        return generate_latest(self._registry)
