"""What an index, a manifest and a config say, in the words of OCI and of Docker's second schema. Pure.

What is read here comes from strangers: nothing of it is used before its digest was checked, and what is not of the
form that it should have is a BadImage.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandlot.api import ImageConfig
from sandlot.drivers.oci.reference import DIGEST
from sandlot.errors import BadImage, Unsupported

_DOCKER = "application/vnd.docker.distribution.manifest."
_OCI = "application/vnd.oci.image."
_INDEXES = (f"{_OCI}index.v1+json", f"{_DOCKER}list.v2+json")
_MANIFESTS = (f"{_OCI}manifest.v1+json", f"{_DOCKER}v2+json")
ACCEPTED = ", ".join((*_MANIFESTS, *_INDEXES))

# A manifest is a few kilobytes; the config of an image with a long history some dozens. More is no image (bytes).
MOST_BYTES = 8 << 20
# No tool makes more, for no kernel takes more of them over one another.
MOST_LAYERS = 500

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "riscv64": "riscv64", "ppc64le": "ppc64le"}
# Of a processor's variants, those that any host of it runs, the best first.
_VARIANTS = {"amd64": ("", "v1"), "arm64": ("v8", ""), "arm": ("v7", "v6", "v5", "")}


def architecture() -> str:
    """What images call this host's processor."""
    return _MACHINES.get(platform.machine(), platform.machine())


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that a manifest names."""

    digest: str
    size: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image: where its config is, and its layers from the lowest up."""

    digest: str
    config: Blob
    layers: tuple[Blob, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a config says. `user` is a name or number that only the image's own /etc/passwd can tell."""

    config: ImageConfig
    user: str
    diff_ids: tuple[str, ...] | None  # digests of the layers' tars; None: there is no config, and nobody knows them


def checked(data: bytes, digest: str, what: str) -> bytes:
    """The same bytes. Raises BadImage unless they are those that the digest names."""
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if found != digest:
        raise BadImage(f"{what} has the digest {found}, and should have {digest}", "somebody changed it on the way")
    return data


def decoded(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object, all of it text that can be written down again. Raises BadImage."""
    try:
        found = json.loads(data)
        json.dumps(found, ensure_ascii=False).encode()  # an escape may have made half a character
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadImage(f"{what} is not JSON")
    return found


def chosen(document: Mapping[str, Any], what: str) -> Blob | None:
    """Of an index, the manifest for this host; None: it is no index. Raises Unsupported, BadImage."""
    if document.get("mediaType") not in _INDEXES and "manifests" not in document:
        return None
    if "layers" in document or "config" in document:
        raise BadImage(f"{what} is an index of images and an image at once", "push it again with a current tool")
    variants = _VARIANTS.get(architecture(), ("",))
    offered, fitting = [], []
    for each in _list(document, "manifests", what):
        about = (each.get("platform") or {}) if isinstance(each, dict) else None
        if not isinstance(about, dict):
            raise BadImage(f"{what} is no image: its index names something that is none")
        made_for = (about.get("os", "linux"), about.get("architecture", architecture()))
        variant = about.get("variant") or ""
        if made_for == ("linux", architecture()) and variant in variants:
            fitting.append((variants.index(variant), each))
        offered.append("/".join(map(str, (*made_for, variant) if variant else made_for)))
    if fitting:
        return _blob(min(fitting, key=lambda each: each[0])[1], what)
    # `unknown` is what signatures and provenance say that lie beside the images.
    raise _other_machine(what, ", ".join(dict.fromkeys(each for each in offered if "unknown" not in each)) or "nothing")


def manifest(document: Mapping[str, Any], digest: str, what: str) -> Manifest:
    """Raises Unsupported, BadImage."""
    if document.get("schemaVersion") == 1:
        raise Unsupported(
            f"{what} is an image of Docker's first schema, which nobody has made since 2016",
            "pull it with an old Docker and push it again with a current one",
        )
    layers = tuple(_blob(each, what) for each in _list(document, "layers", what))
    foreign = next((each for each in layers if "foreign" in each.kind or "nondistributable" in each.kind), None)
    if foreign is not None:
        raise Unsupported(
            f"{what} has a layer that its registry does not hold, {foreign.digest}",
            "such layers are parts of Windows: ask for an image for Linux",
        )
    if len(layers) > MOST_LAYERS:
        raise BadImage(f"{what} has {len(layers)} layers, more than {MOST_LAYERS}")
    return Manifest(digest, _blob(document.get("config"), what), layers)


def contents(document: Mapping[str, Any], what: str) -> Contents:
    """Raises Unsupported (for another processor), BadImage."""
    made_for = document.get("os", "linux"), document.get("architecture", architecture())
    if made_for != ("linux", architecture()):
        raise _other_machine(what, "/".join(map(str, made_for)))
    says = document.get("config") or {}
    try:
        workdir = "/" + str(says.get("WorkingDir") or "").lstrip("/")
        config = ImageConfig(
            env=dict(pair.partition("=")[::2] for pair in says.get("Env") or ()),
            workdir=None if workdir == "/" else workdir,
            entrypoint=tuple(says.get("Entrypoint") or ()),
            cmd=tuple(says.get("Cmd") or ()),
            labels=says.get("Labels") or {},
            shell=tuple(says.get("Shell") or ()),
            on_build=tuple(says.get("OnBuild") or ()),
        )
        words = (*config.env, *config.env.values(), *config.entrypoint, *config.cmd, *config.shell, workdir)
        if any("\0" in word for word in words):
            raise ValueError("a NUL in what programs are to be given")
        diff_ids = tuple(document["rootfs"]["diff_ids"])
        if not all(DIGEST.fullmatch(each) for each in diff_ids):
            raise ValueError("a digest of a layer is none")
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # pydantic's is a ValueError
        raise BadImage(f"the config of {what} is not one of an image: {type(error).__name__}: {error}") from error
    return Contents(config, str(says.get("User") or ""), diff_ids)


def _other_machine(what: str, offered: str) -> Unsupported:
    return Unsupported(
        f"{what} is for {offered}, and this host is linux/{architecture()}",
        f"ask for an image that was made for linux/{architecture()}",
    )


def _list(document: Mapping[str, Any], key: str, what: str) -> list[Any]:
    found = document.get(key)
    if not isinstance(found, list):
        raise BadImage(f"{what} is no image: its manifest has no {key}")
    return found


def _blob(entry: Any, what: str) -> Blob:
    try:
        blob = Blob(str(entry["digest"]), entry["size"], str(entry.get("mediaType", "")))
        if DIGEST.fullmatch(blob.digest) and type(blob.size) is int and blob.size >= 0:
            return blob
    except (TypeError, KeyError, AttributeError):
        pass
    raise BadImage(f"{what} is no image: its manifest names something without a digest and a size")
