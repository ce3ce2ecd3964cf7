"""What a server counts of its requests, for /metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemmakv.chat._gemma import Gemma
from gemmakv.generation._profile import PhaseProfile
from gemmakv.generation._threads import ThreadPlacement
from gemmakv.server.service.admission import Admission
from gemmakv.server.service.metrics import Counter, Gauge, Histogram, Metric


def _step_metrics(model: Gemma) -> list[Metric]:
    """Where the time of steps goes; without numbers if they are not timed."""

    def read(
        numbers: Callable[[str, PhaseProfile], dict[tuple[str, ...], float]],
    ) -> Callable[[], dict[tuple[str, ...], float]]:
        def now() -> dict[tuple[str, ...], float]:
            found: dict[tuple[str, ...], float] = {}
            if model.profiled:
                for name, phase in model.profile().phases():
                    found.update(numbers(name, phase))
            return found

        return now

    return [
        Gauge(
            "gemmakv_step_seconds_total",
            "Seconds of steps by what they do and by part, with --profile.",
            read(lambda name, phase: {
                (name, part): seconds
                for part, seconds in phase.parts.items()
                if seconds > 0
            }),
            ("phase", "part"),
            "counter",
        ),
        Gauge(
            "gemmakv_steps_total",
            "Steps by what they do, with --profile.",
            read(lambda name, phase: {(name,): phase.steps}),
            ("phase",),
            "counter",
        ),
        Gauge(
            "gemmakv_step_rows_total",
            "Positions that steps computed, with --profile.",
            read(lambda name, phase: {(name,): phase.rows}),
            ("phase",),
            "counter",
        ),
        Gauge(
            "gemmakv_step_loops_total",
            "Parallel loops of steps, with --profile.",
            read(lambda name, phase: {(name,): phase.loops}),
            ("phase",),
            "counter",
        ),
    ]  # fmt: skip


def _threads(placement: ThreadPlacement) -> dict[tuple[str, ...], float]:
    if not placement.pinned:
        return {("false", "any"): placement.threads}
    found: dict[tuple[str, ...], float] = {}
    for node in placement.cpu_nodes:
        key = ("true", str(node))
        found[key] = found.get(key, 0) + 1
    return found


class Counts:
    """What the server did so far."""

    def __init__(
        self,
        labels: Sequence[str],
        admission: Admission,
        model: Gemma,
    ) -> None:
        """`labels`: of keys."""
        self.requests = Counter(
            "gemmakv_requests_total", "Answers by route, status and key."
        )
        self.rejected = Counter(
            "gemmakv_requests_rejected_total", "Refused requests by reason."
        )
        self.cancelled = Counter(
            "gemmakv_requests_cancelled_total",
            "Requests whose client went away.",
        )
        self.prompt_tokens = Counter(
            "gemmakv_prompt_tokens_total", "Tokens of prompts by key."
        )
        self.cached_tokens = Counter(
            "gemmakv_cached_tokens_total",
            "Tokens of prompts that were not computed, by key.",
        )
        self.completion_tokens = Counter(
            "gemmakv_completion_tokens_total", "Sampled tokens by key."
        )
        self.embeddings = Counter(
            "gemmakv_embeddings_total",
            "Texts that vectors were made of, by key.",
        )
        self.drafted_tokens = Counter(
            "gemmakv_drafted_tokens_total",
            "Tokens that were guessed and checked.",
        )
        self.accepted_tokens = Counter(
            "gemmakv_accepted_tokens_total", "Guesses that were right."
        )
        self.misses = Counter(
            "gemmakv_cache_misses_total",
            "Requests for which the prefix cache had less than it could "
            "have, by reason.",
        )
        self.queue_s = Histogram(
            "gemmakv_queue_seconds", "From arrival to running."
        )
        self.first_token_s = Histogram(
            "gemmakv_time_to_first_token_seconds",
            "From arrival to the first token.",
        )
        self.inter_token_s = Histogram(
            "gemmakv_inter_token_seconds", "Between two tokens."
        )
        for counter in (
            self.cancelled, self.drafted_tokens, self.accepted_tokens,
        ):  # fmt: skip
            counter.start()
        for label in labels:
            for counter in (
                self.prompt_tokens, self.cached_tokens, self.completion_tokens,
                self.embeddings,
            ):  # fmt: skip
                counter.start(key=label)
        threads = _threads(model.thread_placement)
        self._metrics: list[Metric] = [
            *vars(self).values(),
            Gauge(
                "gemmakv_rows_running",
                "Continuations that run.",
                lambda: admission.running,
            ),
            Gauge(
                "gemmakv_requests_waiting",
                "Requests in the queue.",
                lambda: admission.waiting,
            ),
            Gauge(
                "gemmakv_preemptions_total",
                "Requests that gave way to others for want of memory.",
                lambda: model.preemptions,
                kind="counter",
            ),
            Gauge(
                "gemmakv_threads",
                "Threads that compute, by whether they are pinned and by their "
                "NUMA node, \"any\" where they are not.",
                lambda: threads,
                ("pinned", "node"),
            ),
            *_step_metrics(model),
        ]
        prefix = model.prefix_cache
        if prefix is not None:
            for reason in prefix.stats().misses:
                self.misses.start(reason=reason)
            self._metrics += [
                Gauge(
                    "gemmakv_prefix_cache_bytes",
                    "Bytes that the prefix cache refers to.",
                    lambda: prefix.stats().bytes,
                    "tier",
                ),
                Gauge(
                    "gemmakv_prefix_cache_budget_bytes",
                    "Bytes that the prefix cache may refer to.",
                    lambda: {"ram": prefix.cache.ram},
                    "tier",
                ),
                Gauge(
                    "gemmakv_prefix_cache_tokens_total",
                    "Tokens that came from the prefix cache.",
                    lambda: prefix.stats().cached,
                    "tier",
                    "counter",
                ),
                Gauge(
                    "gemmakv_prefix_cache_evictions_total",
                    "Entries of the prefix cache that went.",
                    lambda: prefix.stats().evictions,
                    "tier",
                    "counter",
                ),
            ]

    @property
    def metrics(self) -> Sequence[Metric]:
        return self._metrics
