# The packages that functions of kind llm:vllm import on hosts without a GPU: vLLM's CPU build, about 2.3 GB.
# scripts/images.sh tags it by the hash of the two locks and of this file, so that it is built once for them, wherever
# the wheels came from. torch's CPU wheel is on no package index: WHEELHOUSE is the address of a page that links it.
# Where PyTorch's own cannot be reached, serve a folder that has the wheel (scripts/images.sh does) and give that
# address.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
FROM ${PYTHON_IMAGE}
ARG WHEELHOUSE=https://download.pytorch.org/whl/cpu/torch/
# vLLM's native code asks for libnuma, which Debian's slim images leave out
RUN if command -v apt-get; then apt-get update -q && apt-get install -y -q --no-install-recommends libnuma1 && \
        rm -rf /var/lib/apt/lists/*; fi
COPY deps/tools.lock deps/runtime-cpu.lock /build/
# The last command looks for the kernels of the processor that builds the image: vLLM has a library for each generation,
# and one that is too new for it would end the build with an illegal instruction.
RUN python -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
        --no-deps --require-hashes -r /build/tools.lock && \
    host=$(echo "$WHEELHOUSE" | sed 's|^[a-z]*://\([^/]*\)/.*|\1|') && \
    UV_INDEX_STRATEGY=unsafe-best-match UV_HTTP_TIMEOUT=180 UV_LINK_MODE=copy \
    python -m uv pip install --system --no-cache --no-deps --require-hashes --compile-bytecode \
        --allow-insecure-host "$host" --find-links "$WHEELHOUSE" -r /build/runtime-cpu.lock && \
    python -m pip uninstall -y -q uv --root-user-action=ignore && \
    python -c "import torch; from vllm.platforms import current_platform as p; p.import_kernels(); \
        torch.ops._C.init_cpu_memory_env"
