"""The real model, loaded once."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from fastdeploy_cache.launch.reference_engine.model import Llama
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, load_model_files
from tests.rigs.reference_model import (
    make_shards,
)


@pytest.fixture(scope="session")
def files() -> ModelFiles:
    """The real model, from the user's cache."""
    return load_model_files()


@pytest.fixture(scope="session")
def tokenizer(files: ModelFiles) -> ChatTokenizer:
    """The real tokeniser."""
    return ChatTokenizer(files)


@pytest.fixture(scope="session")
def llama(files: ModelFiles) -> Llama:
    """The real model on one rank."""
    return Llama(files, make_shards(1))


@pytest.fixture(scope="session")
def prompt(tokenizer: ChatTokenizer) -> np.ndarray:
    """A chat prompt of 64 tokens, so that it spans several blocks."""
    system = "You answer in one short sentence. " * 5
    question = {"role": "user", "content": "What is the capital of France?"}
    return tokenizer.encode_chat([{"role": "system", "content": system}, question])


@pytest.fixture
def nobody() -> str:
    """A URL of this host that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"
