"""The references of settings and metrics, read from the classes that define them. No word of them is written here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.config.cache import CONFIG_KINDS
from fastdeploy_cache.config.tables import LISTS
from fastdeploy_cache.launch.config_show import meanings
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics

OPEN_LABELS = {  # their values depend on how an engine is set up
    "dp": "`transfer.data_parallel_id`",
    "rank": "the number of the rank, from 0 on",
    "peer": "the other instance, by its `peer.name`",
    "eviction_policy": "the setting of that name",
    "block_size": "the setting of that name",
    "factor": "the size of the tier, as a multiple of what it is",
}
UNKNOWN = "known once there is a series"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key of the configuration: `name` has its table in front, `default` is None where it has to be given."""

    name: str
    type: str
    default: str | None
    text: str

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "FASTDEPLOY_CACHE_" + self.name.replace(".", "__").upper()


@dataclass(frozen=True, kw_only=True)
class MetricFamily:
    """One family of series: its whole name, its type, what its help line says, and the values of each label."""

    name: str
    type: str
    text: str
    labels: dict[str, tuple[str, ...]]


def settings_of(table: str) -> Iterator[Setting]:
    """Each key of a table ("": those in front of all tables), in the order of its class."""
    of = CONFIG_KINDS[table]
    texts, hints = meanings(of), get_type_hints(of)
    for field in dataclasses.fields(of):
        if not table and field.name in CONFIG_KINDS:
            continue
        yield Setting(
            name=f"{table}.{field.name}" if table else field.name,
            type=type_words(hints[field.name]),
            default=default_of(field),
            text=texts[field.name],
        )


def default_of(field: dataclasses.Field[object]) -> str | None:
    """The default as TOML writes it, "not set" for None, and None where there is none."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return None
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value) if not isinstance(value, tuple | frozenset) else str(list(value))


def type_words(hint: object) -> str:
    """A type as a person says it, or the texts that are allowed. That None is allowed, too, says the default."""
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    if isinstance(hint, type) and hint in names:
        return names[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(f'"{each}"' for each in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_words(each) for each in arguments if each is not type(None))
    if origin is tuple and arguments[0] in LISTS.values():
        return "list of tables"
    if origin is tuple:
        return f"list of {type_words(arguments[0])}s"
    if origin is Mapping:
        return f"{type_words(arguments[1])}s by name"
    raise TypeError(f"{hint} has no words; give it some here")


def metric_families() -> Iterator[MetricFamily]:
    """Each family of the metrics page, in the order of their names."""
    config = CacheConfig(block_size=1, num_gpu_blocks=1, num_cpu_blocks=1, transfer_client="inline")
    with PrefixCacheManager(config) as cache:  # its tiers and states have series, which have the values of the labels
        of_a_cache = {family.name: family.samples for family in cache.metrics.collect()}
    for family in sorted(CacheMetrics().collect(), key=lambda each: each.name):
        samples = of_a_cache[family.name] or family.samples  # without rank processes there is no series of a rank
        labels: dict[str, tuple[str, ...]] = {}
        for label in getattr(family, "_labelnames"):  # noqa: B009  of a family without a series, too
            values = dict.fromkeys(sample.labels[label] for sample in samples)
            labels[label] = () if label in OPEN_LABELS else tuple(values)
        name = family.name + ("_total" if family.type == "counter" else "")
        yield MetricFamily(name=name, type=family.type, text=family.documentation, labels=labels)
