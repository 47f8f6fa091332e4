"""Which versions of another engine an adapter can serve."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from dataclasses import dataclass

from fastdeploy_cache.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KnownVersions:
    """The versions that an adapter is for: from the oldest one that it works with to the newest one that was tried.

    `oldest` and `newest` are the first numbers of a version, such as (0, 29); what follows them is not looked at.
    """

    engine: str
    package: str  # what pip calls it
    part: str  # of ours, as a message names it
    oldest: tuple[int, ...]
    newest: tuple[int, ...]

    def check(self, version: str | None) -> None:
        """Refuse an older version, and warn of one that nobody has tried. One that is not known (None) is tried.

        Raises:
            ConfigError: it is too old.
        """
        if version is None:
            return
        found = re.match(r"\d+(\.\d+)*", version)
        number = tuple(map(int, found[0].split("."))) if found else ()
        is_told = any(number)  # a checkout without tags is 0.0.0
        if is_told and number[: len(self.oldest)] < self.oldest:
            raise ConfigError(
                f"this is {self.engine} {version}; {self.part} needs {_text(self.oldest)} or newer: "
                f"pip install -U {self.package}"
            )
        if not is_told or number[: len(self.newest)] > self.newest:
            logger.warning(
                "event=unknown_%s version=%s; %s was written for %s and is tried all the same",
                self.package,
                version,
                self.part,
                _text(self.newest) if self.oldest == self.newest else f"{_text(self.oldest)} to {_text(self.newest)}",
            )


VLLM = KnownVersions(
    engine="vLLM", package="vllm", part="the connector", oldest=(0, 29), newest=(0, 33)
)  # 0.31 to 0.33 were tried in a real engine
SGLANG = KnownVersions(
    engine="SGLang", package="sglang", part="the storage backend", oldest=(0, 5, 23), newest=(0, 5, 23)
)  # older ones do not say which of several ranks writes


def installed_version(package: str) -> str | None:
    """What pip has installed; None where it does not say."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
