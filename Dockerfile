# docker build --build-arg PIP_EXTRA_INDEX_URL -t detgen .
#
# Without the argument, an index of PyTorch's CPU builds, pip takes PyTorch's default build, which brings CUDA.
FROM python:3.12-slim AS wheel
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel /src

FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir -c /constraints.txt /wheel/*.whl
# What models were found to be, and models of the hub: mount a folder here to keep them.
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
RUN useradd --no-create-home detgen && install -d -o detgen /cache
USER detgen
WORKDIR /data
ENTRYPOINT ["detgen"]
