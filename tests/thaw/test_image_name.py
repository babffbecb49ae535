"""Names of images, as Docker reads them."""

from __future__ import annotations

import pytest

from thaw.errors import BadRequest, Forbidden
from thaw.image_name import ImageName

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("python", "docker.io/library/python:latest"),
        ("me/image:1.0", "docker.io/me/image:1.0"),
        ("ghcr.io/team/a/b", "ghcr.io/team/a/b:latest"),
        ("localhost:5000/x:T", "localhost:5000/x:T"),
        (f"python:3@{DIGEST}", f"docker.io/library/python@{DIGEST}"),
    ],
)
def test_a_name_is_completed_as_docker_does(text: str, whole: str) -> None:
    assert str(ImageName.parse(text)) == whole


NO_NAMES = [
    "/",
    "a//b",
    "A/b",
    "a/b:",
    "a@sha256:00",
    "a@md5:00",
    "../a",
    "a/../b",
    "-a",
    "a-",
    "a.",
    ":1",
    "http://x/a",
    "ghcr.io/",
    "é",
    "a?b=c",
]
NO_NAMES += ["", "a b", "a\n", "ex ample.com/a", "a:" + "t" * 129, "a" * 256, "a" + "-" * 100 + "!"]


@pytest.mark.parametrize("text", NO_NAMES)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="is no name of an image"):
        ImageName.parse(text)


def test_a_prefix_ends_where_a_part_of_the_name_does() -> None:
    ImageName.parse("python").check_allowed(["docker.io"])
    ImageName.parse("me/a").check_allowed(["ghcr.io", "docker.io/me/"])
    ImageName.parse("me/a").check_allowed(["docker.io/me/a"])
    for prefixes in (["docker.io/m"], ["docker.io/me/b"], ["ghcr.io"], []):
        with pytest.raises(Forbidden, match="may not be run here"):
            ImageName.parse("me/a").check_allowed(prefixes)
    with pytest.raises(Forbidden):
        ImageName.parse("docker.io.evil.example/a").check_allowed(["docker.io"])
