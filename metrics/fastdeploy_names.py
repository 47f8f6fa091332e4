"""The cache's numbers under the names of FastDeploy's dashboards: `fastdeploy:*`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fastdeploy_cache.metrics.cache_metrics import CacheMetrics

_PREFIX = "fastdeploy:"
_RATES = {
    "hit_req_rate": ("request", "Share of requests that hit, recently"),
    "hit_token_rate": ("token", "Share of prompt tokens that hit, recently"),
    "gpu_hit_token_rate": ("gpu", "Share of prompt tokens found on the GPU, recently"),
    "cpu_hit_token_rate": ("cpu", "Share of prompt tokens found in the CPU tier, recently"),
    "ssd_hit_token_rate": ("storage", "Share of prompt tokens found in storage, recently"),
}
_BLOCKS = {
    "available_gpu_block_num": "GPU blocks that are free or can be evicted",
    "free_gpu_block_num": "GPU blocks that are free",
    "max_gpu_block_num": "GPU blocks in all",
    "max_cpu_block_num": "CPU blocks in all",
    "available_gpu_resource": "Share of GPU blocks that are free",
    "gpu_cache_usage_perc": "Share of GPU blocks that are in use by running requests",
}


class FastDeployNames:
    """A collector beside `CacheMetrics`. Rates are of its sliding window, and never jump. Any thread."""

    def __init__(
        self,
        metrics: CacheMetrics,
        blocks: Callable[[], Mapping[str, float]],
        config: Callable[[], Mapping[str, object]],
        *,
        with_dp: bool = False,
    ) -> None:
        """`blocks`: the values of the gauges of blocks, by name; `config`: what is shown of the configuration;
        `with_dp`: all with the label `dp`."""
        self._metrics, self._blocks, self._config = metrics, blocks, config
        self._labels = {"dp": str(metrics.data_parallel_id)} if with_dp else {}

    def collect(self) -> Iterator[Metric]:
        """The protocol of a `prometheus_client` collector."""
        blocks, rates = self._blocks(), self._metrics.hit_rates()
        for name, text in _BLOCKS.items():
            yield self._with_value(GaugeMetricFamily(_PREFIX + name, text, labels=list(self._labels)), blocks[name])
        for name, (rate, text) in _RATES.items():
            yield self._with_value(GaugeMetricFamily(_PREFIX + name, text, labels=list(self._labels)), rates[rate])
        num_tokens, (num_gpu, num_cpu, num_storage) = self._metrics.token_counts()
        for name, text, count in (
            ("prefix_cache_token_num", "Prompt tokens that hit", num_gpu + num_cpu + num_storage),
            ("prefix_gpu_cache_token_num", "Prompt tokens found on the GPU", num_gpu),
            ("prefix_cpu_cache_token_num", "Prompt tokens found in the CPU tier", num_cpu),
            ("prefix_ssd_cache_token_num", "Prompt tokens found in storage", num_storage),
            ("prompt_token_num", "Prompt tokens of admitted requests", num_tokens),
            ("send_cache_failed_num", "Transfers to another instance that failed", 0),
        ):
            yield self._with_value(CounterMetricFamily(_PREFIX + name, text, labels=list(self._labels)), count)
        labels = self._labels | {name: str(value) for name, value in self._config().items()}
        info = GaugeMetricFamily(_PREFIX + "cache_config_info", "The cache's configuration", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info

    def _with_value(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric(list(self._labels.values()), value)
        return family
