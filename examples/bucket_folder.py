"""A folder of an S3 bucket in a pod, and its results back in the bucket.

The server is moto, on this machine: `pip install 'kubetorch[object-storage]' 'moto[server]'`. For a
cluster, `MOTO_HOST` is the address at which it reaches this machine, and `kt install --set
buckets.allowedNetworks={ADDRESS/32}` lets its controller go there.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import kubetorch as kt

# A bucket of the internet needs no such word; this one has an address of the machine.
os.environ.setdefault("KT_BUCKET_NETWORKS", "127.0.0.1/32")


def count() -> int:
    """Count the words of a corpus, with the credentials that the pod has from its secret."""
    kt.get("s3://shelf/corpus", "corpus", contents=True)
    words = [word for file in Path("corpus").iterdir() for word in file.read_text().split()]
    Path("words.json").write_text(json.dumps(sorted(set(words))))
    kt.put("s3://shelf/results/words.json", "words.json")
    return len(words)


def main(bucket, endpoint: str) -> None:
    bucket.create_bucket(Bucket="shelf")
    bucket.put_object(Bucket="shelf", Key="corpus/a.txt", Body=b"to be or not")
    bucket.put_object(Bucket="shelf", Key="corpus/b.txt", Body=b"to be")
    values = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}
    secret = kt.Secret("shelf", values={**values, "AWS_ENDPOINT_URL": endpoint}, override=True)

    remote = kt.fn(count).to(kt.Compute(cpus="0.1", secrets=[secret]))
    print("words:", remote())

    kt.get("s3://shelf/results/words.json", "words.json", secret=secret)
    print("different ones:", json.loads(Path("words.json").read_text()))
    print("in the store:", [row["name"] for row in kt.ls("s3://shelf")])
    remote.teardown()


if __name__ == "__main__":
    if find_spec("moto") is None or find_spec("obstore") is None:
        sys.exit("this example needs: pip install 'kubetorch[object-storage]' 'moto[server]'")
    import boto3
    from moto.server import ThreadedMotoServer

    host = os.environ.get("MOTO_HOST", "127.0.0.1")
    server = ThreadedMotoServer(ip_address=host, port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"aws_access_key_id": "me", "aws_secret_access_key": "mine"}
    main(boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys), endpoint)
    server.stop()
