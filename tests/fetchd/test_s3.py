"""Tests with a real S3 server: signatures, ranges, keys that need quoting, refusals, and every kind of credentials.

The credentials are tried with all users of S3 (fetchd's reader, the object transport, the command line), because one
module finds the credentials for all of them.
"""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from fetchd.settings import FetchdSettings
from fetchd.sources import s3 as fetchd_s3
from fetchd.sources.registry import open_source
from relay.protocol.frames import FrameHeader, FrameKind
from relay.protocol.messages import GroupCredential, GroupLink
from relay.transports.connect import connect
from tests.aws_roles import Roles, serve_roles
from tests.conftest import free_port
from tests.fetchd.harness import Fetchd, file_bytes, wait_until, write_index, write_model
from tests.seaweed import KEY, ROLE, SECRET, seaweed, session_credentials
from thaw.cli.model_stores import s3 as cli_s3
from thaw.cli.model_stores.stores import open_store
from thaw.errors import ModelNotFound, PlatformError, StoreUnavailable, ThawError
from thaw.ids import GroupId, random_hex_id
from thaw.plan import TransportKind
from thaw.s3 import S3Access
from thaw.settings import load

pytestmark = pytest.mark.usefixtures("pushed")


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
    descriptors, reader = fetchd.open(fetchd.start(facts).segment_id)
    reader.wait(reader.n_bytes, 30)
    for name in facts.files:
        assert file_bytes(reader, facts, name) == (pushed / name).read_bytes()
    assert fetchd.client.wait(GroupId("g"), 0, deadline_s=20).events[-1].attrs["source"] == "s3"
    reader.close()
    descriptors.close()


@pytest.mark.parametrize("uri", ["s3://models/absent", "s3://no-such-bucket/m"])
def test_a_missing_bucket_or_prefix_is_not_found(fetchd: Fetchd, pushed: Path, uri: str) -> None:
    with pytest.raises(ModelNotFound, match="holds no model"):
        fetchd.client.inspect(uri)


