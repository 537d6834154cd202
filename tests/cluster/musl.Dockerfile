# An image of another C library, as Alpine's, without Python.
FROM localhost/python:3.11 AS made
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends busybox-static musl >/dev/null
RUN mkdir -p /image/bin /image/lib /image/tmp && chmod 1777 /image/tmp \
 && cp /bin/busybox /image/bin/busybox && cp -L /lib/ld-musl-*.so.1 /image/lib/ \
 && for name in cat ls mkdir sh; do ln -s busybox "/image/bin/$name"; done

FROM scratch
COPY --from=made /image /
ENV PATH=/bin
