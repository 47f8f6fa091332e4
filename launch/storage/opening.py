"""The store that is meant by the options of a command."""

from __future__ import annotations

from fastdeploy_cache import CacheConfig, StorageConfig
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.storage.place import Place
from fastdeploy_cache.transfer_manager.storage.admin import StorageAdmin, open_admin
from fastdeploy_cache.transfer_manager.storage.keys import weights_digest_of


def open_place(place: Place, weights_id: str | None) -> tuple[StorageAdmin, dict[str, str]]:
    """The store, and the weights' ids that are known here, by their digests: the given one and the configured one.

    Raises:
        LaunchError: none or several of the options that say which store it is, or one that does not go with it.
        ConfigError, StorageRefusedError: what they say cannot be.
    """
    _check(place)
    config = _storage_config(place)
    options = config.store_options(tp_size=1)
    if place.metrics_url is not None:
        options["metrics_url"] = place.metrics_url
    known = [config.weights_id] if place.config is not None else []
    known += [weights_id] if weights_id is not None else []
    return open_admin(config.kind, options), {_digest(name): name for name in known}


def _digest(weights_id: str) -> str:
    try:
        return weights_digest_of(weights_id)
    except UnicodeEncodeError:
        raise LaunchError(f"the weights' id {weights_id!r} is no text in UTF-8") from None


def _check(place: Place) -> None:
    places = {
        "--folder": place.folder,
        "--server-url": place.server_url,
        "--master-address": place.master_address,
        "--config": place.config,
    }
    given = [option for option, value in places.items() if value is not None]
    if len(given) != 1:
        raise LaunchError(f"give one of {', '.join(places)}; found {' and '.join(given) or 'none'}")
    companions = (
        ("--password-file", place.password_file, ("--server-url",)),
        ("--tls-ca-file", place.tls_ca_file, ("--server-url",)),
        ("--metrics-url", place.metrics_url, ("--master-address", "--config")),
    )
    for option, value, partners in companions:
        if value is not None and given[0] not in partners:
            raise LaunchError(f"{option} goes with {' or '.join(partners)}, not with {given[0]}")


def _storage_config(place: Place) -> StorageConfig:
    weights_id = "any"  # a configuration needs one
    if place.folder is not None:
        return StorageConfig(kind="file", weights_id=weights_id, folder=place.folder)
    if place.server_url is not None:
        return StorageConfig(
            kind="valkey",
            weights_id=weights_id,
            server_url=place.server_url,
            password_file=str(place.password_file) if place.password_file else None,
            tls_ca_file=str(place.tls_ca_file) if place.tls_ca_file else None,
        )
    if place.master_address is not None:
        return StorageConfig(kind="mooncake", weights_id=weights_id, master_address=place.master_address)
    config = CacheConfig.load(place.config).storage
    if config is None:
        raise LaunchError(f"{place.config} has no table [storage]: an engine with it keeps nothing in a store")
    return config
