"""Metrics by vLLM's names, and the Grafana board that shows them."""

import json
import re
from pathlib import Path

import pytest
from local_server import LocalServer, httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from server.vllm_metrics import INTERVAL_SECONDS, Timing, VllmMetrics

pytestmark = pytest.mark.usefixtures("few_threads")
BOARD = Path(__file__).parents[1] / "docs" / "grafana.json"
RESULT = {"prompt_tokens": 7, "cached_tokens": 4, "new_tokens": 3, "drafted": 2, "accepted": 1}
RESULT |= {"ttft_s": 0.25, "finish_reason": "stop"}


def samples(text: str) -> dict[tuple, float]:
    """Return the values of metrics by name and the labels `le` and `finished_reason`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            extra = [sample.labels[k] for k in ("le", "finished_reason") if k in sample.labels]
            if sample.name.startswith("vllm:"):
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
                found[sample.name.removeprefix("vllm:"), *extra] = sample.value
    return found


def test_an_answer_is_counted_where_its_time_went():
    registry = CollectorRegistry()
    metrics = VllmMetrics(registry, "tiny", lambda: 5, lambda: 2)
    metrics.cache_usage = lambda: 0.5
    metrics.count_answer(RESULT, Timing(1.0, 2.0, [10.25, 10.251, 10.5]))
    metrics.count_answer(RESULT | {"new_tokens": 0, "ttft_s": None}, Timing(3.0, 3.0, []))
    metrics.count_answer(RESULT | {"finish_reason": "interrupted"}, Timing(0.0, 1.0, [4.0]))
    metrics.count_end("error")
    found = samples(generate_latest(registry).decode())
    expected = {
        ("num_requests_waiting",): 5,
        ("num_requests_running",): 2,
        ("kv_cache_usage_perc",): 0.5,
        ("prompt_tokens_total",): 21,
        ("generation_tokens_total",): 6,
        ("prefix_cache_queries_total",): 21,
        ("prefix_cache_hits_total",): 12,
        ("spec_decode_num_draft_tokens_total",): 6,
        ("spec_decode_num_accepted_tokens_total",): 3,
        ("request_success_total", "stop"): 2,
        ("request_success_total", "abort"): 1,
        ("request_success_total", "error"): 1,
        ("time_to_first_token_seconds_sum",): 1.25 + 0.25,
        ("time_to_first_token_seconds_count",): 2,
        ("time_to_first_token_seconds_bucket", "1.0"): 1,
        ("e2e_request_latency_seconds_sum",): 6.0,
        ("request_queue_time_seconds_sum",): 4.0,
        ("request_prefill_time_seconds_sum",): 0.5,
        ("request_decode_time_seconds_sum",): 0.25,
        ("request_inference_time_seconds_sum",): 0.75,
        ("inter_token_latency_seconds_count",): 2,
        ("inter_token_latency_seconds_sum",): 0.25,
        ("inter_token_latency_seconds_bucket", "0.0015"): 1,
        ("inter_token_latency_seconds_bucket", "0.2"): 1,
        ("inter_token_latency_seconds_bucket", "0.5"): 2,
        ("inter_token_latency_seconds_bucket", "+Inf"): 2,
        ("request_generation_tokens_count",): 3,
        ("request_prompt_tokens_bucket", "10.0"): 3,
    }
    for key, value in expected.items():
        assert found[key] == pytest.approx(value), key
    assert list(INTERVAL_SECONDS) == sorted(INTERVAL_SECONDS)


@pytest.fixture(scope="module")
def exported(directory, few_threads) -> str:
    """The metrics of a server after two answers."""
    server = LocalServer(directory, 128)
    try:
        for _ in range(2):
            server.complete("def f(x):\n", max_tokens=9, temperature=0)
        return httpx.get(f"{server.url}/metrics").text
    finally:
        server.close()


def test_a_server_exports_its_answers(exported):
    found = samples(exported)
    assert found["request_success_total", "length"] == 2
    assert found["generation_tokens_total",] == 18
    assert found["inter_token_latency_seconds_count",] == 16
    assert found["prefix_cache_hits_total",] > 0
    total = found["e2e_request_latency_seconds_sum",]
    parts = ("queue_time", "prefill_time", "decode_time")
    assert 0 < sum(found[f"request_{part}_seconds_sum",] for part in parts) <= total
    assert found["time_to_first_token_seconds_sum",] < total
    assert 0 <= found["kv_cache_usage_perc",] <= 1 and found["num_requests_waiting",] == 0


# Of vLLM's dashboard: docs of "Production Metrics".
NAMES = (
    *("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_vllm_is_exported(exported, name):
    assert re.search(rf"^vllm:{name}(_bucket)?\{{", exported, flags=re.M)


def test_the_boards_metrics_exist(exported):
    board = json.loads(BOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for query in queries for name in re.findall(r"vllm:\w+", query)}
    assert len(board["panels"]) == 10 and len(names) > 15
    for name in names:
        assert re.search(rf"^{name}\{{", exported, flags=re.M), name
    assert all("$model" in query for query in queries if "vllm:" in query)
