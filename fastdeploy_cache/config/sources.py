"""Where settings come from: a TOML file, environment variables, arguments; and errors about them in our own words."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import ConfigError, reason_of
from fastdeploy_cache.ipc.log_lines import FORMAT_VARIABLE, LEVEL_VARIABLE

ENVIRONMENT_PREFIX = "FASTDEPLOY_CACHE_"
RUN_FOLDER_VARIABLE, PYTHON_VARIABLE = f"{ENVIRONMENT_PREFIX}RUN_DIR", f"{ENVIRONMENT_PREFIX}PYTHON"
# variables of ours that are no settings of a cache: they are for programs and scripts, and any process may have them
_NO_SETTINGS = frozenset({LEVEL_VARIABLE, FORMAT_VARIABLE, RUN_FOLDER_VARIABLE, PYTHON_VARIABLE})
_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "array": "a list"}
_NUMBER_OR_BOOLEAN = re.compile(r"[-+]?[0-9._]+(e[-+]?\d+)?|true|false", re.IGNORECASE)
_MAX_LINES_OF_VALUE = 200  # of a longer one, and of what follows it, no line is told
_MOST_NESTED = 32  # tables and lists in each other: ours are three
_MOST_BITS = 4096  # of a whole number
NUMBER_LISTS = ("device_ids", "num_gpu_units")  # keys of numbers with commas between them, where they are a text
_AT = re.compile(r"(?P<text>.*) - at `\$\.?(?P<path>[^`]*)`", re.DOTALL)
_ENTRY = re.compile(r"\[([^\]]*)\]")  # of a list by its number, or of a table by `...`: some entry


@dataclass(frozen=True)
class Sources:
    """Settings, each with where it was said: `origins` has `transfer.tp_size` for the key in a table."""

    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def merge(self, other: Sources, alternatives: Sequence[Sequence[str]]) -> None:
        """A later source wins, key by key; of a group of `alternatives` it replaces all."""
        for group in alternatives:
            if any(name in other.settings for name in group):
                for name in group:
                    self.settings.pop(name, None)
                    self.origins.pop(name, None)
        for key, value in other.settings.items():
            mine = self.settings.get(key)
            both = isinstance(value, Mapping) and isinstance(mine, Mapping)
            self.settings[key] = {**mine, **value} if both and mine is not None else value
        self.origins.update(other.origins)

    def blame(self, error: Exception, kinds: Mapping[str, Any]) -> ConfigError:
        """The error about one of these settings, with where that was said.

        Args:
            error: of a conversion, or of our own that begins with the setting's name.
            kinds: the class of the whole, under "", and those of tables and of entries of lists by name.
        """
        text, path = str(error), ""
        if (found := _AT.fullmatch(text)) is not None:
            text, path = _plain(found["text"], found["path"], self.value(found["path"]), kinds)
        unknown = re.match(r"unknown key '([^']*)'", text)
        named = unknown[1] if unknown is not None else text.partition(" ")[0]
        origin = self._origin(named) or self._origin(path)
        if (several := re.match(r"\w+(?: and \w+)+(?= are given;)", text)) is not None:
            origin = " and ".join(dict.fromkeys(filter(None, map(self.origins.get, several[0].split(" and ")))))
        if unknown is not None and not origin:  # a table that is said by what is in it
            origin = next((where for key, where in self.origins.items() if key.startswith(f"{named}.")), "")
        if unknown is not None and origin.startswith("environment"):
            if "." not in named and (meant := re.search(r"did you mean '(\w+)\.(\w+)'", text)) is not None:
                text += f" As a variable that is {ENVIRONMENT_PREFIX}{meant[1].upper()}__{meant[2].upper()}."
            text += " Unset the variable if it is not meant for this cache."
        return ConfigError(f"{origin}: {text}" if origin else text)

    def _origin(self, name: str) -> str:
        """Where a setting was said. What lies in a list of tables may have been said with all of the list."""
        while name not in self.origins and "[" in name:
            name = name.rpartition("[" if name.endswith("]") else ".")[0]
        return self.origins.get(name, "")

    def value(self, path: str) -> Any:
        """What was said at a place such as `layout.groups[1].kind`; None where nothing was."""
        value: Any = self.settings
        for part in _ENTRY.sub(r".\1", path.replace("[...]", "")).split(".") if path else []:
            if isinstance(value, Mapping):
                value = value.get(part)
            else:
                value = value[int(part)] if isinstance(value, Sequence) and part.isdigit() else None
        return value


def from_file(path: str | Path) -> Sources:
    """What a TOML file says, by line.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    text = ""
    try:
        text = Path(path).read_text()
        settings = tomllib.loads(text)
        _check_bounds(settings)
    except RecursionError:
        raise ConfigError(f"cannot read configuration {_at_fault(path, text)}: it is nested too deep") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read configuration {path}: {reason_of(error)}") from error
    except ValueError:  # Python converts no longer ones
        raise ConfigError(f"cannot read configuration {_at_fault(path, text)}: a number has too many digits") from None
    lines = _lines_of(text)
    return Sources(
        settings, {key: f"{path}, line {lines[key]}" if key in lines else str(path) for key in _keys(settings)}
    )


