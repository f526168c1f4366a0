# The demo, from a clean machine to its page:
#   docker build -t patchgen . && docker run --rm -v "$PWD/demo:/patchgen/demo" patchgen
FROM python:3.13-slim
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /patchgen
COPY . .
# CPU builds of torch; for a GPU build another with --build-arg TORCH_INDEX=... --build-arg ALLOW_CUDA=1
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG ALLOW_CUDA=0
ENV PIP_EXTRA_INDEX_URL=$TORCH_INDEX ALLOW_CUDA=$ALLOW_CUDA
RUN make setup && .venv/bin/patchgen weights fetch
CMD ["make", "demo"]
