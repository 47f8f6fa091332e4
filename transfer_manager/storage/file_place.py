"""Whether a folder can be a file store's: tried by the engine itself, before anything is started for it."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
from pathlib import Path

from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.file_disk import FOR_THE_USER, Disk
from fastdeploy_cache.transfer_manager.storage.file_space import check_mine

logger = logging.getLogger(__name__)

_FOR_THE_USER = FOR_THE_USER | {errno.EACCES, errno.EINVAL, errno.ENOENT, errno.EROFS}


def check_place(storage: StorageConfig | None) -> None:
    """Make a file store's folder where it is missing, and a nameless file in it.

    What may pass is left to the storage process, which tries again and again: a disk that is full or broken, and one
    that does not answer within `start_timeout_seconds`.

    Raises:
        StorageRefusedError: the folder cannot be made or written to, is not this user's, or was made for something
            else: it is not empty, and nothing in it is a store's.
    """
    if storage is None or storage.folder is None:
        return
    folder, failures = Path(storage.folder), list[OSError]()
    # A thread of its own: a call into a mount whose server is away may never come back.
    thread = threading.Thread(target=_try, args=(folder, failures), name="kv-file-place", daemon=True)
    thread.start()
    thread.join(storage.start_timeout_seconds)
    if thread.is_alive():
        logger.warning("event=storage_folder_late folder=%s action=go_on", folder)
    for error in failures:
        if error.errno in _FOR_THE_USER:
            raise StorageRefusedError(
                f"storage.folder is {str(folder)!r}, which cannot be used: {_reason(folder, error)}"
            ) from error
        logger.warning("event=storage_folder_fails folder=%s error=%r", folder, error)


def _reason(folder: Path, error: OSError) -> str:
    """What it says, and what to do. Errors of ours say that by themselves."""
    if error.errno is None or error.strerror != os.strerror(error.errno):
        return str(error.strerror)
    where = "" if str(error.filename) == str(folder) else f" ({error.filename})"
    return f"{error.strerror}{where}; name a folder that this user can make or write to"


def _try(folder: Path, failures: list[OSError]) -> None:
    disk = Disk()
    try:
        disk.make_folder(folder)
        disk.check_folder(folder, may_be_link=True)
        check_mine(folder)
        with tempfile.TemporaryFile(dir=folder, prefix=".try-"):  # hidden: another engine's `check_mine` may see it
            pass
    except OSError as error:
        failures.append(error)
