"""What this site adds to Sphinx: two directives that print the references, a home page with the navigation, and links
from pages to the programs in examples/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

from docutils import nodes
from references import OPEN_LABELS, UNKNOWN, metric_families, settings_of
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

HERE = Path(__file__).parent
EXAMPLE = re.compile(r"\]\((?:\.\./)*examples(?:/(\w+)\.py)?\)")


class SettingsReference(SphinxDirective):
    """`.. settings-reference:: TABLE` lists the keys of a table, or without a name those in front of all tables."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The entries."""
        table = self.arguments[0] if self.arguments else ""
        lines: list[str] = []
        for setting in settings_of(table):
            default = "has to be given" if setting.default is None else f"``{setting.default}``"
            lines += [f".. setting:: {setting.name}", "", f"   {sentence(setting.text)}", ""]
            lines += [
                f"   :Type: {setting.type}",
                f"   :Default: {default}",
                f"   :Environment: ``{setting.variable}``",
            ]
            lines.append("")
        self.env.note_reread()  # classes change without this page
        return self.parse_text_to_nodes("\n".join(lines))


class MetricsReference(SphinxDirective):
    """`.. metrics-reference::` lists all families of the metrics page."""

    def run(self) -> list[nodes.Node]:
        """The entries."""
        lines: list[str] = []
        for family in metric_families():
            lines += [f".. metric:: {family.name}", "", f"   {sentence(family.text)}", "", f"   :Type: {family.type}"]
            for label, values in list(family.labels.items())[1:]:  # the first, `dp`, is on every series
                shown = ", ".join(f"``{value}``" for value in values if value)
                lines.append(f"   :Label {label}: {shown or OPEN_LABELS.get(label, UNKNOWN)}")
            lines.append("")
        self.env.note_reread()
        return self.parse_text_to_nodes("\n".join(lines))


def sentence(text: str) -> str:
    """The text as a sentence: with a capital at its front, where that is a word, and a full stop at its end."""
    if kind := re.match(r"\((\w+)\) ", text):  # of which store or link a setting is
        return f"Only for `{kind.group(1)}`. {sentence(text[kind.end() :])}"
    text = text[0].upper() + text[1:] if text[0].isalpha() else text
    return text if text.endswith((".", ":")) else text + "."


def add_what_the_site_has(_app: Sphinx, docname: str, source: list[str]) -> None:
    """The navigation below the home page; links to programs lead to the page that shows them."""
    source[0] = EXAMPLE.sub(lambda found: f"](#example-{found.group(1) or 'programs'})", source[0])
    if docname == "README":
        source[0] += "\n" + (HERE / "templates/navigation.txt").read_text()


def make_plain_docstring_rst(*event: object) -> None:
    """Docstrings are plain text with names in backticks: a star is a star, and a drawing keeps its lines.
    The last argument of the event is the docstring's lines, which are changed in place."""
    lines, result = cast("list[str]", event[-1]), list[str]()
    for line in lines:
        if line.startswith(("+-- ", "|   ")) and (len(result) < 2 or not result[-1].startswith("    ")):
            root = result.pop()  # the line above a tree is its root
            result += ["::", "", f"    {root}"]
        if line.startswith("- ") and result and result[-1].strip() and not result[-1].startswith(("- ", "  ")):
            result.append("")  # a list begins behind an empty line
        drawn = line.startswith(("+-- ", "|   ", "    +-- ")) and result[-1].startswith("    ")
        result.append(f"    {line}" if drawn else re.sub(r"\*+", lambda stars: "\\*" * len(stars.group()), line))
    lines[:] = result


def setup(app: Sphinx) -> dict[str, bool]:
    """Register all of it."""
    app.add_directive("settings-reference", SettingsReference)
    app.add_directive("metrics-reference", MetricsReference)
    app.add_object_type("setting", "setting", "single: %s")
    app.add_object_type("metric", "metric", "single: %s")
    app.connect("autodoc-process-docstring", make_plain_docstring_rst, priority=400)  # before napoleon
    app.connect("source-read", add_what_the_site_has)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
