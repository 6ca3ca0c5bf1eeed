"""Promises of what is read in an index, a manifest and a config:
1. What is not of the form that it should have is a BadImage, whatever it is instead.
2. What is an index and an image at once is neither.
3. Of several images for this processor's kind, one is taken that it runs, and the best of those.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandlot.drivers.oci import manifest
from sandlot.errors import BadImage, Unsupported

DIGEST = "sha256:" + "0123456789abcdef" * 4
BLOB = {"digest": DIGEST, "size": 1}


@pytest.mark.parametrize("what", ["linux", 1, ["linux"], True])
def test_a_platform_that_is_none_is_said(what: Any) -> None:
    with pytest.raises(BadImage, match="of it is no image: its index names"):
        manifest.chosen({"manifests": [{**BLOB, "platform": what}]}, "of it")
    with pytest.raises(BadImage, match="of it is no image: its index names"):
        manifest.chosen({"manifests": [what]}, "of it")


@pytest.mark.parametrize("size", ["1e999", "-1e999", "NaN", "1.5", '"1"', "true", "null", "-1", "[1]", "{}"])
def test_a_size_that_is_none_is_said(size: str) -> None:
    found = json.loads(f'{{"layers": [], "config": {{"digest": "{DIGEST}", "size": {size}}}}}')
    with pytest.raises(BadImage, match="without a digest and a size"):
        manifest.manifest(found, DIGEST, "of it")


def test_an_index_that_is_an_image_too_is_said() -> None:
    for more in ({"layers": [BLOB]}, {"config": BLOB}):
        with pytest.raises(BadImage, match="at once"):
            manifest.chosen({"manifests": [BLOB], **more}, "of it")
    assert manifest.chosen({"manifests": [BLOB]}, "of it") == manifest.Blob(DIGEST, 1)


@pytest.mark.parametrize(
    ("machine", "offered", "taken"),
    [
        ("x86_64", ["v3", None], 1),
        ("x86_64", [None, "v3"], 0),
        ("x86_64", ["v2", "v4"], None),
        ("aarch64", ["v9", "v8"], 1),
        ("aarch64", [None], 0),
        ("armv7l", ["v5", "v7", "v6"], 1),
        ("armv7l", ["v8"], None),
        ("riscv64", [None], 0),
    ],
)
def test_an_image_is_taken_that_the_processor_runs(
    machine: str, offered: list[str | None], taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest.platform, "machine", lambda: machine)
    made_for = {"os": "linux", "architecture": manifest.architecture()}
    entries = [
        {"digest": DIGEST, "size": size, "platform": {**made_for, "variant": variant} if variant else made_for}
        for size, variant in enumerate(offered)
    ]
    if taken is None:
        with pytest.raises(Unsupported, match=f"/{offered[0]}"):
            manifest.chosen({"manifests": entries}, "of it")
    else:
        assert manifest.chosen({"manifests": entries}, "of it") == manifest.Blob(DIGEST, taken)


def test_a_config_with_what_nobody_can_write_down_is_said() -> None:
    with pytest.raises(BadImage, match="of it is not JSON"):
        manifest.decoded(rb'{"Labels": {"a": "\ud800"}}', "of it")
    assert manifest.decoded(rb'{"a": "\ud83d\ude00"}', "of it") == {"a": "\N{GRINNING FACE}"}


@pytest.mark.parametrize("says", [{"Env": ["A=\0"]}, {"Cmd": ["a", "b\0"]}, {"Shell": ["\0"]}, {"WorkingDir": "/\0"}])
def test_a_config_with_what_no_program_can_be_given_is_said(says: dict[str, Any]) -> None:
    about = {"os": "linux", "architecture": manifest.architecture(), "rootfs": {"diff_ids": [DIGEST]}}
    assert manifest.contents({**about, "config": {}}, "this").diff_ids == (DIGEST,)
    with pytest.raises(BadImage, match="the config of this is not one of an image: ValueError: a NUL"):
        manifest.contents({**about, "config": says}, "this")
