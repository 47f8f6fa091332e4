"""`python -m fastdeploy_cache.launch.gpu`: its options, read by Python's own library alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fastdeploy_cache.launch import interrupts
from fastdeploy_cache.launch.gpu.command import GpuRun, run_gpu
from fastdeploy_cache.launch.gpu.notes import GpuOptions
from fastdeploy_cache.launch.gpu.sections import SECTIONS


def main() -> int:
    """Run what the arguments ask for; the exit status."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(
        prog="gpu.sh",
        description="Run what this project has of CUDA on this machine's GPU, in under 8 minutes, and report it.",
        epilog="Exit status 0: all that could run was right; 1: something was not, or a package of ours is missing; "
        "2: wrong arguments; 3: there is no GPU to use; 130: interrupted.",
    )
    parser.add_argument("--json", type=Path, default=Path("gpu_report.json"), help="where the report goes for programs")
    parser.add_argument("--markdown", type=Path, help="also write here what is printed")
    parser.add_argument("--section", action="append", choices=names, metavar="NAME", help=f"only: {', '.join(names)}")
    parser.add_argument(
        "--packages",
        type=Path,
        help="packages that this Python has not are installed into a folder for its version in here, if there is a "
        "driver; gpu.sh gives run/gpu-packages; without it nothing is installed",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        help="where packages are missing, install all wheels of this folder instead, without asking a registry and "
        "without their dependencies",
    )
    parser.add_argument("--quick", action="store_true", help="little of everything: a test of this command itself")
    given = parser.parse_args()
    for file in (given.json, given.markdown):
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"cannot write {file}: its folder does not exist")
        if file is not None and file.is_dir():
            parser.error(f"cannot write {file}: it is a folder")
    if given.wheels is not None and not given.wheels.is_dir():
        parser.error(f"--wheels {given.wheels}: there is no such folder")
    if given.wheels is not None and given.packages is None:
        parser.error(f"--wheels {given.wheels}: --packages has to say where they are installed")
    wanted = GpuRun(
        json_file=given.json,
        markdown_file=given.markdown,
        names=tuple(given.section or ()),
        options=GpuOptions(is_quick=given.quick),
        packages=given.packages / f"python{sys.version_info.major}.{sys.version_info.minor}"
        if given.packages
        else None,
        wheels=given.wheels,
    )
    return _run(wanted)


def _run(wanted: GpuRun) -> int:
    interrupts.interrupt_once()
    try:
        return run_gpu(wanted)
    except KeyboardInterrupt:
        print("gpu.sh: interrupted; the report has the sections that had ended", file=sys.stderr)
        return interrupts.STATUS


if __name__ == "__main__":
    raise SystemExit(main())
