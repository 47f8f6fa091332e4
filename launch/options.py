"""Options of commands: several that make one object, and sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from fastdeploy_cache.ipc.log_lines import FORMAT_VARIABLE, LEVEL_VARIABLE, set_up_log


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """How a program logs, and every process that it starts."""

    log_level: Annotated[
        str | None, typer.Option(help=f"debug, info, warning or error, of all processes; otherwise {LEVEL_VARIABLE}.")
    ] = None
    log_format: Annotated[
        str | None, typer.Option(help=f"text, or json for an object in each line; otherwise {FORMAT_VARIABLE}.")
    ] = None

    def set_up(self) -> None:
        """Log so from now on."""
        set_up_log(self.log_level, self.log_format)


def spread(command: Callable[..., Any]) -> Callable[..., None]:
    """A command that has the fields of a dataclass among its options, and is given them as one object.

    Which class is said by the annotation of a parameter; which of its fields are options is said by theirs. Whatever
    the command returns is its exit status, if it is a number; where it is False, its status is 1.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    options = list[Parameter]()
    for own in signature(command).parameters.values():
        if own.name in groups:
            options += _options_of(groups[own.name])
        else:
            options.append(own.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[own.name]))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in _options_of(kind)})
        found = command(**given)
        if found is not None:
            raise typer.Exit(int(not found) if isinstance(found, bool) else found)

    # from these two the options are read
    run.__dict__["__signature__"] = Signature(options)
    run.__annotations__ = {each.name: each.annotation for each in options}
    return run


def _options_of(kind: Any) -> Iterator[Parameter]:
    annotations = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if get_origin(annotations[field.name]) is not Annotated:
            continue
        default = Parameter.empty if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotations[field.name])


def size_given(option: str, text: str, least_bytes: int = 0) -> int:
    """The bytes that an option means, such as `512MiB`; `transfer_manager.sizes` says how sizes are written.

    Raises:
        typer.BadParameter: it is no size, or less than `least_bytes`.
    """
    from fastdeploy_cache.errors import ConfigError  # late: for help the command line does without
    from fastdeploy_cache.transfer_manager.sizes import parse_size

    try:
        num_bytes = parse_size(text, option)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if num_bytes < least_bytes:
        raise typer.BadParameter(f"{option} is {text!r}; use at least {least_bytes // 2**20}MiB")
    return num_bytes
