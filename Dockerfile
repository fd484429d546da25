# casewise as a service or a batch job: non-root, weights mounted, nothing downloaded at run time.
#
#   docker build -t casewise .                                                                     CPU
#   docker build -t casewise:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 . CUDA
#
# Everything that needs a network happens while building. Run with --network none for batch jobs, and without any
# route to the outside for the service; see docs/how-to/containers.md.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=adapt,nnunet,serve
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/casewise
WORKDIR /build
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
COPY packaging packaging
# torch first, from the index that decides CPU or CUDA; the rest must not replace it.
RUN /opt/casewise/bin/pip install --index-url "${TORCH_INDEX}" torch \
 && /opt/casewise/bin/pip freeze | grep '^torch==' > /build/torch.txt \
 && grep -v '^torch==' constraints.txt > /build/rest.txt \
 && /opt/casewise/bin/pip install -c /build/torch.txt -c /build/rest.txt ".[${EXTRAS}]"

FROM python:${PYTHON}-slim-bookworm
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin casewise \
 && mkdir -p /models /data /out \
 && chown casewise:casewise /out
COPY --from=build /opt/casewise /opt/casewise
ENV PATH=/opt/casewise/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 \
    TRANSFORMERS_OFFLINE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    DO_NOT_TRACK=1 \
    MPLCONFIGDIR=/tmp/matplotlib
USER 10001:10001
WORKDIR /out
VOLUME ["/models", "/data", "/out"]
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s --retries=3 \
  CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/health/ready'); raise SystemExit(c.getresponse().status != 200)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["casewise"]
CMD ["--help"]
