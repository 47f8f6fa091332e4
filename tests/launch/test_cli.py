"""The command line: what it prints, what it refuses, and how."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from fastdeploy_cache.books.tokens import IS_NATIVE
from fastdeploy_cache.ipc.peer_channel import load_keys
from fastdeploy_cache.transfer_manager.peer.signature import load_secret
from tests.rigs.command_line import CLI
from tests.rigs.reference_model import needs_model

pytestmark = pytest.mark.processes


def run(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


def test_the_version_says_whether_packing_is_native() -> None:
    """`--version` names the package's version, and which way of packing is in use."""
    result = run("--version")
    assert result.returncode == 0
    wanted = [f"fastdeploy-cache {version('fastdeploy-cache')}", f"native packing: {'yes' if IS_NATIVE else 'no'}"]
    assert result.stdout.splitlines() == wanted


def test_config_check_prints_sizes(tmp_path: Path) -> None:
    """A good file: status 0 and the sizes that follow from it."""
    path = tmp_path / "cache.toml"
    path.write_text(
        "num_gpu_blocks = 4\nnum_cpu_blocks = 8\nblock_size = 16\n[layout]\nnum_layers = 2\n"
        "num_kv_heads = 2\nhead_dim = 8\n"
    )
    result = run("config", "check", str(path))
    assert result.returncode == 0
    assert "2048 per block and rank, 24576 in all" in result.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_gpu_block = 4", "did you mean 'num_gpu_blocks'?"),
        ("num_gpu_blocks = 0\ntransfer_client = 'inline'", "num_gpu_blocks is 0"),
        ("num_gpu_blocks = 'many'", "num_gpu_blocks"),
        ("num_gpu_blocks = 4", "layout is missing"),
        (
            "num_gpu_blocks = 4\n[layout]\nnum_layers = 1\nnum_kv_heads = 3\nhead_dim = 8\n[transfer]\ntp_size = 2",
            "neither",
        ),
        ("num_gpu_blocks = 2000000000\n[layout]\nnum_layers = 9\nnum_kv_heads = 8\nhead_dim = 128", "are available"),
        ("= nonsense", "cannot read configuration"),
    ],
)
def test_config_check_refuses_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    """A bad file: status 1 and one line that names the value and the remedy."""
    path = tmp_path / "cache.toml"
    path.write_text(text)
    result = run("config", "check", str(path))
    assert result.returncode == 1
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_missing_file_is_one_line() -> None:
    """The file's name is in the message."""
    result = run("config", "check", "/no/such/file.toml")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "/no/such/file.toml" in result.stderr


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    """The demo's model has three heads."""
    result = run("demo", "--ranks", "2")
    assert result.returncode == 1
    assert result.stderr.strip().endswith("--ranks is 2; the model has 3 KV heads, so use 1 or 3")


def test_peer_keys_says_what_goes_where(tmp_path: Path) -> None:
    """A key pair that the cache accepts, and the file that other hosts need; a second pair is not made over it."""
    result = run("peer-keys", str(tmp_path / "keys"))
    assert result.returncode == 0
    assert load_keys(tmp_path / "keys").public
    assert f"copy {tmp_path / 'keys' / 'own.key'} " in result.stdout
    again = run("peer-keys", str(tmp_path / "keys"))
    assert (again.returncode, len(again.stderr.splitlines())) == (1, 1)
    assert "has keys already" in again.stderr


def test_peer_secret_makes_one_once(tmp_path: Path) -> None:
    """It says where it belongs; an old one is not replaced."""
    result = run("peer-secret", str(tmp_path / "secret"))
    assert f"--set peer.secret_file={tmp_path / 'secret'}" in result.stdout
    secret = load_secret(tmp_path / "secret")
    again = run("peer-secret", str(tmp_path / "secret"))
    assert (again.returncode, len(again.stderr.splitlines())) == (1, 1)
    assert load_secret(tmp_path / "secret") == secret
    assert secret.decode() not in result.stdout


@needs_model
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_instance_of_a_group_serves_without_its_secret(role: str) -> None:
    """What would let anybody fill its cache is refused at the start, with the way to mend it."""
    result = run("serve", "--role", role, "--port", "0", "--metrics-port", "0")
    assert result.returncode == 1
    assert "fastdeploy-cache peer-secret FILE" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--role", "both"], "use mixed, prefill or decode"),
        (["serve", "--on-receive-failure", "wait"], "use recompute or fail"),
        (["route", "--decode", "localhost"], "use http://HOST:PORT"),
    ],
)
def test_what_roles_and_routes_cannot_be(arguments: list[str], words: str) -> None:
    """Wrong usage names what would be right."""
    result = run(*arguments)
    assert result.returncode in (1, 2)
    assert words in " ".join(result.stderr.replace("│", " ").split())


@needs_model
def test_the_demo_holds_what_it_promises(tmp_path: Path) -> None:
    """Short answers: all kinds of requests occur, a killed rank returns, every answer equals the one without cache."""
    path = tmp_path / "facts.json"
    result = run("demo", "--new-tokens", "4", "--json", str(path), timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    facts = json.loads(path.read_text())
    assert all(facts["checks"].values())
    assert len(facts["checks"]) == 5
    assert facts["different_answers"] == []
    assert facts["num_answers"] == sum(kind["requests"] for kind in facts["kinds"].values()) == 20
    assert facts["rank_restarts"] == [0, 0, 1]
    assert [turn["after_restart"] for turn in facts["conversation"]] == [False, False, False, True]
    first, *others = facts["conversation"]
    assert not any(first["tokens"].values()) and others[-1]["tokens"]["disk"]
    assert others[-1]["answer"] == others[-2]["answer"]
    assert others[-1]["answer"] in " ".join(result.stdout.split())
    assert "What next?" in result.stdout


@needs_model
def test_the_demo_of_a_router_holds_what_it_promises(tmp_path: Path) -> None:
    """Over two real instances more is found where prompts go by prefix, and answers are the same; it is said why."""
    path = tmp_path / "facts.json"
    result = run("demo", "--router", "--new-tokens", "4", "--json", str(path), timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    facts = json.loads(path.read_text())
    assert len(facts["checks"]) == 3 and all(facts["checks"].values())
    assert [each["requests"] for each in facts["routers"].values()] == [45, 45]
    assert set(facts["routers"]["by turns"]["reasons"]) == {"turn"}
    assert "cached_tokens=" in result.stdout


@pytest.mark.parametrize(("found", "words"), [("", "aiohttp is not installed"), ("3.14.3", "aiohttp is 3.14.3")])
@pytest.mark.parametrize("command", [["serve"], ["route", "--decode", "http://127.0.0.1:1"]])
def test_serving_without_its_library_is_one_line(command: list[str], found: str, words: str) -> None:
    """Missing, or too old: status 1 and the extra to install; nothing before that has needed it."""
    code = """
import sys
from importlib import metadata
found, *sys.argv[1:] = sys.argv[1:]
def version(name):
    assert name == "aiohttp" and name not in sys.modules
    if found:
        return found
    raise metadata.PackageNotFoundError(name)
metadata.version = version
from fastdeploy_cache.launch.cli import main
main()
"""
    asked = [sys.executable, "-c", code, found, *command]
    result = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert line == f"fastdeploy-cache: {words}; needed is 3.14.4 or newer: pip install 'fastdeploy-cache[serve]'"
