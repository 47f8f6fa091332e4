"""A weights id is the files' names and bytes, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy_cache import weights_id_of


def _write(folder: Path, **files: bytes) -> list[Path]:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def test_the_same_bytes_have_the_same_id_wherever_they_lie(tmp_path: Path) -> None:
    """In another folder, in another order."""
    one = _write(tmp_path / "one", a=b"first", b=b"second")
    other = _write(tmp_path / "other", b=b"second", a=b"first")
    assert weights_id_of(one) == weights_id_of(other) == weights_id_of(str(path) for path in one)


@pytest.mark.parametrize(
    "files",
    [
        {"a": b"first", "b": b"secone"},
        {"a": b"second", "b": b"first"},
        {"a": b"first"},
        {"c": b"first", "b": b"second"},
    ],
)
def test_other_weights_have_another_id(tmp_path: Path, files: dict[str, bytes]) -> None:
    """A changed byte, bytes that changed places, a file less, another name."""
    one = _write(tmp_path / "one", a=b"first", b=b"second")
    assert weights_id_of(_write(tmp_path / "other", **files)) != weights_id_of(one)


def test_what_is_no_set_of_weight_files(tmp_path: Path) -> None:
    """Nothing, a name twice, a file that is not there."""
    path, twin = *_write(tmp_path / "one", a=b""), *_write(tmp_path / "two", a=b"")
    for bad in ([], [path, twin]):
        with pytest.raises(ValueError, match="each name once"):
            weights_id_of(bad)
    with pytest.raises(FileNotFoundError):
        weights_id_of([tmp_path / "none"])
