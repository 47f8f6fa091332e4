"""What the demo prints beside its figures: commands that work where it was run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.demo.next_steps import next_steps

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("where", [".", "elsewhere"])
def test_what_comes_next_in_a_checkout_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Each file that is named exists, seen from where the demo was run."""
    (tmp_path / "elsewhere").mkdir()
    for name in ("launch", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path / where)
    files = [word for word in next_steps(tmp_path / "launch").split() if word.endswith((".sh", ".md"))]
    assert len(files) == 3 and all(Path(file).is_file() for file in files)


def test_what_comes_next_after_a_wheel_are_commands(tmp_path: Path) -> None:
    """A wheel has no scripts and no pages: no file is named, and each command is known."""
    text = next_steps(tmp_path)
    assert "/" not in text and ".md" not in text and ".sh" not in text
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    named = re.findall(r"^  fastdeploy-cache (\S+)", text, re.MULTILINE)
    assert named == ["start", "engines"] and set(named) <= set(known)
