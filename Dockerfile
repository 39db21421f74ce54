# One image for all commands of `baton` (deploy/docs/commands.md); without one it is `serve`.
# No C is compiled: every dependency is a wheel, pinned by hash. It runs as a user without rights, on a read-only root.

FROM python:3.11-slim-bookworm AS build
# `docker buildx build --sbom=true --provenance=mode=max` lists what this stage brings as well.
ARG BUILDKIT_SBOM_SCAN_STAGE=true
# --build-arg REQUIREMENTS=requirements-extras.txt adds the libraries for Azure, Bedrock, Vertex, S3, KMS and RFC 3161 time stamps.
ARG REQUIREMENTS=requirements.txt
WORKDIR /opt/baton
COPY requirements.txt requirements-extras.txt ./
RUN python -m venv /opt/venv \
 && /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --only-binary=:all: --require-hashes -r "${REQUIREMENTS}"
COPY pyproject.toml LICENSE ./
COPY app ./app
COPY migrations ./migrations
# Installed in place, because the migrations lie next to the package; compiled now, because the root is read-only later.
RUN /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation -e . \
 && /opt/venv/bin/python -m compileall -q /opt/venv/lib app migrations \
 && /opt/venv/bin/python -m pip uninstall --yes --quiet setuptools pip

FROM python:3.11-slim-bookworm
# Given by whoever builds: --build-arg REVISION=$(git rev-parse HEAD) --build-arg VERSION=... --build-arg CREATED=$(date -u +%FT%TZ)
ARG VERSION=""
ARG REVISION=""
ARG CREATED=""
LABEL org.opencontainers.image.title="Baton" \
      org.opencontainers.image.description="A self-hosted orchestration API behind an OpenAI-compatible endpoint." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
RUN groupadd --gid 10001 baton \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin baton \
 && install -d -o baton -g baton -m 0700 /var/lib/baton
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    BATON_HOST=0.0.0.0 \
    BATON_PORT=8080 \
    BATON_DATA_DIR=/var/lib/baton \
    BATON_REVISION=${REVISION}
WORKDIR /var/lib/baton
USER 10001:10001
VOLUME /var/lib/baton
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["/opt/venv/bin/python", "-I", "-m", "app", "probe"]
ENTRYPOINT ["/opt/venv/bin/python", "-I", "-m", "app"]
CMD ["serve"]
