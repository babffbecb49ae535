"""A store behind TLS, whose certificate is signed by a CA that only this host knows."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fetchd.harness import Fetchd, Store, write_index, write_model
from tests.hub import LoopbackHub, files_in
from thaw.errors import ModelNotFound, StoreUnavailable


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    made, key = tmp_path / "ca.pem", tmp_path / "key.pem"
    kind = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=store",
    ]
    command = ["openssl", *kind, "-addext", "subjectAltName=IP:127.0.0.1", "-out", made, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)
    return made, key


@pytest.fixture
def tls(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


@pytest.fixture
def store(tls: ssl.SSLContext, tmp_path: Path) -> Iterator[Store]:
    write_index(write_model(tmp_path / "s" / "m"))
    with Store(tmp_path / "s", tls=tls) as running:
        yield running


def test_a_model_arrives_over_tls_from_a_store_that_the_host_trusts(
    store: Store, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    with Fetchd(tmp_path, SSL_CERT_FILE=certificate[0]) as fetchd:
        facts = fetchd.client.inspect(f"{store.uri}/m")
        for name, data in fetchd.files(facts).items():
            assert data == (store.root / "m" / name).read_bytes()
        assert fetchd.wait().fetched_bytes == facts.n_bytes


def test_a_hub_behind_tls_leads_to_no_store_without_it(
    tls: ssl.SSLContext, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    with LoopbackHub(tls=tls) as hub:
        hub.add("org/base", files_in(write_model(tmp_path / "m", layer_bytes=1000)))
        with (
            Fetchd(tmp_path, SSL_CERT_FILE=certificate[0], HF_ENDPOINT=hub.endpoint) as fetchd,
            pytest.raises(ModelNotFound, match="the hub leads to http://, which is not as safe as https"),
        ):
            fetchd.client.inspect("hf://org/base")
        assert hub.requests("hub", "HEAD")
        assert hub.requests("store") == []


def test_a_store_that_nobody_vouches_for_is_not_read(store: Store, tmp_path: Path) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_RETRIES=1) as fetchd, fetchd.failing(StoreUnavailable, "CERTIFICATE_VERIFY"):
        fetchd.client.inspect(f"{store.uri}/m")
    assert store.requests == []
