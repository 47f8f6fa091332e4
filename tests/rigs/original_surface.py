"""What an original's callers use, as plain data, held against the adapter and its page.

A surface is a mapping from a name to the parameters that its callers give: in this order by place, or by keyword; those
that end with `=` by keyword alone. None: an attribute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Surface = Mapping[str, Sequence[str] | None]
PAGES = Path(__file__).parents[2] / "docs" / "adapters"


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
    by_place = [name for name in parameters if not name.endswith("=")]
    by_keyword = [name.removesuffix("=") for name in parameters]
    try:
        signature.bind(**dict.fromkeys(by_keyword))
        bound = signature.bind(*by_place, **{name: name for name in by_keyword if name not in by_place})
    except TypeError:
        return False
    return all(name not in bound.arguments or bound.arguments[name] == name for name in by_keyword)


def unnamed(page: str, names: Sequence[str]) -> list[str]:
    """Of these names, which a page of the documentation should say are not there, those that it does not mention."""
    text = (PAGES / page).read_text()
    return [name for name in names if f"`{name}" not in text]
