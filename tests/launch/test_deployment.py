"""Files for the programs around this one: what there is, what systemd says of it, and whether they fit together."""

from __future__ import annotations

import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.background.deployment import describe, filled_in, write_all
from fastdeploy_cache.launch.background.group_plan import discovery_file
from fastdeploy_cache.launch.background.run_folder import RunFolder

UNITS = ("fastdeploy-cache.service", "fastdeploy-cache-group.service")


def service_of(name: str) -> dict[str, str]:
    """What a unit says of its service, with the paths that systemd puts in; then the options of its command."""
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(filled_in(name, Path("/somewhere")))
    return {key: value.replace("%t", "/run") for key, value in unit["Service"].items()}


def option_of(service: dict[str, str], name: str) -> str:
    words = service["ExecStart"].split()
    return words[words.index(name) + 1]


def test_files_for_other_programs(tmp_path: Path) -> None:
    """Each is listed with what it is for, has no placeholder left, and names what is there; others are refused."""
    names = [line.partition(":")[0] for line in describe().splitlines()[:-1]]
    assert names == [
        *("alerts.yml", "compose.yaml", "fastdeploy-cache-group.service", "fastdeploy-cache.service"),
        *("grafana/dashboards/cache.json", "grafana/dashboards/machinery.json"),
        "grafana/provisioning/dashboards/fastdeploy_cache.yaml",
        *("grafana/provisioning/datasources/prometheus.yaml", "prometheus.yml"),
    ]
    for name in names:
        text = filled_in(name, tmp_path)
        assert text.startswith("{" if name.endswith(".json") else "# ")
        assert "@" not in text, name
    assert f"{tmp_path}/prefill_decode/prometheus.json" in filled_in("prometheus.yml", tmp_path)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"  # a wheel that was built here is for no other
    assert f"ARG PYTHON_VERSION={version}\n        FROM python:$${{PYTHON_VERSION}}-slim\n" in filled_in(
        "compose.yaml", tmp_path
    )
    assert r"/a\"b\\c/prefill_decode/" in filled_in("prometheus.yml", Path('/a"b\\c'))
    with pytest.raises(LaunchError, match=r"there is no file 'nginx' to print; there are alerts\.yml, compose\.yaml, "):
        filled_in("nginx", tmp_path)


def test_all_files_are_written_or_none(tmp_path: Path) -> None:
    """A folder gets every file, as it is printed; where one is there already, or the folder is a file, it is said and
    nothing is left."""
    written = write_all(tmp_path / "new", tmp_path)
    names = [line.partition(": ")[0] for line in describe().splitlines()[:-1]]
    assert [str(path.relative_to(tmp_path / "new")) for path in written] == names
    assert all(path.read_text() == filled_in(name, tmp_path) for path, name in zip(written, names, strict=True))
    with pytest.raises(LaunchError, match=r"there are \S+/new/alerts\.yml, .* already"):
        write_all(tmp_path / "new", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot write the files into \S+/file: File exists; name another folder"):
        write_all(tmp_path / "file", tmp_path)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_units_are_valid(tmp_path: Path) -> None:
    """systemd itself finds nothing wrong with them."""
    units = [tmp_path / name for name in UNITS]
    for unit in units:
        unit.write_text(filled_in(unit.name, tmp_path))
    command = ["systemd-analyze", "verify", *map(str, units)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_server_as_a_service_can_be_asked() -> None:
    """Its socket is in a folder that systemd makes for it, and that nobody else may enter."""
    service = service_of("fastdeploy-cache.service")
    assert Path(option_of(service, "--control-socket")).parent == Path("/run", service["RuntimeDirectory"])
    assert service["RuntimeDirectoryMode"] == "0700"


def test_prometheus_looks_where_the_services_are(tmp_path: Path) -> None:
    """At the port of the one server, and for a group in the folder that others may read, and in that of `up`."""
    alone, group = yaml.safe_load(filled_in("prometheus.yml", tmp_path))["scrape_configs"]
    port = option_of(service_of("fastdeploy-cache.service"), "--metrics-port")
    assert alone["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
    service = service_of("fastdeploy-cache-group.service")
    folder = Path(option_of(service, "--run-dir"))
    assert folder == Path("/run", service["RuntimeDirectory"]) and "RuntimeDirectoryMode" not in service
    assert f"%L/{service['LogsDirectory']} {RunFolder(folder).log_folder}" in service["ExecStartPre"]
    (found,) = group["file_sd_configs"]
    assert found["files"] == [str(discovery_file(RunFolder(each))) for each in (tmp_path, folder)]
