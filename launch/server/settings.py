"""What the options of `serve` stand for, as the cache's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdeploy_cache import CacheConfig, KVLayout
from fastdeploy_cache.config.sources import NUMBER_LISTS, Sources, from_file
from fastdeploy_cache.errors import ConfigError, LaunchError, counted
from fastdeploy_cache.launch.reference_engine.hybrid_spec import hybrid_layout_of, weights_id_of, with_units
from fastdeploy_cache.launch.reference_engine.serving import MAX_RUNNING, layout_of
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles
from fastdeploy_cache.launch.server.api_requests import DEFAULT_NEW_TOKENS
from fastdeploy_cache.launch.server.options import ServeOptions

DEFAULT_FILE = Path(__file__).parent.with_name("serve.toml")


def load_config(files: ModelFiles, options: ServeOptions) -> CacheConfig:
    """The configuration for this model; what `--set` says wins over file and environment.

    `storage` is short for a file store there, named by the digest of the model's weights, and `role` for that setting
    and the peer's `weights_id`.

    Raises:
        ConfigError: it is none, does not fit the model, or has peers and no secret.
        LaunchError: no such device.
    """
    given = list(options.settings or [])
    given += [f"transfer.tp_size={options.ranks}"] if options.ranks is not None else []
    given += [f"transfer.log_dir={options.log_dir}"] if options.log_dir is not None else []
    given += device_settings(options.device, given)
    is_hybrid = options.model == "hybrid"
    layout = hybrid_layout_of(files.spec) if is_hybrid else layout_of(files.spec)
    if options.storage is not None:
        given = [f"storage.folder={options.storage}", f"storage.weights_id={weights_id_of(files, layout)}", *given]
        given = ["storage.kind=file", "storage.admission=all", *given]
    if options.role != "mixed":
        given = [f"role={options.role}", *given]
    if options.peers or options.role != "mixed":
        given = [f"peer.weights_id={weights_id_of(files, layout)}", *given]
    config = _load(layout, options.config, given)
    _check_secret(config)
    if is_hybrid and config.transfer.device != "cpu":
        raise ConfigError(
            f"--model hybrid with transfer.device {config.transfer.device!r}; its states are computed on a CPU"
        )
    return with_units(config, MAX_RUNNING) if is_hybrid else config


def check_pool(config: CacheConfig, num_chat_tokens: int) -> None:
    """Raise `ConfigError` where not even the shortest chat, which has so many tokens, fits into the GPU pool with one
    token of its answer."""
    num_blocks, size = config.pool_sizes()[0], config.block_size
    least, default = (-(-(num_chat_tokens + num_new) // size) for num_new in (1, DEFAULT_NEW_TOKENS))
    if num_blocks < least:
        raise ConfigError(
            f"the GPU pool has {counted(num_blocks, 'block')} of {counted(size, 'token')}, and the shortest chat takes "
            f"{least} with one token of its answer; use num_gpu_blocks of at least {least}, or of {default} for an "
            f"answer of {DEFAULT_NEW_TOKENS} tokens, the most by default"
        )


def named(config: CacheConfig, port: int) -> CacheConfig:
    """The settings, with a name that tells the instances of a host apart, where nobody has named this one."""
    if config.peer is None or config.peer.name:
        return config
    return dataclasses.replace(config, peer=dataclasses.replace(config.peer, name=f"{config.role}-{port}"))


def _check_secret(config: CacheConfig) -> None:
    """Offers come over HTTP, from anybody who reaches the port."""
    if config.peer is not None and config.peer.secret_file is None:
        raise ConfigError(
            "peer.secret_file is not set, so anybody who reaches this server could have it cache blocks of his own "
            "making; make a secret with `fastdeploy-cache peer-secret FILE` and give all instances of the group "
            "--set peer.secret_file=FILE"
        )


def device_settings(device: str, settings: Sequence[str]) -> list[str]:
    """What `--device` stands for, beside these settings.

    Raises:
        LaunchError: neither `cpu` nor `gpu:N`.
    """
    if device == "cpu":
        return []
    kind, _, number = device.partition(":")
    if kind != "gpu" or not number.isdigit():
        raise LaunchError(f"--device is {device!r}; use cpu, or gpu:N with the number of a GPU")
    sizes = [int(setting.partition("=")[2]) for setting in settings if setting.startswith("transfer.tp_size=")]
    ids = ",".join([number] * (sizes[-1] if sizes else 1))
    return ["transfer.device=cuda", f"transfer.device_ids={ids}"]


def _load(layout: KVLayout, path: Path | None, settings: Sequence[str]) -> CacheConfig:
    overrides: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r} is no KEY=VALUE")
        table, _, key = name.rpartition(".")
        parsed = value.split(",") if key in NUMBER_LISTS else value
        (overrides.setdefault(table, {}) if table else overrides)[key] = parsed
    if "layout" in overrides:
        raise ConfigError("--set layout...: serve has its model's layout; leave it out")
    if path is not None:
        _check_layout(from_file(path), layout)
    config = CacheConfig.load(path or DEFAULT_FILE, layout=layout, **overrides)
    if config.transfer.tp_size not in (1, 3):
        raise ConfigError(f"transfer.tp_size is {config.transfer.tp_size}; the model has 3 KV heads, so use 1 or 3")
    return config


def _check_layout(said: Sources, layout: KVLayout) -> None:
    """A file for another model would be taken for one of this."""
    given = said.settings.get("layout")
    for name, value in given.items() if isinstance(given, dict) else ():
        if hasattr(layout, name) and getattr(layout, name) != value:
            raise ConfigError(
                f"{said.origins[f'layout.{name}']}: leave the table [layout] out, as serve has its model's: "
                f"there {name} is {getattr(layout, name)!r}, and not {value!r}"
            )
