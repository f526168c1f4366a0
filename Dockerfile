# The demo, from a clean machine to its page:
#   docker build -t patchgen . && docker run --rm -v "$PWD/demo:/patchgen/demo" patchgen
FROM python:3.13-slim
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /patchgen
COPY . .
RUN make setup && .venv/bin/patchgen weights fetch
CMD ["make", "demo"]
