# What serving needs and nothing else, in layers from the one that changes least to the one that changes with each
# release: the system, dependencies, code, a GPU's kernels. A release pushes the last two.
#
#   docker build -t teneral .                                        CPU, without torch: as `pip install teneral`
#   docker build -t teneral --build-arg EXTRAS=cuda13 .              CUDA 13 (torch then comes with its CUDA libraries)
#   docker build -t teneral --target direct --build-arg EXTRAS=cuda13-direct .    CUDA 13 without torch
#   docker build -t teneral --build-arg EXTRAS=ray .                 a node of Ray
#   docker build -t teneral --target lambda .                        for AWS Lambda
#   docker build -t teneral --target runpod --build-arg EXTRAS=runpod .    a worker of RunPod's queue
#
# Dependencies come as infra/image/lock/<extras>.txt pins them, with hashes; for other extras, as pyproject.toml allows.
# TORCH_INDEX is the index of a torch that no lock pins: one with its CPU builds, a tenth of the size, unless CUDA is
# wanted; a torch that brings CUDA's libraries unasked ends the build.
# Of them what nothing here imports is left out (docs/decisions/0054).
# The layer of dependencies has one time for all of its files: made again of the same packages, it is the one that the
# build's cache has.
# BASE is the base image; `scripts/build-images` names it by its digest.
ARG PYTHON=3.12
ARG BASE=python:${PYTHON}-slim-bookworm
FROM ${BASE} AS system
# tini is process 1: the kernel drops a SIGTERM for a process 1 that has no handler yet, which Python has only after its
# imports.
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
# The base image comes without the standard library's bytecode, and the container's user may not write any: half a second
# of each cold start.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin teneral \
 && { python -m compileall -qq -j 0 --invalidation-mode unchecked-hash "$(python -c 'import os; print(os.path.dirname(os.__file__))')" || true; }

# Of pyproject.toml what the image installs: a change of anything else there is no change of dependencies.
FROM system AS wanted
ARG EXTRAS=""
WORKDIR /lock
COPY pyproject.toml infra/image/dependencies.py ./
RUN python dependencies.py pyproject.toml "${EXTRAS}" >wanted.txt \
 && python dependencies.py pyproject.toml "${EXTRAS}" --torch >torch.txt \
 && rm pyproject.toml dependencies.py && touch -d @0 wanted.txt torch.txt .

FROM system AS dependencies
ARG EXTRAS=""
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY infra/image/base_pip.py /lock/
RUN python -m venv --without-pip /opt/teneral && cd /opt/teneral/lib/python*/site-packages \
 && echo /opt/teneral-code/lib >teneral-code.pth && install -m 0755 /lock/base_pip.py pip.py \
 && ln -s "$PWD/pip.py" /opt/teneral/bin/pip && ln -s pip /opt/teneral/bin/pip3
WORKDIR /lock
COPY --from=wanted /lock/ ./
COPY infra/image/lock ./lock
RUN locked="lock/${EXTRAS:-base}.txt"; if [ -s torch.txt ]; then if grep -qs "^torch==" "$locked"; then \
      if [ -n "${TORCH_INDEX}" ]; then echo "$locked pins torch: leave TORCH_INDEX out" >&2; exit 1; fi; \
    else \
      /opt/teneral/bin/pip install --no-compile ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} -r torch.txt \
      && case ",${EXTRAS}," in *cuda*) ;; *) if [ -e /opt/teneral/lib/python*/site-packages/nvidia ]; then \
           echo "torch came with CUDA's libraries: set TORCH_INDEX to an index of its CPU builds, or add cuda13 to EXTRAS" >&2; \
           exit 1; fi ;; esac; fi; fi
RUN locked="lock/${EXTRAS:-base}.txt"; if [ -f "$locked" ]; then \
      /opt/teneral/bin/pip install --no-compile --no-deps --require-hashes -r "$locked"; \
    else /opt/teneral/bin/pip install --no-compile -r wanted.txt; fi
