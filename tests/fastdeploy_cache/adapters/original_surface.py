"""What an original's callers use, as plain data, held against the adapter and its page.

A surface is a mapping from a name to the parameters that its callers give by keyword or by place; None: an attribute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Surface = Mapping[str, Sequence[str] | None]
PAGES = Path(__file__).parents[3] / "docs" / "adapters"


def missing(target: object, surface: Surface) -> list[str]:
    """Names that `target` does not have, and calls that it does not take, whatever of them is given by keyword."""
    wrong = []
    for name, parameters in surface.items():
        if not hasattr(target, name):
            wrong.append(f"{name} is missing")
        elif parameters is not None and not takes(getattr(target, name), parameters):
            wrong.append(f"{name} does not take {', '.join(parameters)}")
        elif parameters is None and callable(getattr(target, name)):
            wrong.append(f"{name} is no attribute")
    return wrong


def takes(call: Callable[..., Any], parameters: Sequence[str]) -> bool:
    """Whether a call takes these parameters, by place as well as by keyword, and needs no others."""
    signature = inspect.signature(call)
    by_place = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        signature.bind(**dict.fromkeys(parameters))
    except TypeError:
        return False
    has_others = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    named = [name for name in parameters if name in signature.parameters or not has_others]
    return named == [p.name for p in by_place][: len(named)]


def unnamed(page: str, names: Sequence[str]) -> list[str]:
    """Of these names, which a page of the documentation should say are not there, those that it does not mention."""
    text = (PAGES / page).read_text()
    return [name for name in names if f"`{name}" not in text]
