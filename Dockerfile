# The plugin beside a release of vLLM, for a host with NVIDIA GPUs (docs/set-up-a-host.md, "Run in a container"):
#
#   docker build --build-arg VLLM_VERSION=v0.26.0 --tag slmserve .
#   docker run --rm --gpus all --ipc host --volume "$PWD:/work" slmserve
ARG VLLM_IMAGE=vllm/vllm-openai
ARG VLLM_VERSION=v0.26.0
FROM ${VLLM_IMAGE}:${VLLM_VERSION}

# What the wheel is built from, and nothing else of the checkout.
WORKDIR /source
COPY LICENSE README.md pyproject.toml ./
COPY benchmarks/__init__.py benchmarks/test_*.py benchmarks/
COPY pytest_slmserve pytest_slmserve
RUN python3 -m pip install --no-cache-dir --break-system-packages .

# Records and pages are written here: mount a folder of the host.
WORKDIR /work
# The image's own entry point starts a server.
ENTRYPOINT []
CMD ["pytest", "--pyargs", "pytest_slmserve.benchmarks", "--slm-gpu"]