def _check_bounds(settings: Mapping[str, Any]) -> None:
    """Raise `RecursionError` where it is nested deep, and `ValueError` for a number that Python would not print: both
    early, as whatever walks through it later, or tells of it, would."""
    level: list[Any] = [settings]
    for _ in range(_MOST_NESTED):
        inner = [each for whole in level for each in (whole.values() if isinstance(whole, Mapping) else whole)]
        if any(isinstance(each, int) and each.bit_length() > _MOST_BITS for each in inner):
            raise ValueError
        level = [each for each in inner if isinstance(each, (Mapping, list))]
        if not level:
            return
    raise RecursionError


def _at_fault(path: str | Path, text: str) -> str:
    """The file, with the line that is TOML and cannot be taken for all that, where it is a line alone."""
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            _check_bounds(tomllib.loads(line))
        except tomllib.TOMLDecodeError:
            continue
        except (ValueError, RecursionError):
            return f"{path}, line {number}"
    return str(path)


def check_types(settings: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str = "") -> None:
    """Raise `ConfigError` for a text where a file, which can say numbers, has to. Sizes in bytes may have a unit."""
    declared = {item.name: str(item.type) for item in dataclasses.fields(kinds[_ENTRY.sub("", prefix)])}
    for name, value in settings.items():
        kind, where = declared.get(name, "").removesuffix(" | None"), f"{prefix}.{name}" if prefix else name
        if _ENTRY.sub("", where) in kinds and isinstance(value, (Mapping, list)):
            inner = {where: value} if isinstance(value, Mapping) else {f"{where}[{i}]": v for i, v in enumerate(value)}
            for at, table in inner.items():
                if isinstance(table, Mapping):
                    check_types(table, kinds, at)
            continue
        is_list = kind == "tuple[int, ...]"
        kind = "int" if is_list else kind
        texts = [each for each in (value if is_list and isinstance(value, list) else [value]) if isinstance(each, str)]
        if texts and kind in ("int", "float", "bool") and not name.endswith("_bytes"):
            advice = ", without quotes" if _NUMBER_OR_BOOLEAN.fullmatch(texts[0].strip()) else ""
            raise ConfigError(f"{where} is {value!r}; give {_EXPECTED[kind]}{advice}")


def from_environment(environment: Mapping[str, str]) -> Sources:
    """What variables say whose names begin with the prefix: tables are joined by two underscores.

    Those of the log, of the scripts and of programs in the background are left out: they are no settings of a cache.
    """
    found = Sources()
    for name, value in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in _NO_SETTINGS:
            table, _, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().rpartition("__")
            parsed = [part for part in value.split(",") if part] if key in NUMBER_LISTS else value
            (found.settings.setdefault(table, {}) if table else found.settings)[key] = parsed
            found.origins[f"{table}.{key}" if table else key] = f"environment variable {name}"
    return found


def from_arguments(arguments: Mapping[str, Any]) -> Sources:
    """What a caller says."""
    return Sources(dict(arguments), dict.fromkeys(_keys(arguments), "argument"))


