"""The metrics of a server, kept by prometheus_client.

Most metrics count as things happen. The engine counts for itself: `refresh`
copies its numbers, before each text and, in a worker, about every second. The
workers of a server write their numbers to files of one folder, which is that of
PROMETHEUS_MULTIPROC_DIR, and each gives the text of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

from gemmakv.chat._gemma import Gemma
from gemmakv.generation._prefix import ModelPrefixCache
from gemmakv.generation._profile import PhaseProfile
from gemmakv.generation._threads import ThreadPlacement
from gemmakv.server.service.admission import Admission
from gemmakv.server.service.events import Ended

FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's variable
_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 120.0, 300.0,
)  # fmt: skip
_SHARED_TIERS = (("shared",), ("disk",), ("remote",))

# The values of a metric by those of its labels.
_Numbers = Mapping[tuple[str, ...], float]
_Read = Callable[[], _Numbers]


class Counts:
    """The metrics of a server.

    Attributes:
      tells_shared: whether this process gives the sizes of the tiers that it
        shares with other workers, of which one does.
    """

    tells_shared = True

    def __init__(
        self, labels: Sequence[str], admission: Admission, model: Gemma
    ) -> None:
        """`labels` are the names of the keys in metrics."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._copies: list[_Copy] = []
        # fmt: off
        self.requests = self._counter("requests_total",
            "Answers by route, status and key.", "route", "status", "key")
        self.rejected = self._counter("requests_rejected_total",
            "Refused requests by reason.", "reason")
        self.cancelled = self._counter("requests_cancelled_total",
            "Requests whose client went away.")
        self.prompt_tokens = self._counter("prompt_tokens_total",
            "Tokens of prompts by key.", "key")
        self.cached_tokens = self._counter("cached_tokens_total",
            "Tokens of prompts that were not computed, by key.", "key")
        self.completion_tokens = self._counter("completion_tokens_total",
            "Sampled tokens by key.", "key")
        self.embeddings = self._counter("embeddings_total",
            "Texts that vectors were made of, by key.", "key")
        self.drafted_tokens = self._counter("drafted_tokens_total",
            "Tokens that were guessed and checked.")
        self.accepted_tokens = self._counter("accepted_tokens_total",
            "Guesses that were right.")
        self.misses = self._counter("cache_misses_total",
            "Requests for which the prefix cache had less than it could have, "
            "by reason.", "reason")
        self.queue_s = self._histogram("queue_seconds",
            "From arrival to running.")
        self.first_token_s = self._histogram("time_to_first_token_seconds",
            "From arrival to the first token.")
        self.inter_token_s = self._histogram("inter_token_seconds",
            "Between two tokens.")
        # fmt: on
        for label in labels:
            for counter in (
                self.prompt_tokens, self.cached_tokens, self.completion_tokens,
                self.embeddings,
            ):  # fmt: skip
                counter.labels(key=label)  # shows a 0 before it counts
        self._copy_engine(admission, model)
        if model.prefix_cache is not None:
            self._copy_prefix_cache(model.prefix_cache)

    def add(self, label: str, event: Ended) -> None:
        """Adds the tokens of a request that has ended."""
        self.prompt_tokens.labels(key=label).inc(event.prompt_tokens)
        self.cached_tokens.labels(key=label).inc(event.cached_tokens)
        self.completion_tokens.labels(key=label).inc(event.completion_tokens)
        self.drafted_tokens.inc(event.drafted)
        self.accepted_tokens.inc(event.accepted)
        if event.miss_reason:
            self.misses.labels(reason=event.miss_reason).inc()

    def refresh(self) -> None:
        """Copies the numbers that the engine counts."""
        for copy in self._copies:
            copy.refresh()

    def metrics_text(self, accept: str = "") -> tuple[bytes, str]:
        """Gives the answer of /metrics, of all workers if there are several,
        and its type of content, which follows the request's Accept header.
        """
        self.refresh()
        registry = self._registry
        if os.environ.get(FOLDER):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        encode, kind = choose_encoder(accept)
        return encode(registry), kind

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(
            f"gemmakv_{name}", text, labels, registry=self._registry
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"gemmakv_{name}", text, buckets=_SECONDS, registry=self._registry
        )

    def _copy(self, name: str, text: str, read: _Read, *labels: str) -> None:
        """Adds a metric of the engine's: a counter if its name says so."""
        metric: Counter | Gauge
        if name.endswith("_total"):
            metric = self._counter(name, text, *labels)
        else:
            metric = Gauge(
                f"gemmakv_{name}", text, labels, registry=self._registry,
                multiprocess_mode="livesum",
            )  # fmt: skip
        self._copies.append(_Copy(metric, read))

    def _copy_engine(self, admission: Admission, model: Gemma) -> None:
        threads = _threads(model.thread_placement)

        def steps(numbers: Callable[[str, PhaseProfile], _Numbers]) -> _Read:
            """Reads nothing where steps are not timed."""

            def read() -> _Numbers:
                found: dict[tuple[str, ...], float] = {}
                if model.profiled:
                    for name, phase in model.profile().phases():
                        found.update(numbers(name, phase))
                return found

            return read

        # fmt: off
        self._copy("rows_running", "Continuations that run.",
            lambda: {(): admission.running})
        self._copy("requests_waiting", "Requests in the queue.",
            lambda: {(): admission.waiting})
        self._copy("preemptions_total",
            "Requests that gave way to others for want of memory.",
            lambda: {(): model.preemptions})
        self._copy("threads",
            "Threads that compute, by whether they are pinned and by their "
            'NUMA node, "any" where they are not.',
            lambda: threads, "pinned", "node")
        self._copy("step_seconds_total",
            "Seconds of steps by what they do and by part, with --profile.",
            steps(lambda name, phase: {
                (name, part): seconds
                for part, seconds in phase.parts.items()
                if seconds > 0
            }), "phase", "part")
        self._copy("steps_total", "Steps by what they do, with --profile.",
            steps(lambda name, phase: {(name,): phase.steps}), "phase")
        self._copy("step_rows_total",
            "Positions that steps computed, with --profile.",
            steps(lambda name, phase: {(name,): phase.rows}), "phase")
        self._copy("step_loops_total",
            "Parallel loops of steps, with --profile.",
            steps(lambda name, phase: {(name,): phase.loops}), "phase")
        # fmt: on

    def _copy_prefix_cache(self, prefix: ModelPrefixCache) -> None:
        for reason in prefix.stats().misses:
            self.misses.labels(reason=reason)
        # fmt: off
        self._copy("prefix_cache_bytes",
            "Bytes that the prefix cache refers to.",
            lambda: {
                tier: number
                for tier, number in _by_tier(prefix.stats().bytes).items()
                if self.tells_shared or tier not in _SHARED_TIERS
            }, "tier")
        self._copy("prefix_cache_budget_bytes",
            "Bytes that the prefix cache may refer to.",
            lambda: {("ram",): prefix.cache.ram}, "tier")
        self._copy("prefix_cache_tokens_total",
            "Tokens that came from the prefix cache.",
            lambda: _by_tier(prefix.stats().cached), "tier")
        self._copy("prefix_cache_evictions_total",
            "Entries of the prefix cache that went.",
            lambda: _by_tier(prefix.stats().evictions), "tier")
        # fmt: on


class _Copy:
    """A metric whose numbers are counted elsewhere."""

    def __init__(self, metric: Counter | Gauge, read: _Read) -> None:
        self._metric = metric
        self._read = read
        self._seen: dict[tuple[str, ...], float] = {}

    def refresh(self) -> None:
        for labels, number in self._read().items():
            one = self._metric.labels(*labels) if labels else self._metric
            if isinstance(one, Gauge):
                one.set(number)
                continue
            seen = self._seen.get(labels, 0)
            # A number that is less than before has begun anew.
            one.inc(number - seen if number >= seen else number)
            self._seen[labels] = number


def _by_tier(numbers: Mapping[str, int]) -> _Numbers:
    return {(tier,): number for tier, number in numbers.items()}


def _threads(placement: ThreadPlacement) -> _Numbers:
    if not placement.pinned:
        return {("false", "any"): placement.threads}
    found: dict[tuple[str, ...], float] = {}
    for node in placement.cpu_nodes:
        key = ("true", str(node))
        found[key] = found.get(key, 0) + 1
    return found
