"""Tests with a real S3 server: signatures, ranges, keys that need quoting, refusals, and every kind of credentials.

The credentials are tried with all users of S3 (fetchd's reader, the object transport, the command line), because one
module finds the credentials for all of them.
"""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from tests.fetchd.harness import Fetchd, wait_until, write_index, write_model
from tests.seaweed import KEY, ROLE, SECRET, seaweed, session_credentials
from thaw.cli.model_stores import s3 as cli_s3
from thaw.cli.model_stores.stores import open_store
from thaw.errors import ModelNotFound, PlatformError, StoreUnavailable, ThawError
from thaw.ids import GroupId, random_hex_id
from thaw.plan import TransportKind
from thaw.s3 import S3Access
from thaw.settings import load

pytestmark = pytest.mark.usefixtures("pushed")
MODEL = "s3://models/some dir/tiny+1"
KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("weed"), "models") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def pushed(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_index(write_model(tmp_path_factory.mktemp("model") / "m", layer_bytes=6_000_000))
    client = botocore.session.get_session().create_client(
        "s3", endpoint_url=s3, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=SECRET
    )
    for path in model.iterdir():
        client.put_object(Bucket="models", Key=f"some dir/tiny+1/{path.name}", Body=path.read_bytes())
    client.close()
    return model


@pytest.fixture
def fetchd(s3: str, tmp_path: Path) -> Iterator[Fetchd]:
    with Fetchd(
        tmp_path, THAW_S3_ENDPOINT=s3, THAW_FETCHD_READ_TIMEOUT_S=10, AWS_REGION="us-east-1", **KEYS
    ) as running:
        yield running


def test_a_model_arrives_from_s3_with_signed_ranged_reads(fetchd: Fetchd, pushed: Path) -> None:
    facts = fetchd.client.inspect(MODEL)
    assert facts.verified
    assert fetchd.files(facts) == {name: (pushed / name).read_bytes() for name in facts.files}
    assert fetchd.wait().events[-1].attrs["source"] == "s3"


@pytest.mark.parametrize("uri", ["s3://models/absent", "s3://no-such-bucket/m"])
def test_a_missing_bucket_or_prefix_is_not_found(fetchd: Fetchd, pushed: Path, uri: str) -> None:
    with pytest.raises(ModelNotFound, match="holds no model"):
        fetchd.client.inspect(uri)


def test_a_wrong_secret_is_refused_with_a_hint_at_the_credentials(s3: str, pushed: Path, tmp_path: Path) -> None:
    wrong = {**KEYS, "AWS_SECRET_ACCESS_KEY": "wrong"}
    with Fetchd(tmp_path, THAW_S3_ENDPOINT=s3, **wrong) as fetchd, pytest.raises(ModelNotFound) as caught:
        fetchd.client.inspect(MODEL)
    assert "check uri and credentials; THAW_FETCHD_OWN_STORE" in caught.value.hint


# ── credentials ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Shell:
    """An environment without credentials, and without a metadata server that could give an instance's credentials.

    The directory has the files of the AWS command line, and ``roles`` gives a role's credentials.
    """

    patch: pytest.MonkeyPatch
    directory: Path
    s3: str
    roles: Roles

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, value)

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        return path