def test_a_wrong_secret_is_refused_with_a_hint_at_the_credentials(s3: str, pushed: Path, tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": "wrong"}
    with Fetchd(tmp_path, THAW_S3_ENDPOINT=s3, **keys) as fetchd, pytest.raises(ModelNotFound) as caught:
        fetchd.client.inspect("s3://models/some dir/tiny+1")
    assert "check uri and credentials; THAW_FETCHD_OWN_STORE" in caught.value.hint


# ── credentials ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An environment without credentials, and without a metadata server that could give an instance's credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, file in (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")):
        monkeypatch.setenv(name, str(tmp_path / file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("THAW_STATE_DIR", str(tmp_path / "no-platform"))
    fetchd_s3._access.cache_clear()
    yield monkeypatch
    fetchd_s3._access.cache_clear()


@pytest.fixture
def roles(s3: str) -> Iterator[Roles]:
    with serve_roles(session_credentials(s3)) as serving:
        yield serving


def use_session(shell: pytest.MonkeyPatch, s3: str, roles: Roles, tmp_path: Path) -> None:
    shell.setenv("AWS_ACCESS_KEY_ID", roles.hands["AccessKeyId"])
    shell.setenv("AWS_SECRET_ACCESS_KEY", roles.hands["SecretAccessKey"])
    shell.setenv("AWS_SESSION_TOKEN", roles.hands["SessionToken"])


def use_profile(shell: pytest.MonkeyPatch, s3: str, roles: Roles, tmp_path: Path) -> None:
    keys = f"aws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n"
    (tmp_path / "credentials").write_text(f"[default]\naws_access_key_id=x\naws_secret_access_key=y\n[mine]\n{keys}")
    shell.setenv("AWS_PROFILE", "mine")


def use_profile_that_takes_a_role(shell: pytest.MonkeyPatch, s3: str, roles: Roles, tmp_path: Path) -> None:
    """Use a profile that gets a role's credentials from the server's own STS."""
    use_profile(shell, s3, roles, tmp_path)
    (tmp_path / "config").write_text(f"[profile reader]\nrole_arn={ROLE}\nsource_profile=mine\n")
    shell.setenv("AWS_PROFILE", "reader")
    shell.setenv("AWS_ENDPOINT_URL_STS", s3)


def use_web_identity(shell: pytest.MonkeyPatch, s3: str, roles: Roles, tmp_path: Path) -> None:
    (tmp_path / "web-identity").write_text("a signed token")
    shell.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "web-identity"))
    shell.setenv("AWS_ROLE_ARN", ROLE)
    shell.setenv("AWS_ENDPOINT_URL_STS", roles.endpoint)


def use_instance(shell: pytest.MonkeyPatch, s3: str, roles: Roles, tmp_path: Path) -> None:
    shell.delenv("AWS_EC2_METADATA_DISABLED")
    shell.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", roles.endpoint)


KINDS = [use_session, use_profile, use_profile_that_takes_a_role, use_web_identity, use_instance]


def settings() -> FetchdSettings:
    return load(FetchdSettings, {"THAW_FETCHD_SOCKET": "", "THAW_FETCHD_DOORS": "", **dict(os.environ)})


def fetch() -> object:
    """Read from the store as fetchd does."""
    connection = open_source("s3://models/some dir/tiny+1", settings()).connect()
    try:
        return connection.stat("config.json")
    finally:
        connection.close()


def push() -> object:
    """Write to the store as the command line does."""
    store = open_store("s3://models/pushed")
    store.write("a", b"content")
    return b"".join(store.read("a")) == b"content" or None


def relay(deadline_s: float = 10.0) -> object:
    """Send a message from one stage to another through the store."""
    link, group_id = GroupLink(TransportKind.OBJECT, "s3://models/relay", GroupCredential("", "s")), random_hex_id()
    stages = [connect(link, GroupId(group_id), k, 2) for k in (0, 1)]
    try:
        stages[0].send(1, FrameHeader(FrameKind.CONTROL), b"hello", deadline_s=deadline_s)
        return stages[1].receive(deadline_s=deadline_s)
    finally:
        for stage in stages:
            stage.close()


@pytest.mark.parametrize("use", KINDS)
def test_all_who_speak_s3_find_every_kind_of_credentials(
    use: Callable[..., None], shell: pytest.MonkeyPatch, s3: str, roles: Roles, pushed: Path, tmp_path: Path
) -> None:
    shell.setenv("THAW_S3_ENDPOINT", s3)
    use(shell, s3, roles, tmp_path)
    for speak in (fetch, push, relay):
        assert speak()


def test_fetchd_asks_for_its_role_when_it_starts_and_reads_with_it(
    shell: pytest.MonkeyPatch, s3: str, roles: Roles, pushed: Path, tmp_path: Path
) -> None:
    use_web_identity(shell, s3, roles, tmp_path)
    with Fetchd(tmp_path, THAW_S3_ENDPOINT=s3, THAW_FETCHD_READ_TIMEOUT_S=10) as running:
        wait_until(lambda: roles.n_handed == 1)
        facts = running.client.inspect("s3://models/some dir/tiny+1")
        descriptors, reader = running.open(running.start(facts).segment_id)
        reader.wait(reader.n_bytes, 30)
        reader.close()
        descriptors.close()
    assert roles.n_handed == 1


def test_credentials_that_expire_soon_are_renewed_before_they_are_used(
    shell: pytest.MonkeyPatch, s3: str, roles: Roles, pushed: Path, tmp_path: Path
) -> None:
    shell.setenv("THAW_S3_ENDPOINT", s3)
    use_web_identity(shell, s3, roles, tmp_path)
    roles.lasts_s = 300.0  # botocore renews credentials that last less than ten minutes
    source = open_source("s3://models/some dir/tiny+1", settings())
    connection = source.connect()
    assert connection.stat("config.json")
    roles.hands, roles.lasts_s = session_credentials(s3), 3600.0  # the old credentials must not be used any more
    assert roles.hands["AccessKeyId"] in signed(source)
    assert connection.stat("config.json")
    connection.close()


def test_an_instances_credentials_are_renewed_when_their_time_has_come(
    shell: pytest.MonkeyPatch, s3: str, roles: Roles, pushed: Path, tmp_path: Path
) -> None:
    shell.setenv("THAW_S3_ENDPOINT", s3)
    use_instance(shell, s3, roles, tmp_path)
    source: Any = open_source("s3://models/some dir/tiny+1", settings())
    assert roles.hands["AccessKeyId"] in signed(source)
    roles.hands, roles.lasts_s = session_credentials(s3), 4 * 3600.0
    assert roles.hands["AccessKeyId"] not in signed(source)
    in_an_hour = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    shell.setattr(source.sign.__self__._credentials, "_time_fetcher", lambda: in_an_hour)
    assert roles.hands["AccessKeyId"] in signed(source)
    assert roles.n_handed == 2


def signed(source: Any) -> str:
    """The Authorization header of a request."""
    return str(source.sign("GET", f"{source.base_url}/x", {})["Authorization"])


def relay_in_vain() -> object:
    return relay(deadline_s=0.2)


SECRETS = ("the-secret-key", "the-session-token")


def speak_to_a_store_that_repeats_the_token(shell: pytest.MonkeyPatch, roles: Roles, tmp_path: Path) -> None:
    shell.setenv("THAW_S3_ENDPOINT", roles.endpoint)
    shell.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    shell.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[0])
    shell.setenv("AWS_SESSION_TOKEN", SECRETS[1])


