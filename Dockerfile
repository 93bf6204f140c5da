FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md ./
COPY vkjobs vkjobs
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir ".[flower]"

FROM python:3.13-slim
RUN useradd --uid 10001 --home-dir /app --no-create-home vkjobs
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH
# Celery finds celeryconfig.py, and the modules a deployment adds, in its working directory.
WORKDIR /app
COPY celeryconfig.py ./
# By number, so that Kubernetes can see that it is not root.
USER 10001
STOPSIGNAL SIGTERM
CMD ["celery", "-A", "vkjobs", "worker", "-B"]
