#!/usr/bin/env bash
# Sets up .venv and builds the documentation as a site, build/site/index.html. A warning, such as a link that leads
# nowhere, is an error. It takes no arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if help_wanted "$@"; then
    show_help "${BASH_SOURCE[0]}"
    exit 0
fi
[ $# = 0 ] || refuse "'$1' is not known here; docs.sh takes no arguments"
install docs
say "sphinx"
cd "$ROOT"
rm -rf build/site # what is no page any more goes
"$PYTHON" -m sphinx --quiet --fresh-env --fail-on-warning --conf-dir docs/site --doctree-dir build/doctrees . build/site
say "the site is $ROOT/build/site/index.html"