def _keys(settings: Mapping[str, Any]) -> list[str]:
    """Each key, those in tables with the table's name, those in lists of tables with their place, too; tables, too."""
    found = []
    for key, value in settings.items():
        found.append(key)
        if isinstance(value, Mapping):
            found += [f"{key}.{name}" for name in _keys(value)]
        elif isinstance(value, list):
            tables = ((f"{key}[{place}]", each) for place, each in enumerate(value) if isinstance(each, Mapping))
            found += [name for at, each in tables for name in (at, *(f"{at}.{inner}" for inner in _keys(each)))]
    return found


def _lines_of(text: str) -> dict[str, int]:
    """The line that each key begins at, those in tables with the table's name; of what cannot be told, nothing.

    Each statement is parsed by itself, by the parser of the whole, so that quotes, dots and values of many lines mean
    here what they mean there. A line that does not parse alone begins a value of several lines: they are parsed
    together.
    """
    found: dict[str, int] = {}
    num_entries: dict[tuple[str, ...], int] = {}  # so far, of each list of tables: by its path with all places
    table: tuple[str, ...] = ()
    lines, first = text.split("\n"), 0
    while first < len(lines):
        for end in range(first + 1, min(len(lines), first + _MAX_LINES_OF_VALUE) + 1):
            with contextlib.suppress(tomllib.TOMLDecodeError):
                said = tomllib.loads("\n".join(lines[first:end]))
                break
        else:
            return found
        header = lines[first].lstrip()
        is_header = header.startswith("[")
        paths = list(_paths(said))
        if header.startswith("[["):
            begun = (*_placed(paths[-1][:-1], num_entries), paths[-1][-1])
            num_entries[begun] = num_entries.get(begun, 0) + 1
        for path in paths:
            name = ".".join(_placed(path, num_entries) if is_header else (*table, *path))
            found.setdefault(name, first + 1)
            found.setdefault(name.removesuffix("[0]"), first + 1)  # the list begins there, too
        table, first = _placed(paths[-1], num_entries) if is_header else table, end
    return found


def _placed(path: tuple[str, ...], num_entries: Mapping[tuple[str, ...], int]) -> tuple[str, ...]:
    """The path of a header, with the place of the last entry at each list of tables."""
    placed: tuple[str, ...] = ()
    for name in path:
        number = num_entries.get((*placed, name))
        placed = (*placed, name if number is None else f"{name}[{number - 1}]")
    return placed


def _paths(said: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The keys of one statement, each with those that it lies in, and the innermost last. Of a list of tables these
    are the keys of the one that is begun."""
    for key, value in said.items():
        yield (key,)
        begun = value[0] if isinstance(value, list) and value and isinstance(value[0], Mapping) else value
        for path in _paths(begun) if isinstance(begun, Mapping) else ():
            yield (key, *path)


def _plain(text: str, path: str, value: Any, kinds: Mapping[str, Any]) -> tuple[str, str]:
    """A converter's complaint in our words, and the setting that it is about."""
    if (missing := re.fullmatch(r"Object missing required field `(\w+)`", text)) is not None:
        whole = f"{path}.{missing[1]}" if path else missing[1]
        return f"{whole} is missing; give it", path
    if (wrong := re.fullmatch(r"Expected `([^`]*)`, got .*", text)) is not None:
        names = [name for name in wrong[1].split(" | ") if name != "null"]
        wanted = " or ".join(_EXPECTED.get(name, "a table") for name in names)
        if path.endswith("[...]"):
            return f"{path.removesuffix('[...]')} is {value!r}; give {wanted} for each entry", path
        return f"{path} is {value!r}; give {wanted}", path
    if text.startswith("Invalid enum value"):
        table, _, name = path.rpartition(".")
        choices = [str(choice) for choice in _choices(typing.get_type_hints(kinds[_ENTRY.sub("", table)])[name])]
        return f"{path} is {value!r}; use one of {', '.join(choices)}", path
    return text, path


def _choices(hint: Any) -> list[Any]:
    """What a `Literal`, alone or beside None, allows."""
    parts = typing.get_args(hint)
    return list(parts) if typing.get_origin(hint) is typing.Literal else [c for part in parts for c in _choices(part)]
