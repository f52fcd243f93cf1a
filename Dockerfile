# All of longrope2, for a GPU:
#   docker build -t longrope2 .
#   docker run --gpus all -v $PWD:/work longrope2 extend MODEL --target-length 128k -o runs/mine
# For a machine without one: docker build --build-arg BASE=python:3.11-slim --build-arg INDEX=https://download.pytorch.org/whl/cpu -t longrope2 .
# A server is another image, in docs/docker/.
ARG BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime
FROM ${BASE}
ARG INDEX=https://pypi.org/simple
COPY pyproject.toml README.md LICENSE /opt/longrope2/
COPY src /opt/longrope2/src
# torch first: where the image has one, or the index of CPU builds does, the next line takes no other.
RUN python -c "import torch" || pip install --no-cache-dir --index-url ${INDEX} "torch>=2.11"
RUN pip install --no-cache-dir "/opt/longrope2[eval,export,report,train]" && longrope2 --version
WORKDIR /work
ENTRYPOINT ["longrope2"]
