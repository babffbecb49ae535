"""Against a real S3 server: signatures, ranges, keys that need quoting, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import botocore.session
import pytest

from tests.fetchd.harness import Fetchd, file_bytes, write_index, write_model
from tests.seaweed import KEY, SECRET, seaweed
from thaw.errors import ModelNotFound
from thaw.ids import GroupId


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("weed"), "models") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def pushed(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_model(tmp_path_factory.mktemp("model") / "m", layer_bytes=6_000_000)
    write_index(model)
    client = botocore.session.get_session().create_client(
        "s3", endpoint_url=s3, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=SECRET
    )
    for path in model.iterdir():
        client.put_object(Bucket="models", Key=f"some dir/tiny+1/{path.name}", Body=path.read_bytes())
    client.close()
    return model


@pytest.fixture
def fetchd(s3: str, tmp_path: Path) -> Iterator[Fetchd]:
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    with Fetchd(tmp_path, THAW_S3_ENDPOINT=s3, THAW_FETCHD_READ_TIMEOUT_S=10, **keys) as running:
        yield running


def test_a_model_arrives_from_s3_with_signed_ranged_reads(fetchd: Fetchd, pushed: Path) -> None:
    facts = fetchd.client.inspect("s3://models/some dir/tiny+1")
    assert facts.verified
    door, reader = fetchd.open(fetchd.start(facts).segment_id)
    reader.wait(reader.n_bytes, 30)
    for name in facts.files:
        assert file_bytes(reader, facts, name) == (pushed / name).read_bytes()
    assert fetchd.client.wait(GroupId("g"), 0, deadline_s=5).events[-1].attrs["source"] == "s3"
    reader.close()
    door.close()


@pytest.mark.parametrize("uri", ["s3://models/absent", "s3://no-such-bucket/m"])
def test_a_missing_bucket_or_prefix_is_not_found(fetchd: Fetchd, pushed: Path, uri: str) -> None:
    with pytest.raises(ModelNotFound, match="holds no model"):
        fetchd.client.inspect(uri)


def test_a_wrong_secret_is_refused_with_a_hint_at_the_credentials(s3: str, pushed: Path, tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": "wrong"}
    with Fetchd(tmp_path, THAW_S3_ENDPOINT=s3, **keys) as fetchd, pytest.raises(ModelNotFound) as caught:
        fetchd.client.inspect("s3://models/some dir/tiny+1")
    assert "credentials" in caught.value.hint
