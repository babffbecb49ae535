"""The CLI's target: options, WSK_CONFIG_FILE, ~/.wskprops, and the dev platform's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import KEY, Run
from tests.cli.fake_gateway import FakeGateway
from thaw.cli.platform_api.property_file import normal_apihost, read_properties


def test_set_writes_a_private_file_that_get_and_wsk_read(thaw: Run, home: Path) -> None:
    assert thaw("property", "set", "--apihost", "localhost:3233", "--auth", KEY).returncode == 0
    written = home / ".wskprops"
    assert written.read_text() == f"APIHOST=localhost:3233\nAUTH={KEY}\n"
    assert written.stat().st_mode & 0o777 == 0o600
    assert thaw("property", "get", "--auth").stdout == f"whisk auth\t{KEY}\n"
    everything = thaw("property", "get").stdout
    assert "whisk API host\thttp://localhost:3233\n" in everything
    assert KEY not in everything


def test_unset_removes_one_property_and_keeps_the_others(thaw: Run, home: Path) -> None:
    (home / ".wskprops").write_text(f"APIHOST=x\nAUTH={KEY}\nOTHER=kept\n")
    assert thaw("property", "unset", "--auth").returncode == 0
    assert read_properties(home / ".wskprops") == {"APIHOST": "x", "OTHER": "kept"}


def test_wsk_config_file_wins_over_the_home_and_the_home_over_the_dev_platform(
    thaw: Run, home: Path, gateway: FakeGateway, tmp_path: Path
) -> None:
    gateway.answers["GET /api/v1/namespaces"] = (200, ["guest"])
    dev, own, named = home / "dev" / "wskprops", home / ".wskprops", tmp_path / "props"
    dev.parent.mkdir()
    for path, key in ((dev, "d:1"), (own, "h:1"), (named, "n:1")):
        path.write_text(f"APIHOST={gateway.url}\nAUTH={key}\n")
    assert thaw("namespace", "list", env={"WSK_CONFIG_FILE": str(named)}).stdout == "namespaces\nguest\n"
    thaw("namespace", "list")
    own.unlink()
    thaw("namespace", "list")
    thaw("namespace", "list", "--auth=o:1")
    import base64

    keys = [base64.b64decode(a.authorization.removeprefix("Basic ")).decode() for a in gateway.asked]
    assert keys == ["n:1", "h:1", "d:1", "o:1"]


def test_comments_blank_lines_and_spaces_in_the_file_are_tolerated(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("# mine\n\n APIHOST = https://a.example \nAUTH=a:b=c\nnonsense\n")
    assert read_properties(tmp_path / "p") == {"APIHOST": "https://a.example", "AUTH": "a:b=c"}


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:3233", "http://localhost:3233"),
        ("127.0.0.1", "http://127.0.0.1"),
        ("a.example", "https://a.example"),
        ("http://a.example/", "http://a.example"),
        ("[::1]:3233", "http://[::1]:3233"),
    ],
)
def test_a_host_without_a_scheme_is_https_unless_it_is_this_machine(given: str, url: str) -> None:
    assert normal_apihost(given) == url
