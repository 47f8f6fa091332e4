"""A store with checkpoints: the commands tell their pages from blocks, and mend what is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.transfer_manager.storage.file_disk import Disk
from fastdeploy_cache.transfer_manager.storage.file_journal import JOURNAL_NAME, read_journal
from fastdeploy_cache.transfer_manager.storage.keys import is_page
from tests.rigs.stored_float64 import prompts, serve_one, storing

pytestmark = pytest.mark.processes


def run(*arguments: str, status: int = 0) -> tuple[str, Any]:
    """What a command prints, and its facts."""
    told = CliRunner().invoke(app, ["storage", *arguments])
    facts = CliRunner().invoke(app, ["storage", *arguments, "--json", "-"])
    assert (told.exit_code, facts.exit_code) == (status, status), told.output
    return told.output, json.loads(facts.stdout)


def test_pages_are_shown_apart_and_mended(tmp_path: Path) -> None:
    """A bit of a page is turned: `verify` calls it a page and removes it, and the next life computes that prompt."""
    engine = storing(str(tmp_path), 1)
    engine.is_patient = True
    texts = prompts(3)
    with engine.cache:
        for prompt in texts:
            serve_one(engine, prompt, 3)
        assert engine.cache.storage.flush(20.0)
    where = ("--folder", str(tmp_path))
    table, facts = run("ls", *where)
    (row,) = facts["weights"]
    assert 0 < row["pages"] < row["objects"] and "pages" in table
    lines, facts = run("stat", *where)
    assert f"{row['pages']:,} of the objects, which are of checkpoints" in lines
    folder = Path(facts["spaces"][0]["where"])
    replay = read_journal(Disk(), folder / JOURNAL_NAME)
    assert replay is not None and replay.num_pages == row["pages"]
    put = next(put for put in replay.puts() if is_page(put.block_hash))
    with (folder / "slab-00000").open("r+b") as slab:
        slab.seek(put.slot * replay.geometry.slot_bytes)
        (byte,) = slab.read(1)
        slab.seek(put.slot * replay.geometry.slot_bytes)
        slab.write(bytes([byte ^ 1]))
    lines, facts = run("verify", *where, status=1)
    assert f"(page {put.block_hash.hex()})" in lines.replace("\n", "")
    assert facts["spaces"][0]["damaged_objects"][0]["page"]
    run("verify", *where, "--remove")
    run("verify", *where)
    engine = storing(str(tmp_path), 2)
    engine.is_patient = True
    with engine.cache:
        for prompt in texts:
            serve_one(engine, prompt, 3)
        assert engine.num_storage_tokens > 0
    lines, facts = run("clear", *where, "--weights-id", "float64", "--dry-run")
    assert facts["objects"] > row["pages"]
