"""The GPUs that figures were taken on, as nvidia-smi and the kernel describe them. No package is needed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_FIELDS = (
    *("index", "name", "pci.bus_id", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max"),
    *("compute_mode", "mig.mode.current"),
)
# Bytes of payload per second and lane, in GB, by generation: the line rate less its coding (8b/10b, then 128b/130b).
_LANE_GB = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_GENERATION_OF = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # by GT/s, as sysfs writes it
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_WAIT_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One GPU. What could not be read is empty, or 0."""

    index: int
    name: str
    bus_id: str  # as sysfs writes it: 0000:18:00.0
    driver: str = ""
    memory_mib: int = 0
    pcie_generation: int = 0
    pcie_lanes: int = 0
    compute_mode: str = ""
    mig_mode: str = ""

    @property
    def pcie_gb_per_second(self) -> float | None:
        """The most that the link carries each way, in 10**9 bytes; packet headers take some 5 to 10 % of it."""
        lane = _LANE_GB.get(self.pcie_generation)
        return lane * self.pcie_lanes if lane and self.pcie_lanes else None


def describe_gpus() -> list[GpuFacts]:
    """What nvidia-smi lists, in its order; nothing where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> list[GpuFacts]:
    """What nvidia-smi printed: a line for each GPU, its fields separated by commas."""
    found = []
    for line in text.splitlines():
        fields = dict(zip(_FIELDS, (field.strip() for field in line.split(",")), strict=False))
        if not fields.get("index", "").isdigit() or "pci.bus_id" not in fields:
            continue
        bus_id = short_bus_id(fields["pci.bus_id"])
        generation, lanes = _whole(fields.get("pcie.link.gen.max")), _whole(fields.get("pcie.link.width.max"))
        if not generation or not lanes:
            generation, lanes = read_link(bus_id)
        found.append(
            GpuFacts(
                index=int(fields["index"]),
                name=fields["name"],
                bus_id=bus_id,
                driver=fields.get("driver_version", ""),
                memory_mib=_whole(fields.get("memory.total")),
                pcie_generation=generation,
                pcie_lanes=lanes,
                compute_mode=fields.get("compute_mode", ""),
                mig_mode=fields.get("mig.mode.current", ""),
            )
        )
    return found


def short_bus_id(bus_id: str) -> str:
    """The id as sysfs writes it: nvidia-smi has capitals and a domain of eight digits."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def read_link(bus_id: str, devices: Path = _PCI_DEVICES) -> tuple[int, int]:
    """Generation and lanes of the link as the kernel knows them; zeros where it says nothing."""
    try:
        speed = (devices / bus_id / "max_link_speed").read_text().split()
        lanes = (devices / bus_id / "max_link_width").read_text()
    except OSError:
        return 0, 0
    return _GENERATION_OF.get(speed[0] if speed else "", 0), _whole(lanes)


def _whole(text: str | None) -> int:
    text = (text or "").strip()
    return int(text) if text.isdigit() else 0
