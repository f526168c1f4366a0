# The demo, from a clean machine to its page:
#   docker build -t patchgen . && docker run --rm -v "$PWD/demo:/patchgen/demo" patchgen
# torch is the build that pip finds. For a smaller image pass the address of PyTorch's CPU builds:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... -t patchgen .
FROM python:3.13-slim
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /patchgen
COPY . .
ARG PIP_EXTRA_INDEX_URL=
RUN make setup && .venv/bin/patchgen weights fetch
CMD ["make", "demo"]
