"""Metrics under vLLM's names, where the meaning is the same: its dashboards work here, too.

Names, labels and meanings follow the page "Production Metrics" of vLLM's documentation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

# Upper bounds of buckets, in seconds and in tokens.
REQUEST_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
FIRST_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 5, 10, 30, 100)
INTERVAL_SECONDS = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
# finish_reason of `generate` -> vLLM's.
FINISHED = {"stop": "stop", "length": "length", "interrupted": "abort"}


class Timing(NamedTuple):
    """When one answer was computed. Seconds."""

    queued: float  # from its request's arrival to its begin
    since_arrival: float  # from its request's arrival to its end
    tokens: Sequence[float]  # when each token came, on a clock of their own


class VllmMetrics:
    """The metrics of one model, in a registry."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        waiting: Callable[[], int],
        running: Callable[[], int],
    ):
        self.registry, self.labels = registry, {"model_name": model_name, "engine": "0"}
        self.gauge("num_requests_waiting", "Requests of which no answer has begun.", waiting)
        self.gauge("num_requests_running", "Answers being decoded.", running)
        self.cache_usage: Callable[[], float] = lambda: 0.0
        usage = "Tokens of running answers, as a part of those that the KV cache holds."
        self.gauge("kv_cache_usage_perc", usage, lambda: self.cache_usage())
        counters = {
            "prompt_tokens": "Prompt tokens.",
            "generation_tokens": "Generated tokens.",
            "prefix_cache_queries": "Prompt tokens that were looked up in the KV cache.",
            "prefix_cache_hits": "Prompt tokens that were found in the KV cache.",
            "spec_decode_num_draft_tokens": "Tokens drafted.",
            "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
        }
        self.counters = {name: self.counter(name, text) for name, text in counters.items()}
        labels = [*self.labels, "finished_reason"]
        text = "Answers by their end."
        self.finished = Counter("vllm:request_success", text, labels, registry=registry)
        self.first_token = self.histogram(
            "time_to_first_token_seconds",
            "Seconds from arrival to the first token.",
            FIRST_TOKEN_SECONDS,
        )
        seconds = {
            "e2e_request_latency_seconds": "Seconds from arrival to the end.",
            "request_queue_time_seconds": "Seconds from arrival to the begin.",
            "request_prefill_time_seconds": "Seconds from the begin to the first token.",
            "request_decode_time_seconds": "Seconds from the first token to the last one.",
            "request_inference_time_seconds": "Seconds from the begin to the last token.",
        }
        self.seconds = {n: self.histogram(n, text, REQUEST_SECONDS) for n, text in seconds.items()}
        self.prompts = self.histogram("request_prompt_tokens", "Prompt tokens.", TOKENS)
        self.answers = self.histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self.intervals = Intervals(self.labels)
        registry.register(self.intervals)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        gauge = Gauge(f"vllm:{name}", text, list(self.labels), registry=self.registry)
        gauge.labels(**self.labels).set_function(value)

    def counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"vllm:{name}", text, list(self.labels), registry=self.registry)
        return counter.labels(**self.labels)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        found = Histogram(
            f"vllm:{name}", text, list(self.labels), registry=self.registry, buckets=buckets
        )
        return found.labels(**self.labels)

    def count_end(self, reason: str) -> None:
        """Count the end of an answer: stop, length, abort or error."""
        self.finished.labels(**self.labels, finished_reason=reason).inc()

    def count_answer(self, result: Mapping, timing: Timing) -> None:
        """Add one answer, whose result of `Decoder.finish` this is."""
        self.count_end(FINISHED.get(result.get("finish_reason") or "", "abort"))
        for name, key in (
            ("prompt_tokens", "prompt_tokens"),
            ("generation_tokens", "new_tokens"),
            ("prefix_cache_queries", "prompt_tokens"),
            ("prefix_cache_hits", "cached_tokens"),
            ("spec_decode_num_draft_tokens", "drafted"),
            ("spec_decode_num_accepted_tokens", "accepted"),
        ):
            self.counters[name].inc(result[key])
        self.prompts.observe(result["prompt_tokens"])
        self.answers.observe(result["new_tokens"])
        seconds = {
            "e2e_request_latency_seconds": timing.since_arrival,
            "request_queue_time_seconds": timing.queued,
        }
        if (prefill := result["ttft_s"]) is not None:
            self.first_token.observe(timing.queued + prefill)
            decode = timing.tokens[-1] - timing.tokens[0] if timing.tokens else 0.0
            seconds["request_prefill_time_seconds"] = prefill
            seconds["request_decode_time_seconds"] = decode
            seconds["request_inference_time_seconds"] = prefill + decode
        for name, value in seconds.items():
            self.seconds[name].observe(value)
        self.intervals.add(timing.tokens)


class Intervals(Collector):
    """The histogram of seconds between two tokens of an answer.

    prometheus_client's own takes one value a call: 1 us each, between two steps of other answers.
    """

    def __init__(self, labels: dict[str, str]):
        self.labels, self.edges = labels, np.array(INTERVAL_SECONDS)
        self.counts, self.sum = np.zeros(len(self.edges) + 1, dtype=np.int64), 0.0

    def add(self, times: Sequence[float]) -> None:
        """Add the intervals between the tokens of one answer."""
        gaps = np.diff(np.array(times, dtype=np.float64))
        bins = np.searchsorted(self.edges, gaps)
        self.counts += np.bincount(bins, minlength=len(self.counts))
        self.sum += float(gaps.sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*map(str, INTERVAL_SECONDS), "+Inf"]
        buckets = list(zip(bounds, np.cumsum(self.counts).tolist(), strict=True))
        text = "Seconds between two tokens of an answer."
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", text, labels=list(self.labels)
        )
        family.add_metric(list(self.labels.values()), buckets, self.sum)
        yield family
