# syntax=docker/dockerfile:1
# What serving needs and nothing else: a virtual environment made in one stage, copied into a slim image in the next.
#
#   docker build -t teneral .                                        CPU, without torch
#   docker build -t teneral --build-arg EXTRAS=cuda13 .              CUDA 13 (torch then comes with its CUDA libraries)
#
# TORCH_INDEX may name an index with CPU builds of torch, which are a tenth of the size: PIP_EXTRA_INDEX_URL takes it.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS build
ARG EXTRAS=""
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_EXTRA_INDEX_URL=${TORCH_INDEX}
RUN python -m venv /opt/teneral
WORKDIR /src
COPY pyproject.toml setup.py build_native.py README.md LICENSE ./
COPY native native
COPY src src
COPY loader loader
COPY runtime runtime
COPY handlers handlers
COPY infra infra
# Bytecode is compiled here, once: without it every cold start would compile torch again, which takes three times as long as importing it.
# What torch ships for compiling against it and for testing it is left out: more than a quarter of its size.
RUN /opt/teneral/bin/pip install --no-compile ".${EXTRAS:+[${EXTRAS}]}" \
 && torch="$(echo /opt/teneral/lib/python*/site-packages/torch)" \
 && rm -rf "$torch/include" "$torch/share" "$torch/test" "$torch"/bin/test_* "$torch"/bin/protoc* \
 && { /opt/teneral/bin/python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/teneral/lib || true; }
# Those of a GPU, for the architectures that data centres have; this needs no GPU.
RUN mkdir /opt/teneral/gpu && case ",${EXTRAS}," in *cuda*) cd / \
 && /opt/teneral/bin/python -m teneral.loader.device.compile /opt/teneral/gpu 80 90 100 \
 && /opt/teneral/bin/python -m teneral.runtime.cuda.compile /opt/teneral/gpu ;; esac

FROM python:${PYTHON}-slim-bookworm
# The base image comes without the standard library's bytecode, and who runs this may not write any: half a second a cold start.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin teneral \
 && { python -m compileall -qq -j 0 --invalidation-mode unchecked-hash "$(python -c 'import os; print(os.path.dirname(os.__file__))')" || true; }
COPY --from=build /opt/teneral /opt/teneral
ENV PATH=/opt/teneral/bin:$PATH TENERAL_KERNEL_DIR=/opt/teneral/gpu PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# SageMaker names a port only to images that say so.
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["teneral"]
CMD ["serve"]
