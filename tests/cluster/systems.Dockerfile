# A small system with the Python of its distribution, and nothing of ours: SUITE of MIRROR.
FROM localhost/python:3.11 AS made
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends mmdebstrap >/dev/null
ARG SUITE
ARG MIRROR
RUN mmdebstrap --mode=root --variant=essential --include=python3 --quiet "$SUITE" /image \
    "deb [trusted=yes] $MIRROR $SUITE main" \
 && rm -rf /image/var/lib/apt/lists /image/var/cache/apt /image/usr/share/doc

FROM scratch
COPY --from=made /image /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
