"""How the site is built: Sphinx reads the pages where they lie, so that their links hold on a plain Git host, too.

`./launch/docs.sh` builds it. The sources begin at the repository's root; the home page is README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

from fastdeploy_cache import __version__  # noqa: E402  the package of this checkout, whatever else is installed

project = "fastdeploy_cache"
author = "the authors of fastdeploy_cache"
copyright = "the authors of fastdeploy_cache; Apache-2.0"  # noqa: A001  Sphinx's name
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "site_extension"]
root_doc = "README"
include_patterns = ["*.md", "docs/**"]
# what is not looked at is not walked through either: environments, builds, and links into the same packages
exclude_patterns = [
    ".*", "build", "dist", "run", "tests", "launch", "ipc", "metrics", "transfer_manager", "fastdeploy_cache",
    "examples", "*.egg-info", "docs/site/templates", "docs/site/static",
]  # fmt: skip
nitpicky = True
nitpick_ignore_regex = [
    # types of signatures that have no page here: Python's own, NumPy's, and names inside the package
    (r"py:(class|obj|data|exc)", r"(?!fastdeploy_cache\.).*"),
    (r"py:class", r"fastdeploy_cache\..*"),
]

default_role = "code"  # docstrings name things in single backticks
highlight_language = "text"
myst_heading_anchors = 4
autodoc_default_options = {"members": True, "member-order": "bysource"}
autoclass_content = "both"  # what a constructor takes and raises is told by its own docstring
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 140
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Errors that are answered and not raised", "params_style")]

html_theme = "furo"
html_title = f"fastdeploy_cache {__version__}"
html_additional_pages = {"index": "index.html"}
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#1f5fae", "color-brand-content": "#1f5fae"},
    "dark_css_variables": {"color-brand-primary": "#7fb2f0", "color-brand-content": "#7fb2f0"},
}
