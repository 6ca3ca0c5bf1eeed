"""Promises of the names of images in registries:
1. They are read as Docker reads them, and kept in full.
2. What is none is refused with what is wrong with it.
3. The longest that is taken can be kept as a file.
4. The name of a snapshot, a directory and `host` are no such names.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sandlot.api import ImageInfo, is_reference
from sandlot.drivers.layers import Layers
from sandlot.drivers.oci.reference import Reference, full
from sandlot.errors import InvalidRequest

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("debian:12", "docker.io/library/debian:12"),
        ("docker.io/debian", "docker.io/library/debian:latest"),
        ("index.docker.io/library/debian", "docker.io/library/debian:latest"),
        ("user/name", "docker.io/user/name:latest"),
        ("a/b/c", "docker.io/a/b/c:latest"),
        ("ghcr.io/a/b:v1", "ghcr.io/a/b:v1"),
        ("ghcr.io/a", "ghcr.io/a:latest"),
        ("localhost/a", "localhost/a:latest"),
        ("localhost:5000/a:b", "localhost:5000/a:b"),
        ("127.0.0.1:5000/a/b", "127.0.0.1:5000/a/b:latest"),
        ("[::1]:5000/a", "[::1]:5000/a:latest"),
        ("HOST/a", "HOST/a:latest"),
        ("a.b:5/c-d/e_f/g__h/i.j:K_l.M-n", "a.b:5/c-d/e_f/g__h/i.j:K_l.M-n"),
        (f"debian@{DIGEST}", f"docker.io/library/debian@{DIGEST}"),
        (f"ghcr.io/a:v1@{DIGEST}", f"ghcr.io/a@{DIGEST}"),
    ],
)
def test_names_are_kept_in_full(text: str, kept: str) -> None:
    assert str(Reference.parse(text)) == full(text) == kept
    assert str(Reference.parse(kept)) == kept
    assert is_reference(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Debian:12", "small letters"),
        ("ghcr.io/A/b", "small letters"),
        ("docker://debian:12", "URL"),
        ("https://ghcr.io/a", "URL"),
        ("a/b:", "no tag"),
        ("a/b:-x", "no tag"),
        ("a/b:" + "x" * 129, "no tag"),
        ("a/b@", "no digest"),
        ("a/b@sha256:00", "no digest"),
        ("a/b@md5:" + "0" * 32, "no digest"),
        ("a/b@" + DIGEST.upper(), "no digest"),
        ("a/../b", "no name"),
        ("./a", "no registry"),
        ("a//b", "no name"),
        ("a/b/", "no name"),
        ("a b/c", "no name"),
        ("a.b\n/c", "no registry"),
        ("a.b:port/c", "no registry"),
        ("a.b/c\n", "no name"),
        ("@", "no name"),
        (":", "no name"),
        ("a.b/" + "c" * 300, "longer"),
        ("a.b/" + "c" * 150 + ":" + "d" * 128, "longer"),
        ("a.b/" + "c/" * 85 + f"c@{DIGEST}", "longer"),
    ],
)
def test_what_is_no_name_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Reference.parse(text)


@pytest.mark.parametrize("text", ["a.b/" + "c" * 113 + ":" + "d" * 128, "a.b/" + "c" * 168 + f"@{DIGEST}"])
async def test_the_longest_names_can_be_kept(text: str, tmp_path: Path) -> None:
    layers = Layers(tmp_path)
    for suffix in ("", "c"):
        longer = text.replace("/", f"/{suffix}")
        if suffix:
            with pytest.raises(InvalidRequest, match="longer"):
                full(longer)
            continue
        lock = await layers.only_one(full(text))
        layers.name(ImageInfo(name=full(text), base="host", created_at=0.0), ("0" * 16,))
        layers.let_go(full(text), lock)
        assert layers.find(full(text)).info.name == text


@pytest.mark.parametrize("text", ["host", "solved", "fork-0", "/srv/root", "/a:b"])
def test_others_are_left_alone(text: str) -> None:
    assert not is_reference(text)
    assert full(text) == text