@pytest.fixture
def shell(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    fetchd_s3._access.cache_clear()
    with serve_roles(session_credentials(s3)) as roles:
        made = Shell(monkeypatch, tmp_path, s3, roles)
        made.set(THAW_S3_ENDPOINT=s3, THAW_STATE_DIR=str(tmp_path / "no-platform"), AWS_EC2_METADATA_DISABLED="true")
        made.set(AWS_CONFIG_FILE=f"{tmp_path}/config", AWS_SHARED_CREDENTIALS_FILE=f"{tmp_path}/credentials")
        yield made
    fetchd_s3._access.cache_clear()


def use_session(shell: Shell) -> None:
    hands = shell.roles.hands
    shell.set(AWS_ACCESS_KEY_ID=hands["AccessKeyId"], AWS_SECRET_ACCESS_KEY=hands["SecretAccessKey"])
    shell.set(AWS_SESSION_TOKEN=hands["SessionToken"])


def use_profile(shell: Shell) -> None:
    keys = f"aws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n"
    shell.write("credentials", f"[default]\naws_access_key_id=x\naws_secret_access_key=y\n[mine]\n{keys}")
    shell.set(AWS_PROFILE="mine")


def use_profile_that_takes_a_role(shell: Shell) -> None:
    """Use a profile that gets a role's credentials from the server's own STS."""
    use_profile(shell)
    shell.write("config", f"[profile reader]\nrole_arn={ROLE}\nsource_profile=mine\n")
    shell.set(AWS_PROFILE="reader", AWS_ENDPOINT_URL_STS=shell.s3)


def use_web_identity(shell: Shell) -> None:
    token = shell.write("web-identity", "a signed token")
    shell.set(AWS_WEB_IDENTITY_TOKEN_FILE=str(token), AWS_ROLE_ARN=ROLE, AWS_ENDPOINT_URL_STS=shell.roles.endpoint)


def use_instance(shell: Shell) -> None:
    shell.patch.delenv("AWS_EC2_METADATA_DISABLED")
    shell.set(AWS_EC2_METADATA_SERVICE_ENDPOINT=shell.roles.endpoint)


KINDS = [use_session, use_profile, use_profile_that_takes_a_role, use_web_identity, use_instance]


def settings() -> FetchdSettings:
    return load(FetchdSettings, {"THAW_FETCHD_SOCKET": "", "THAW_FETCHD_DOORS": "", **dict(os.environ)})


def fetch() -> object:
    """Read from the store as fetchd does."""
    connection = open_source(MODEL, settings()).connect()
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
def test_all_who_speak_s3_find_every_kind_of_credentials(use: Callable[[Shell], None], shell: Shell) -> None:
    use(shell)
    for speak in (fetch, push, relay):
        assert speak()


def test_fetchd_asks_for_its_role_when_it_starts_and_reads_with_it(shell: Shell, tmp_path: Path) -> None:
    use_web_identity(shell)
    with Fetchd(tmp_path, THAW_FETCHD_READ_TIMEOUT_S=10) as running:
        wait_until(lambda: shell.roles.n_handed == 1)
        running.fetch(running.client.inspect(MODEL))
    assert shell.roles.n_handed == 1


def test_credentials_that_expire_soon_are_renewed_before_they_are_used(shell: Shell) -> None:
    use_web_identity(shell)
    roles = shell.roles
    roles.lasts_s = 300.0  # botocore renews credentials that last less than ten minutes
    source = open_source(MODEL, settings())
    connection = source.connect()
    assert connection.stat("config.json")
    roles.hands, roles.lasts_s = session_credentials(shell.s3), 3600.0  # the old credentials must not be used any more
    assert roles.hands["AccessKeyId"] in signed(source)
    assert connection.stat("config.json")
    connection.close()


def test_an_instances_credentials_are_renewed_when_their_time_has_come(shell: Shell) -> None:
    use_instance(shell)
    roles = shell.roles
    source: Any = open_source(MODEL, settings())
    assert roles.hands["AccessKeyId"] in signed(source)
    roles.hands, roles.lasts_s = session_credentials(shell.s3), 4 * 3600.0
    assert roles.hands["AccessKeyId"] not in signed(source)
    in_an_hour = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    shell.patch.setattr(source.sign.__self__._credentials, "_time_fetcher", lambda: in_an_hour)
    assert roles.hands["AccessKeyId"] in signed(source)
    assert roles.n_handed == 2


def signed(source: Any) -> str:
    """The Authorization header of a request."""
    return str(source.sign("GET", f"{source.base_url}/x", {})["Authorization"])


def relay_in_vain() -> object:
    return relay(deadline_s=0.2)


SECRETS = ("the-secret-key", "the-session-token")


def speak_to_a_store_that_repeats_the_token(shell: Shell) -> None:
    shell.set(AWS_ACCESS_KEY_ID="AKIA", AWS_SECRET_ACCESS_KEY=SECRETS[0], AWS_SESSION_TOKEN=SECRETS[1])


def speak_as_a_program_says_that_fails_and_repeats_the_token(shell: Shell) -> None:
    command = f"sh -c 'echo {SECRETS[0]} {SECRETS[1]} >&2; exit 1'"
    shell.write("config", f"[default]\ncredential_process = {command}\n")


SPEAKERS: list[Callable[[], object]] = [fetch, push, relay_in_vain]


@pytest.mark.parametrize("speak", SPEAKERS)
@pytest.mark.parametrize(
    "prepare", [speak_to_a_store_that_repeats_the_token, speak_as_a_program_says_that_fails_and_repeats_the_token]
)
def test_no_error_repeats_a_secret(prepare: Callable[[Shell], None], speak: Callable[[], object], shell: Shell) -> None:
    shell.set(THAW_S3_ENDPOINT=shell.roles.endpoint)
    prepare(shell)
    with pytest.raises(ThawError) as caught:
        speak()
    told = "".join(traceback.format_exception(caught.value))
    assert not [secret for secret in SECRETS if secret in told]


@pytest.mark.parametrize("speak", SPEAKERS)
def test_a_profile_that_does_not_exist_is_named(speak: Callable[[], object], shell: Shell) -> None:
    shell.set(AWS_PROFILE="of-nobody")
    with pytest.raises(PlatformError, match="of-nobody"):
        speak()


def test_fetchd_says_when_it_starts_that_it_cannot_have_its_credentials_and_serves_others(
    shell: Shell, tmp_path: Path
) -> None:
    shell.set(AWS_PROFILE="of-nobody")
    model = write_model(tmp_path / "local")
    with Fetchd(tmp_path) as running:
        assert running.client.inspect(model.as_uri()).n_bytes
        said = [e["error"] for e in running.events if e["event"] == "s3_credentials_missing"]
    assert said == ["the credentials for S3 cannot be had: The config profile (of-nobody) could not be found"]


def test_a_role_that_cannot_be_had_now_may_be_had_later(shell: Shell) -> None:
    use_web_identity(shell)
    (shell.directory / "web-identity").rename(shell.directory / "not-mounted-yet")
    with pytest.raises(StoreUnavailable, match=r"web-identity: No such file"):
        fetch()
    (shell.directory / "not-mounted-yet").rename(shell.directory / "web-identity")
    assert fetch()
    shell.set(AWS_ENDPOINT_URL_STS=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StoreUnavailable, match="Could not connect to the endpoint URL"):
        S3Access.from_environment(os.environ).prepare()


def test_a_platforms_own_store_is_used_whatever_the_shell_says_of_aws(shell: Shell) -> None:
    another = "of another store"
    shell.set(AWS_PROFILE=another, AWS_ACCESS_KEY_ID=another, AWS_SESSION_TOKEN=another)
    shell.set(AWS_ENDPOINT_URL_S3="http://127.0.0.1:9")
    client = cli_s3.client({"THAW_S3_ENDPOINT": shell.s3, "AWS_REGION": "us-east-1", **KEYS})
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["models"]
    client.close()
