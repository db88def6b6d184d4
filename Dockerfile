# One file, one target a service: coordinator, weights, reward, trainer, rollout. `docker compose build` builds them all.
#
# Layers from what changes least to what changes most: Python, dependencies (read from the pyproject files alone), code.
# Only trainer and rollout carry torch. A named build context `wheels` may hold wheels that pip shall prefer, e.g. a CPU
# build of torch: `WHEELS=/path/to/wheels docker compose build`; without one pip takes what its index offers.

# Overridden by the build context of the same name.
FROM scratch AS wheels

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/rlharvest && \
    useradd --uid 10001 --user-group --create-home rlharvest && \
    install -d -o rlharvest -g rlharvest /data /checkpoints /weights /workspace && \
    for holder in coordinator trainer weights reward rollout nats valkey postgres; do \
        install -d -o rlharvest -g rlharvest /secrets/$holder; done
ENV PATH=/opt/rlharvest/bin:$PATH \
    RLHARVEST_DATA_DIR=/data RLHARVEST_HEALTH_HOST=0.0.0.0 RLHARVEST_HEALTH_PORT=8081 RLHARVEST_LOG_FORMAT=json
WORKDIR /build
COPY deploy/requirements.py constraints.txt ./
COPY libs/rlharvest/pyproject.toml libs/rlharvest/
RUN --mount=type=cache,target=/root/.cache/pip \
    python requirements.py libs/rlharvest > requirements.txt && \
    pip install --quiet -c constraints.txt -r requirements.txt hatchling

# Coordinator and reward service have a dependency that comes as C source; the compiler stays in these stages.
FROM base AS compiler
RUN apt-get update -qq && \
    apt-get install -y -qq --no-install-recommends gcc libc6-dev python3-dev > /dev/null && rm -rf /var/lib/apt/lists/*

FROM compiler AS coordinator-build
COPY services/coordinator/pyproject.toml services/coordinator/
RUN --mount=type=cache,target=/root/.cache/pip \
    python requirements.py services/coordinator > requirements.txt && pip install --quiet -c constraints.txt -r requirements.txt

FROM compiler AS reward-build
COPY services/reward/pyproject.toml services/reward/
RUN --mount=type=cache,target=/root/.cache/pip \
    python requirements.py services/reward > requirements.txt && pip install --quiet -c constraints.txt -r requirements.txt

# Each service: its dependencies first, then the shared library and itself.
FROM base AS coordinator-dependencies
COPY --from=coordinator-build /opt/rlharvest /opt/rlharvest

FROM base AS reward-dependencies
COPY --from=reward-build /opt/rlharvest /opt/rlharvest

FROM base AS weights-dependencies
COPY services/weights/pyproject.toml services/weights/
RUN --mount=type=cache,target=/root/.cache/pip \
    python requirements.py services/weights > requirements.txt && pip install --quiet -c constraints.txt -r requirements.txt

FROM base AS torch-dependencies
COPY services/trainer/pyproject.toml services/trainer/
COPY services/rollout/pyproject.toml services/rollout/
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=wheels,target=/wheels \
    python requirements.py services/trainer services/rollout > requirements.txt && \
    pip install --quiet --find-links /wheels -c constraints.txt -r requirements.txt

FROM coordinator-dependencies AS coordinator
COPY libs/rlharvest libs/rlharvest
COPY services/coordinator services/coordinator
RUN pip install --quiet --no-deps --no-build-isolation ./libs/rlharvest ./services/coordinator
USER rlharvest
WORKDIR /workspace
ENTRYPOINT ["rlharvest-coordinator"]
CMD ["serve"]

FROM weights-dependencies AS weights
COPY libs/rlharvest libs/rlharvest
COPY services/weights services/weights
RUN pip install --quiet --no-deps --no-build-isolation ./libs/rlharvest ./services/weights
USER rlharvest
WORKDIR /workspace
ENTRYPOINT ["rlharvest-weights"]
CMD ["serve"]

FROM reward-dependencies AS reward
COPY libs/rlharvest libs/rlharvest
COPY services/reward services/reward
RUN pip install --quiet --no-deps --no-build-isolation ./libs/rlharvest ./services/reward
USER rlharvest
WORKDIR /workspace
ENTRYPOINT ["rlharvest-reward"]
CMD ["serve"]

FROM torch-dependencies AS trainer
COPY libs/rlharvest libs/rlharvest
COPY services/trainer services/trainer
RUN pip install --quiet --no-deps --no-build-isolation ./libs/rlharvest ./services/trainer
USER rlharvest
WORKDIR /workspace
ENTRYPOINT ["rlharvest-trainer"]
CMD ["serve"]

FROM torch-dependencies AS rollout
COPY libs/rlharvest libs/rlharvest
COPY services/rollout services/rollout
RUN pip install --quiet --no-deps --no-build-isolation ./libs/rlharvest ./services/rollout
USER rlharvest
WORKDIR /workspace
ENTRYPOINT ["rlharvest-rollout"]
CMD ["serve"]
