"""Alert rules and dashboards, as they are shipped: played by promtool, and asked of a real Prometheus."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request, StorageConfig
from fastdeploy_cache.launch.background.deployment import describe, filled_in, write_all
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.transfer_manager.config import TransferConfig
from tests.rigs.hybrid_requests import computed, manager
from tests.rigs.prometheus_rig import RealPrometheus

PAGE = Path(__file__).parents[2] / "docs/alerts.md"
CASES = Path(__file__).with_name("alert_rules_test.yml")
RULES = [rule for group in yaml.safe_load(filled_in("alerts.yml", Path()))["groups"] for rule in group["rules"]]
DASHBOARDS = {
    name: json.loads(filled_in(name, Path()))
    for name in re.findall(r"^(grafana/\S+\.json): ", describe(), re.MULTILINE)
}
PANELS = [(name, panel) for name, board in DASHBOARDS.items() for panel in board["panels"] if panel["type"] != "row"]
_MOST_SCRAPES = 60  # of a second each
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


def series_names() -> set[str]:
    """All that a page can have, and what Prometheus makes itself."""
    names = {"up"}
    for family in CacheMetrics().collect():
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + end for end in ends}
    return names


def named_in(expression: str) -> set[str]:
    return set(re.findall(r"\bfastdeploy_cache_\w+", expression)) | set(re.findall(r"\bup\b", expression))


def expressions() -> list[str]:
    shown = [target["expr"] for _, panel in PANELS for target in panel["targets"]]
    return [*shown, *(rule["expr"] for rule in RULES)]


def test_every_expression_names_series_that_there_are() -> None:
    """No panel and no alert asks for a metric that no cache has."""
    assert len(PANELS) >= 30 and len(RULES) >= 15
    unknown = {name for text in expressions() for name in named_in(text)} - series_names()
    assert not unknown
    assert all(named_in(text) for text in expressions())


@pytest.mark.processes
@needs_promtool
def test_a_page_of_a_cache_is_as_prometheus_wants_it() -> None:
    """promtool finds nothing to complain about: names, units, suffixes and help texts."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    with PrefixCacheManager(CacheConfig(num_gpu_blocks=8, num_cpu_blocks=8, transfer_client="inline")) as cache:
        registry.register(cache.metrics)
        page = generate_latest(registry)
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.mark.processes
@needs_promtool
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """promtool finds the rules valid, and plays every case: each alert is seen to fire, and to be silent."""
    (tmp_path / "alerts.yml").write_text(filled_in("alerts.yml", tmp_path))
    shutil.copy(CASES, tmp_path)
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", CASES.name]):
        done = subprocess.run(
            ["promtool", *command], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_where_it_fires_and_one_where_it_does_not() -> None:
    """Every alert is played by a case of its name, which asks for it by name and expects both."""
    cases = {case["name"]: case["promql_expr_test"] for case in yaml.safe_load(CASES.read_text())["tests"]}
    assert cases.keys() == {rule["alert"] for rule in RULES}
    for name, played in cases.items():
        assert {bool(each["exp_samples"]) for each in played} == {True, False}, name
        assert all(name in each["expr"] or name in str(each["exp_samples"]) for each in played), name


def test_each_alert_says_what_to_do() -> None:
    """It has a severity, a summary, a description, and a section of docs/alerts.md with its name, and none is left."""
    sections = set(re.findall(r"^### (\w+)$", PAGE.read_text(), re.MULTILINE))
    assert sections == {rule["alert"] for rule in RULES}
    for rule in RULES:
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        anchor = f"docs/alerts.md#{rule['alert'].lower()}: "
        assert rule["annotations"]["runbook"].startswith(anchor), rule["alert"]


def test_dashboards_are_ones_that_grafana_takes(tmp_path: Path) -> None:
    """Panels have numbers of their own, lie beside each other and not above, say what they show, and ask the data
    source that is provisioned, by its uid; the compose file mounts what is there."""
    written = {str(path.relative_to(tmp_path)): path.read_text() for path in write_all(tmp_path, tmp_path)}
    (source,) = yaml.safe_load(written["grafana/provisioning/datasources/prometheus.yaml"])["datasources"]
    assert len({board["uid"] for board in DASHBOARDS.values()}) == len(DASHBOARDS) == 2
    for board in DASHBOARDS.values():
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        cells = [cell for panel in board["panels"] for cell in cells_of(panel["gridPos"])]
        assert len(cells) == len(set(cells)) and all(0 <= x < 24 for x, _ in cells)
    for name, panel in PANELS:
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(each == {"type": "prometheus", "uid": source["uid"]} for each in sources), name
        assert panel["title"] and panel["description"].endswith(".")
    compose = yaml.safe_load(written["compose.yaml"])
    mounted = [volume.split(":")[0] for service in compose["services"].values() for volume in service["volumes"]]
    assert all((tmp_path / each).exists() for each in mounted if each.startswith("./"))
    assert sum(each.startswith("./") for each in mounted) == 3
    folder = yaml.safe_load(written["grafana/provisioning/dashboards/fastdeploy_cache.yaml"])
    assert f"./grafana/dashboards:{folder['providers'][0]['options']['path']}:ro" in str(compose)


def cells_of(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return itertools.product(columns, lines)


class Traffic:
    """Conversations that do not fit: what is evicted comes back from the CPU tier, or from storage."""

    def __init__(self, folder: Path) -> None:
        self.cache = PrefixCacheManager(
            CacheConfig(
                block_size=4,
                num_gpu_blocks=24,
                num_cpu_blocks=40,
                min_prefetch_tokens=4,
                prefill_tokens_per_second=1000.0,
                load_policy="always",
                cpu_write_policy="write_through",
                layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32"),
                storage=StorageConfig(folder=str(folder), weights_id="w", admission="all", capacity_bytes=2**24),
            )
        )
        self.hybrid = manager(transfer=TransferConfig(data_parallel_id=1))
        self._choose, self._num_requests = random.Random(1), 0

    def serve_some(self) -> None:
        """Ten requests, each waiting for all that comes; and one of a hybrid model."""
        self.hybrid.release(computed(self.hybrid, f"hybrid {self._num_requests}", [self._num_requests] * 18))
        for _ in range(10):
            self._num_requests += 1
            start = 1000 * self._choose.randrange(12)
            request = Request(request_id=str(self._num_requests), prompt_token_ids=range(start, start + 41))
            self.cache.prefetch(request)
            match = self.cache.match(request).wait(5.0)
            self.cache.allocate(request, 11 - len(match.block_ids), wait_seconds=5.0)
            self.cache.commit(request, request.num_tokens)
            self.cache.release(request)


def with_values(expression: str) -> str:
    """As Grafana fills it in for all jobs, over the last minute."""
    return expression.replace("$__rate_interval", "1m").replace("$job", ".*").replace("$dp", ".*")


def selectors(expression: str) -> list[str]:
    """The series that an expression asks for, each with its labels."""
    found: list[str] = re.findall(r"(?:\bfastdeploy_cache_\w+|\bup\b)(?:\{[^}]*\})?", expression)
    return found


@pytest.mark.processes
@needs_prometheus
def test_every_panel_shows_something_of_a_live_cache(tmp_path: Path) -> None:
    """A real Prometheus scrapes a cache with ranks, storage and traffic. Each panel's expression gives numbers, each
    alert's finds the series that it goes by, all rules are loaded, and of a healthy cache none of the critical ones
    fires."""
    traffic = Traffic(tmp_path / "store")
    with traffic.cache, traffic.hybrid:
        ask_everything(tmp_path, traffic)
        traffic.cache.check_invariants()


def empty_panels(prometheus: RealPrometheus) -> list[str]:
    """Whose expression gives no number."""
    return [
        f"{name}: {panel['title']}: {each['expr']}"
        for name, panel in PANELS
        for each in panel["targets"]
        if not any(math.isfinite(value) for value in prometheus.query(with_values(each["expr"])))
    ]


def ask_everything(tmp_path: Path, traffic: Traffic) -> None:
    target = traffic.cache.serve_metrics(also=[traffic.hybrid.metrics]).removeprefix("http://").removesuffix("/metrics")
    (tmp_path / "alerts.yml").write_text(filled_in("alerts.yml", tmp_path))
    shipped = yaml.safe_load(filled_in("prometheus.yml", tmp_path))
    shipped["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    shipped["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    prometheus = RealPrometheus(tmp_path, yaml.safe_dump(shipped))
    prometheus.start()
    try:
        for num_scrapes in range(8, _MOST_SCRAPES):  # some figures come from another process, when it has had its turn
            prometheus.wait_for_scrapes(num_scrapes, traffic.serve_some)
            if not (empty := empty_panels(prometheus)):
                break
        assert not empty, "\n".join(empty)
        unseen = [text for rule in RULES for text in selectors(rule["expr"]) if not prometheus.query(text)]
        assert not unseen
        loaded: list[dict[str, Any]] = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in loaded} == {rule["alert"] for rule in RULES}
        assert all(rule["health"] in {"ok", "unknown"} for rule in loaded), loaded
        assert not prometheus.query('ALERTS{severity="critical"}')
        for rule in RULES:
            prometheus.query(rule["expr"])
    finally:
        prometheus.stop()