# numpy's own tests, zstandard's second build, for Pythons that are not CPython, and what extension modules have for
# debuggers: 50 MB. Libraries that a wheel has in a folder of their own were rewritten when it was made, and stay.
# What torch ships for compiling against it and for testing it is more than a quarter of its size. NVRTC comes twice.
RUN cd /opt/teneral/lib/python*/site-packages && find numpy -name tests -type d -prune -exec rm -rf {} + \
 && rm -f zstandard/_cffi*.so \
 && rm -rf torch/include torch/share torch/test torch/bin/test_* torch/bin/protoc* nvidia/*/lib/libnvrtc*.alt.so* \
 && apt-get update && apt-get install -y --no-install-recommends binutils \
 && find . -name "*.cpython-*.so" -exec strip --strip-unneeded {} + && find . -name "*.abi3.so" -exec strip --strip-unneeded {} + \
 && apt-get purge -y --auto-remove binutils && rm -rf /var/lib/apt/lists/*
# Bytecode is compiled here, once: without it every cold start would compile its imports again.
RUN { /opt/teneral/bin/python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/teneral/lib || true; } \
 && { /opt/teneral/bin/pip check || true; } >check.txt && [ -s check.txt ] \
 && ! grep -vE "^No broken requirements|^tokenizers .* requires huggingface-hub, which is not installed" check.txt
# The bill of materials: these packages with their locked hashes, and Debian's.
COPY infra/image/sbom.py ./
RUN python sbom.py "lock/${EXTRAS:-base}.txt" --system \
      --installed "$(echo /opt/teneral/lib/python*/site-packages)" >/opt/teneral/sbom.cdx.json \
 && find /opt/teneral -exec touch -h -d @0 {} +

FROM dependencies AS code
# The commit that `teneral --version` names: the build's context has no git.
ARG COMMIT=""
WORKDIR /src
COPY . .
RUN if [ -n "${COMMIT}" ]; then echo "${COMMIT}" >src/teneral/COMMIT; fi \
 && /opt/teneral/bin/pip install --no-compile --no-deps --target /opt/teneral-code/lib . \
 && mv /opt/teneral-code/lib/bin /opt/teneral-code/bin \
 && { /opt/teneral/bin/python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/teneral-code/lib || true; } \
 && install -m 0644 infra/image/healthcheck.py /opt/teneral-code/healthcheck.py

FROM code AS kernels
ARG EXTRAS=""
# Those of a GPU, for the architectures that data centres have; this needs no GPU.
RUN mkdir -p /opt/teneral-kernels/gpu && case ",${EXTRAS}," in *cuda*) cd / \
 && /opt/teneral/bin/python -m teneral.loader.device.compile /opt/teneral-kernels/gpu 80 90 100 \
 && /opt/teneral/bin/python -m teneral.runtime.backends.cuda.direct.compile /opt/teneral-kernels/gpu 80 90 100 \
 && if [ -e /opt/teneral/lib/python*/site-packages/triton ]; then \
      /opt/teneral/bin/python -m teneral.runtime.backends.cuda.compile /opt/teneral-kernels/gpu; fi ;; esac \
 && find /opt/teneral-kernels -exec touch -h -d @0 {} +

FROM system AS serving
COPY --from=dependencies /opt/teneral /opt/teneral
COPY --from=code /opt/teneral-code /opt/teneral-code
COPY --from=kernels /opt/teneral-kernels /opt/teneral-kernels
# A container is reached from outside only: what a person's machine answers to itself alone is for all here.
ENV TENERAL_HOST=0.0.0.0
ENV PATH=/opt/teneral-code/bin:/opt/teneral/bin:$PATH TENERAL_KERNEL_DIR=/opt/teneral-kernels/gpu PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# SageMaker names a port only to images that say so.
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
# The one folder that is written to. A platform that mounts a volume there for a read-only root gives it to root, but
# where the image has one already (ECS on Fargate).
VOLUME /tmp
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "teneral"]
CMD ["serve"]

# Lambda asks nothing of a container: it has neither ports nor health checks, and its own process 1. A new entry point
# drops the command that came with the old one.
FROM serving AS lambda
HEALTHCHECK NONE
ENTRYPOINT ["teneral"]
CMD ["serve"]

# A worker takes jobs from a queue, and has no server.
FROM serving AS runpod
HEALTHCHECK NONE
ENV TENERAL_PLATFORM=runpod-queue

FROM serving AS listening
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["/opt/teneral/bin/python", "-IS", "/opt/teneral-code/healthcheck.py"]

# Without torch a GPU is not taken by itself: the server would compute on the CPU.
FROM listening AS direct
ENV TENERAL_BACKEND=direct

FROM listening AS server
