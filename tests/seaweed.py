"""A real S3 server for tests: one SeaweedFS process, which is killed and swept when the block is left."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import botocore.session

from thaw.dev.ports import free_ports

KEY, SECRET = "thaw-test-key", "thaw-test-secret"
ROLE = "arn:aws:iam::000000000000:role/reader"
_MAY_ALL = {"Effect": "Allow", "Action": ["s3:*", "sts:*"], "Resource": ["arn:aws:s3:::*", "arn:aws:s3:::*/*"]}
_MAY_TAKE = {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": ["sts:AssumeRole"]}
_IAM = {
    "sts": {
        "tokenDuration": "1h",
        "maxSessionLength": "12h",
        "issuer": "test",
        "signingKey": base64.b64encode(b"k" * 32).decode(),
    },
    "policy": {"defaultEffect": "Deny", "storeType": "memory"},
    "policies": [{"name": "all", "document": {"Version": "2012-10-17", "Statement": [_MAY_ALL]}}],
    "roles": [
        {
            "roleName": "reader",
            "roleArn": ROLE,
            "attachedPolicies": ["all"],
            "trustPolicy": {"Version": "2012-10-17", "Statement": [_MAY_TAKE]},
        }
    ],
}
"""The server has a real STS too: a client with the key may take the role, and the server checks the session's token."""


@contextmanager
def seaweed(directory: Path, bucket: str) -> Iterator[str]:
    """Yield the server's endpoint.  ``bucket`` exists and takes objects."""
    identity = {"name": "t", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (directory / "iam.json").write_text(json.dumps(_IAM))
    ports = dict(zip(("s3.port", "master.port", "volume.port", "filer.port"), free_ports(4), strict=True))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                Path(sys.executable).parent / "weed",
                "-logtostderr=true",  # else it leaves logs in /tmp
                "server",
                f"-dir={directory}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                "-s3",
                f"-s3.config={directory / 's3.json'}",
                f"-s3.iam.config={directory / 'iam.json'}",
                "-master.telemetry=false",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                "-volume.max=8",
                "-master.volumeSizeLimitMB=64",
                *(f"-{name}={port}" for name, port in ports.items()),
            ],
            stdout=log,
            stderr=log,
        )
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    try:
        _make_bucket(endpoint, bucket)
        yield endpoint
    finally:
        process.kill()  # after SIGTERM it would take 20 s to end
        process.wait(10)
        for name, port in ports.items():  # it leaves these sockets when it is killed
            role = name.partition(".")[0]
            for left in (f"{role}-{port}", f"{role}-grpc-{port + 10_000}"):
                Path(f"/tmp/seaweedfs-{left}.sock").unlink(missing_ok=True)


def session_credentials(endpoint: str) -> dict[str, str]:
    """AccessKeyId, SecretAccessKey and SessionToken of the role, from the server's own STS."""
    client = botocore.session.get_session().create_client(
        "sts", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=SECRET
    )
    found = client.assume_role(RoleArn=ROLE, RoleSessionName="test")["Credentials"]
    client.close()
    return {name: found[name] for name in ("AccessKeyId", "SecretAccessKey", "SessionToken")}


def _make_bucket(endpoint: str, bucket: str) -> None:
    """Make the bucket.  Try several times, because the S3 port opens before the store can take a bucket."""
    client = botocore.session.get_session().create_client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=SECRET
    )
    deadline, retry = time.monotonic() + 60, threading.Event()
    while True:
        try:
            client.create_bucket(Bucket=bucket)
            client.put_object(Bucket=bucket, Key="probe", Body=b"x")
            break
        except Exception:  # noqa: BLE001  while it starts, it refuses, resets, or answers 500
            assert time.monotonic() < deadline
            retry.wait(0.1)
    client.close()
