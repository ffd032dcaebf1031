"""What GET /metrics exports for Prometheus."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from server.vllm_metrics import Timing, VllmMetrics

# Keys: offload.experts.COUNTERS. Values: a metric's name and help text.
EXPERT_METRICS = {
    "hits": ("expert_hits", "Expert cache hits, one per expert, layer and forward pass."),
    "misses": ("expert_misses", "Expert cache misses that were copied."),
    "on_cpu": ("expert_on_cpu", "Expert cache misses that the CPU multiplied."),
    "bytes": ("expert_bytes", "Bytes of experts copied from host memory."),
}


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(
        self, queue_length: Callable[[], int], running: Callable[[], int], model_name: str = ""
    ):
        disable_created_metrics()  # they double the number of time series
        self.registry = CollectorRegistry()
        self.responses = self.counter(
            "responses", "HTTP responses to requests, by status.", ["status"]
        )
        self.answers = self.counter("answers", "Answers decoded, completely or until a disconnect.")
        self.failures = self.counter("failures", "Answers that ended in an internal error.")
        self.dropped = self.counter("dropped", "Requests whose client disconnected in the queue.")
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens.")
        self.cached_tokens = self.counter("cached_tokens", "Prompt tokens found in the KV cache.")
        self.new_tokens = self.counter("new_tokens", "Generated tokens.")
        self.drafted_tokens = self.counter("drafted_tokens", "Tokens drafted (speculation).")
        self.accepted_tokens = self.counter("accepted_tokens", "Drafted tokens accepted.")
        self.answer_seconds = self.counter("answer_seconds", "Seconds of prefill and decoding.")
        self.first_token_seconds = self.counter(
            "first_token_seconds", "Seconds of these until the first token."
        )
        waiting = Gauge(
            "moe_fast_waiting", "Requests of which no answer has begun.", registry=self.registry
        )
        waiting.set_function(queue_length)
        decoding = Gauge("moe_fast_running", "Answers being decoded.", registry=self.registry)
        decoding.set_function(running)
        self.experts = ExpertCollector()
        self.registry.register(self.experts)
        self.vllm = VllmMetrics(self.registry, model_name, queue_length, running)

    def counter(self, name: str, help: str, labels: list[str] | None = None) -> Counter:
        """Register a counter, exported as moe_fast_NAME_total."""
        return Counter(f"moe_fast_{name}", help, labels or [], registry=self.registry)

    def count_failure(self) -> None:
        """Add an answer that ended in an error."""
        self.failures.inc()
        self.vllm.count_end("error")

    def count_answer(self, result: Mapping, timing: Timing) -> None:
        """Add the result of one answer (`Decoder.finish`)."""
        self.vllm.count_answer(result, timing)
        self.answers.inc()
        self.prompt_tokens.inc(result["prompt_tokens"])
        self.cached_tokens.inc(result["cached_tokens"])
        self.new_tokens.inc(result["new_tokens"])
        self.drafted_tokens.inc(result["drafted"])
        self.accepted_tokens.inc(result["accepted"])
        self.answer_seconds.inc(result["seconds"])
        self.first_token_seconds.inc(result["ttft_s"] or 0.0)

    def export(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class ExpertCollector(Collector):
    """Exports `totals` of the expert cache; nothing while they are empty (no offloading)."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}

    def collect(self) -> Iterator[CounterMetricFamily]:
        for key, total in self.totals.items():
            name, help = EXPERT_METRICS[key]
            yield CounterMetricFamily(f"moe_fast_{name}", help, total)