def speak_as_a_program_says_that_fails_and_repeats_the_token(
    shell: pytest.MonkeyPatch, roles: Roles, tmp_path: Path
) -> None:
    shell.setenv("THAW_S3_ENDPOINT", roles.endpoint)
    command = f"sh -c 'echo {SECRETS[0]} {SECRETS[1]} >&2; exit 1'"
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {command}\n")


@pytest.mark.parametrize("speak", [fetch, push, relay_in_vain])
@pytest.mark.parametrize(
    "prepare", [speak_to_a_store_that_repeats_the_token, speak_as_a_program_says_that_fails_and_repeats_the_token]
)
def test_no_error_repeats_a_secret(
    prepare: Callable[..., None], speak: Callable[[], object], shell: pytest.MonkeyPatch, roles: Roles, tmp_path: Path
) -> None:
    prepare(shell, roles, tmp_path)
    with pytest.raises(ThawError) as caught:
        speak()
    told = "".join(traceback.format_exception(caught.value))
    assert not [secret for secret in SECRETS if secret in told]


@pytest.mark.parametrize("speak", [fetch, push, relay_in_vain])
def test_a_profile_that_does_not_exist_is_named(
    speak: Callable[[], object], shell: pytest.MonkeyPatch, s3: str
) -> None:
    shell.setenv("THAW_S3_ENDPOINT", s3)
    shell.setenv("AWS_PROFILE", "of-nobody")
    with pytest.raises(PlatformError, match="of-nobody"):
        speak()


def test_fetchd_says_when_it_starts_that_it_cannot_have_its_credentials_and_serves_others(
    shell: pytest.MonkeyPatch, s3: str, tmp_path: Path
) -> None:
    shell.setenv("AWS_PROFILE", "of-nobody")
    model = write_model(tmp_path / "local")
    with Fetchd(tmp_path, THAW_S3_ENDPOINT=s3) as running:
        assert running.client.inspect(model.as_uri()).n_bytes
        said = [e["error"] for e in running.events if e["event"] == "s3_credentials_missing"]
    assert said == ["the credentials for S3 cannot be had: The config profile (of-nobody) could not be found"]


def test_a_role_that_cannot_be_had_now_may_be_had_later(
    shell: pytest.MonkeyPatch, s3: str, roles: Roles, tmp_path: Path
) -> None:
    shell.setenv("THAW_S3_ENDPOINT", s3)
    use_web_identity(shell, s3, roles, tmp_path)
    (tmp_path / "web-identity").rename(tmp_path / "not-mounted-yet")
    with pytest.raises(StoreUnavailable, match=r"web-identity: No such file"):
        fetch()
    (tmp_path / "not-mounted-yet").rename(tmp_path / "web-identity")
    assert fetch()


def test_a_role_whose_service_is_away_may_be_had_later(
    shell: pytest.MonkeyPatch, s3: str, roles: Roles, tmp_path: Path
) -> None:
    shell.setenv("THAW_S3_ENDPOINT", s3)
    use_web_identity(shell, s3, roles, tmp_path)
    shell.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StoreUnavailable, match="Could not connect to the endpoint URL"):
        S3Access.from_environment(os.environ).prepare()


def test_a_platforms_own_store_is_used_whatever_the_shell_says_of_aws(shell: pytest.MonkeyPatch, s3: str) -> None:
    shell.setenv("AWS_PROFILE", "of-nobody")
    shell.setenv("AWS_ACCESS_KEY_ID", "of another store")
    shell.setenv("AWS_SESSION_TOKEN", "of another store")
    shell.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    own = {"THAW_S3_ENDPOINT": s3, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    client = cli_s3.client(own)
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["models"]
    client.close()
