"""What the site of the documentation is made of: references that leave nothing out, and a place for each page.

Whether it can be built, and each link leads somewhere, is held by ./launch/docs.sh, which CI runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fastdeploy_cache
from fastdeploy_cache.config.cache import CONFIG_KINDS
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs/site"


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that reads the references from the classes; it is not part of any package."""
    spec = importlib.util.spec_from_file_location("site_references", SITE / "references.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_every_setting_is_in_the_reference(references: ModuleType) -> None:
    """Of each table, with a sentence that its class says of it, and with a directive on the page."""
    for table, of in CONFIG_KINDS.items():
        settings = list(references.settings_of(table))
        keys = [f.name for f in dataclasses.fields(of) if table or f.name not in CONFIG_KINDS]
        assert [setting.name.rpartition(".")[2] for setting in settings] == keys
        assert all(len(setting.text.split()) >= 2 and setting.type for setting in settings)
    shown = re.findall(r"^\.\. settings-reference::(.*)$", (SITE / "settings.rst").read_text(), re.MULTILINE)
    assert [each.strip() for each in shown] == list(CONFIG_KINDS)


@pytest.mark.parametrize(
    ("name", "type_words", "default"),
    [
        ("block_size", "whole number", "64"),
        ("num_gpu_blocks", "whole number", "not set"),
        ("cpu_to_gpu_ratio", "number", "not set"),
        ("load_policy", '"auto" or "always" or "never"', '"auto"'),
        ("cache_outputs", "true or false", "true"),
        ("layout.num_layers", "whole number", None),
        ("layout.dtype", "text", '"float16"'),
        ("transfer.device_ids", "list of whole numbers", "[]"),
        ("storage.options", "texts by name", "{}"),
    ],
)
def test_a_setting_is_said_in_words(references: ModuleType, name: str, type_words: str, default: str | None) -> None:
    """Its type and its default, as somebody reads them who writes a TOML file."""
    [setting] = [each for each in references.settings_of(name.rpartition(".")[0]) if each.name == name]
    assert (setting.type, setting.default) == (type_words, default)
    assert setting.variable == "FASTDEPLOY_CACHE_" + name.upper().replace(".", "__")


def test_every_metric_is_in_the_reference(references: ModuleType) -> None:
    """With its whole name, its labels, and the values of those that are always the same."""
    families = {family.name: family for family in references.metric_families()}
    assert len(families) == len(list(CacheMetrics().collect()))
    assert all(family.text and "dp" in family.labels for family in families.values())
    assert families["fastdeploy_cache_tokens_hit_total"].labels["tier"] == ("gpu", "cpu", "storage")
    assert families["fastdeploy_cache_rank_up"].labels["rank"] == ()


def test_values_of_labels_are_explained(references: ModuleType) -> None:
    """Each that is always the same is named in a page: what a dashboard shows can be looked up."""
    pages = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("metrics", "explain", "life_cycle"))
    explained = set(re.findall(r"`(\w+)`", pages))
    values = {value for family in references.metric_families() for each in family.labels.values() for value in each}
    assert {"gpu", "evicted", "swap_in"} <= values
    missing = values - explained - {""}
    assert not missing


def test_every_public_name_is_in_the_reference() -> None:
    """Each name that an engine imports, and each part of the manager."""
    page = (SITE / "api.rst").read_text()
    documented = re.findall(r"^\.\. auto(?:class|function):: (\S+)$", page, re.MULTILINE)
    missing = {f"fastdeploy_cache.{name}" for name in fastdeploy_cache.__all__} - set(documented)
    assert not missing
    parts = re.findall(r"^    +(\w+): ", str(fastdeploy_cache.PrefixCacheManager.__doc__), re.MULTILINE)
    assert len(parts) >= 6
    assert not [part for part in parts if f"``cache.{part}``" not in page]


def test_every_page_has_a_place() -> None:
    """Each is in the navigation once, and nothing else is."""
    entries = re.findall(r"^(?!```|:|$)(\S+)$", (SITE / "templates/navigation.txt").read_text(), re.MULTILINE)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *SITE.glob("*.rst")]
    names = {str(page.relative_to(ROOT).with_suffix("")) for page in pages} - {"README"}  # which is the home page
    assert sorted(entries) == sorted(names)


def test_every_example_is_shown() -> None:
    """With a target for the links that pages have to it."""
    page = (SITE / "examples.rst").read_text()
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert set(re.findall(r"^\.\. literalinclude:: \.\./\.\./examples/(\w+)\.py$", page, re.MULTILINE)) == names
    assert set(re.findall(r"^\.\. _example-(\w+):$", page, re.MULTILINE)) == names | {"programs"}
