"""The links of a hub: the places that are accepted, and places that have the same origin."""

from __future__ import annotations

import pytest

from fetchd.settings import FetchdSettings
from thaw.hub.answers import Refusal, next_page, refusal
from thaw.hub.links import DEFAULT_ENDPOINT, Link, endpoint_of, link_of
from thaw.hub.models import HubModel
from thaw.settings import SettingError

PAGE = Link("https://hub.example", "/api/models/o/n/tree/x")


@pytest.mark.parametrize(
    ("text", "origin", "path"),
    [
        ("/b?c=1", "https://hub.example", "/b?c=1"),
        ("d", "https://hub.example", "/api/models/o/n/tree/d"),
        ("https://HUB.example:443/x#y", "https://hub.example", "/x"),
        ("https://hub.example:444", "https://hub.example:444", "/"),
        ("//other.example/x", "https://other.example", "/x"),
        ("http://hub.example/x", "http://hub.example", "/x"),
        ("http://[::1]:80/x", "http://[::1]", "/x"),
    ],
)
def test_a_place_is_read_as_a_browser_reads_it_and_has_one_spelling(text: str, origin: str, path: str) -> None:
    assert link_of(text, PAGE) == Link(origin, path)


UNUSABLE = ["", "/a b", "/a\r\nX: y", "/é", "/" + "a" * 9000, "ftp://h/"] + [
    f"https://{rest}" for rest in ("h:99999/", "h:0/", "h:x/", "u:p@h/", "hub.example\\@h/", "[::1/", "/x")
]


@pytest.mark.parametrize("text", UNUSABLE)
def test_a_place_to_which_no_request_can_be_sent_is_none(text: str) -> None:
    assert link_of(text, PAGE if text.startswith("/") else None) is None


@pytest.mark.parametrize("link", ["https://evil.example/x", "//evil.example/x", "http://hub.example/x", "https://h:0/"])
def test_a_list_goes_on_at_its_own_origin_only(link: str) -> None:
    assert next_page({"Link": '</y>; rel="next"'}, PAGE) == Link(PAGE.origin, "/y")
    assert next_page({}, PAGE) is None
    found = next_page({"Link": f'<{link}>; rel="next"'}, PAGE)
    assert isinstance(found, Refusal)
    assert "goes on at" in found.sentence


def test_an_empty_endpoint_is_the_default() -> None:
    assert endpoint_of("") == endpoint_of(" ") == DEFAULT_ENDPOINT == FetchdSettings("s", "d").hub_endpoint
    assert endpoint_of("http://Mirror.example:8080/hub/") == "http://mirror.example:8080/hub"
    for text in ("huggingface.co", "ftp://h", "https://u:p@h", "https://h?x", "https://"):
        with pytest.raises(SettingError, match="HF_ENDPOINT"):
            endpoint_of(text)


def test_a_refusal_names_the_file_and_no_signed_place() -> None:
    model = HubModel("o/n", "main")

    def said(status: int, file: str, **headers: str) -> str:
        spelled = {name.replace("_", "-"): value for name, value in headers.items()}
        return refusal(status, spelled, model, "https://h", file, has_token=False, how="x").sentence

    gone = said(404, "model.safetensors", X_Error_Code="EntryNotFound")
    assert gone == "hf://o/n@main has no model.safetensors any more"
    assert "no config.json at its top" in said(404, "config.json", X_Error_Code="EntryNotFound")
    away = said(302, "x", Location="https://cdn.example/p?signature=s")
    assert away == "hf://o/n: the hub leads to https://cdn.example"
    assert said(302, "x", Location="a b") == "hf://o/n: the hub leads elsewhere"
