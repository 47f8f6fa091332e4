"""`fastdeploy-cache doctor --metrics`: the doctor where only a page of metrics can be reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from fastdeploy_cache.errors import MetricsError
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.operating.doctor import findings_of_page
from tests.rigs.asker import Asker
from tests.rigs.sick_caches import SICK

SHORT = "cpu_tier_short"


def saved(asker: Asker, path: Path) -> str:
    registry = CollectorRegistry()
    registry.register(asker.cache.metrics)
    path.write_bytes(generate_latest(registry))
    return str(path)


def test_a_saved_page_is_examined(tmp_path: Path) -> None:
    """The planted fault comes first, as a line with status 4; `--json` gives it as a list."""
    page = saved(SICK[SHORT][0](), tmp_path / "page.txt")
    told = CliRunner().invoke(app, ["doctor", "--metrics", page])
    assert (told.exit_code, told.stdout.partition(":")[0]) == (4, SHORT)
    found = json.loads(CliRunner().invoke(app, ["doctor", "--metrics", page, "--json"]).stdout)
    assert (found[0]["name"], found[0]["dp"]) == (SHORT, "0")


@pytest.mark.processes
def test_an_address_is_asked() -> None:
    """The page that a cache serves, while it runs."""
    asker = SICK[SHORT][0]()
    with asker.cache as cache:
        assert findings_of_page(cache.serve_metrics())[0]["name"] == SHORT


def test_nothing_is_wrong_with_a_healthy_cache(tmp_path: Path) -> None:
    """Which is status 0, and a line that says so."""
    told = CliRunner().invoke(app, ["doctor", "--metrics", saved(Asker(num_gpu=200), tmp_path / "page.txt")])
    assert (told.exit_code, told.stdout) == (0, "nothing is wrong, as far as can be seen\n")


@pytest.mark.parametrize("source", ["/there/is/none", "http://127.0.0.1:1/metrics", "ftp://somewhere/metrics"])
def test_what_cannot_be_read_is_refused(source: str) -> None:
    """With the source, and a word on what to give."""
    with pytest.raises(MetricsError, match="give"):
        findings_of_page(source)
