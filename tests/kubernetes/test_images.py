"""The archive of images for a cluster that reaches no registry."""

from __future__ import annotations

import importlib
import json
import platform
import tarfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", "amd64"), ("aarch64", "arm64")])
def test_images_name_the_architecture_of_the_machine_whose_programs_they_hold(
    machine: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    layer, engine, target = tmp_path / "layer.tar", tmp_path / "engine.tar", tmp_path / "images.tar"
    for path in (layer, engine):
        tarfile.open(path, "w").close()
    importlib.import_module("kubernetes_images").archive(layer, target, engine)
    with tarfile.open(target) as tar:
        configs = [json.load(file) for m in tar if len(m.name) > 60 and (file := tar.extractfile(m)) is not None]
    assert configs
    assert {config["architecture"] for config in configs} == {architecture}
