"""Names of images in registries, read as Docker reads them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote

from sandlot.api import is_reference
from sandlot.errors import InvalidRequest

DOCKER = "docker.io"

_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]{{1,5}})?")
_WORD = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_WORD}(?:/{_WORD})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# What a registry takes.
_MOST_PATH = 200
# What fits a file's name, quoted, with `.json` or `.lock` behind it.
_MOST_QUOTED = 250
_HINT = "write it as `debian:12`, `ghcr.io/owner/name:tag` or `name@sha256:…`"


@dataclass(frozen=True, slots=True)
class Reference:
    """Where an image is. Exactly one of `tag` and `digest` is set."""

    host: str  # with its port, where it has one
    path: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Raises InvalidRequest. A digest decides: a tag beside it is left out."""
        name, _, digest = text.partition("@")
        first, slash, rest = name.partition("/")
        if slash and ({".", ":"} & {*first} or first == "localhost" or first != first.lower()):
            host, name = first, rest
        else:
            host = DOCKER
        path, _, tag = name.partition(":")
        if host == "index.docker.io":
            host = DOCKER
        if host == DOCKER and "/" not in path:
            path = f"library/{path}"
        if "://" in text:
            raise InvalidRequest(f"{text!r} is a URL, not the name of an image", _HINT)
        for part, form, what in ((host, _HOST, "registry"), (path, _PATH, "name")):
            if not form.fullmatch(part):
                lower = "; it is in small letters" if form.fullmatch(part.lower()) else ""
                raise InvalidRequest(f"{text!r} is not the name of an image: {part!r} is no {what}{lower}", _HINT)
        if len(host) + len(path) > _MOST_PATH:
            raise InvalidRequest(f"the name of the image {text[:40]}… is longer than {_MOST_PATH} letters")
        if ("@" in text and not DIGEST.fullmatch(digest)) or (":" in name and not _TAG.fullmatch(tag)):
            wrong = f"{digest!r} is no digest" if "@" in text else f"{tag!r} is no tag"
            raise InvalidRequest(f"{text!r} is not the name of an image: {wrong}", _HINT)
        found = cls(host, path, None, digest) if digest else cls(host, path, tag or "latest")
        if (size := len(quote(str(found), safe=""))) > _MOST_QUOTED:
            raise InvalidRequest(
                f"the name of the image {text[:40]}… is longer than can be kept: {size} letters as a file's name, and "
                f"{_MOST_QUOTED} are the most",
                "ask for it by a shorter tag",
            )
        return found

    @property
    def repository(self) -> str:
        return f"{self.host}/{self.path}"

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"


def full(image: str) -> str:
    """An image's name as it is kept: a reference in full, any other as it is. Raises InvalidRequest."""
    return str(Reference.parse(image)) if is_reference(image) else image
