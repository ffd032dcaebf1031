# docker build -t moe-fast . ; docs/server.md has the command that runs it.
# "devel", since Triton compiles a launcher in C for each kernel.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev gcc curl \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 moe

WORKDIR /app
COPY --chown=moe . .
RUN python3 -m venv /opt/moe \
    && /opt/moe/bin/pip install --no-cache-dir --constraint constraints.txt --editable '.[serve]'

USER moe
ENV PATH=/opt/moe/bin:$PATH PYTHONUNBUFFERED=1
EXPOSE 8000
# Large checkpoints take minutes to load and to compile.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m \
    CMD curl --fail --silent http://127.0.0.1:8000/health || exit 1
# Other hosts can reach it: MOE_FAST_API_KEY must be set.
ENTRYPOINT ["python", "serve.py", "--host", "0.0.0.0"]
