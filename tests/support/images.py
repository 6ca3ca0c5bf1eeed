"""Images for tests, made of files of this host, and a real registry on loopback that holds them.

root(folder)         a root file system of bash, busybox and the libraries they need, a second later
layout(folder, …)    an OCI layout of tars
Registry             Debian's `docker-registry`, filled by `skopeo`
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sandlot.drivers.oci.manifest import architecture

# What the tests of images need beside Python, and the Debian package of each.
TOOLS = {
    "docker-registry": "docker-registry",
    "skopeo": "skopeo",
    "busybox": "busybox-static",
    "openssl": "openssl",
    "ip": "iproute2",
    "unshare": "util-linux",
}


SKOPEO = ("skopeo", "--insecure-policy", "copy", "--quiet")


def missing(*tools: str) -> str | None:
    """How to get what is missing of these programs (none named: of all); None: nothing is."""
    without = [TOOLS[tool] for tool in tools or TOOLS if shutil.which(tool) is None]
    return f"`apt install {' '.join(without)}`" if without else None


def need(*tools: str) -> None:
    """Skip the test where these programs are missing, and say how to get them."""
    if reason := missing(*tools):
        pytest.skip(reason)


def libraries(program: str) -> list[str]:
    """The files that the loader needs for a program, and the loader."""
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return re.findall(r"(/\S+) \(0x", told)


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    """One member of a tar, with its content."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mtime = kind, len(data), 1_000_000_000
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for word, value in more.items():
        setattr(info, word, value)
    return info, data


def packed(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.SYMTYPE, linkname=target, mode=0o777)


def directory(name: str, mode: int = 0o755, **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.DIRTYPE, mode=mode, **more)


def busybox_root() -> bytes:
    """A root file system in which there is nothing but busybox."""
    need("busybox")
    program = Path(shutil.which("busybox") or "").read_bytes()
    names = ("sh", "cat", "echo", "ls", "stat", "id", "env", "touch", "rm", "mkdir", "pwd", "wc", "readlink", "sleep")
    return packed(
        directory("bin"),
        entry("bin/busybox", program, mode=0o755),
        *(link(f"bin/{name}", "busybox") for name in names),
    )


def glibc_root() -> bytes:
    """A root file system of this host's bash and coreutils, merged as Debian's is, with a user."""
    programs = [f"/usr/bin/{name}" for name in ("bash", "cat", "ls", "stat", "id", "env", "touch", "rm", "mkdir", "ln")]
    needed = dict.fromkeys(file for program in programs for file in libraries(program))
    files = [entry(f"usr/bin/{Path(each).name}", Path(each).read_bytes(), mode=0o755) for each in programs]
    for file in needed:
        place = file.lstrip("/")
        place = place if place.startswith("usr/") else f"usr/{place}"
        files.append(entry(place, Path(file).resolve().read_bytes(), mode=0o755))
    passwd = b"root:x:0:0:root:/root:/bin/bash\napp:x:1000:1000::/home/app:/bin/bash\n"
    return packed(
        directory("."),
        *(directory(name) for name in ("etc", "usr", "usr/bin", "usr/lib", "usr/lib64", "home")),
        *(link(name, f"usr/{name}") for name in ("bin", "lib", "lib64")),
        link("usr/bin/sh", "bash"),
        entry("etc/passwd", passwd),
        directory("home/app", 0o700, uid=1000, gid=1000),
        *files,
    )


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Built:
    """An OCI layout and what is in it."""

    path: Path
    manifest: str  # digest
    layers: list[str]


def write_layout(
    path: Path,
    layers: list[bytes],
    config: dict[str, Any] | None = None,
    *,
    pack: str = "gzip",
    machine: str | None = None,
    index: bool = False,
) -> Built:
    """An OCI layout of these tars; `index`: as one of several machines."""
    blobs = path / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict[str, Any]:
        (blobs / digest(data).removeprefix("sha256:")).write_bytes(data)
        return {"digest": digest(data), "size": len(data)}

    kind = "application/vnd.oci.image."
    suffix = {"gzip": "+gzip", "zstd": "+zstd", "plain": ""}[pack]
    described = [{"mediaType": f"{kind}layer.v1.tar{suffix}", **put(compressed(each, pack))} for each in layers]
    about = {
        "architecture": machine or architecture(),
        "os": "linux",
        "config": config or {},
        "rootfs": {"type": "layers", "diff_ids": [digest(each) for each in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}manifest.v1+json",
        "config": {"mediaType": f"{kind}config.v1+json", **put(json.dumps(about).encode())},
        "layers": described,
    }
    top = {"mediaType": manifest["mediaType"], **put(json.dumps(manifest).encode())}
    entries = [top]
    if index:
        strange = {**top, "platform": {"os": "linux", "architecture": "s390x"}}
        entries = [strange, {**top, "platform": {"os": "linux", "architecture": machine or architecture()}}]
        inner = {"schemaVersion": 2, "mediaType": f"{kind}index.v1+json", "manifests": entries}
        entries = [{"mediaType": inner["mediaType"], **put(json.dumps(inner).encode())}]
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    (path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return Built(path, top["digest"], [each["digest"] for each in described])


def compressed(data: bytes, pack: str) -> bytes:
    if pack == "gzip":
        return gzip.compress(data, 1, mtime=0)
    if pack == "zstd":
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        return zstd.compress(data)
    return data


class Registry:
    """`docker-registry` on a free port of loopback. `with Registry(folder) as registry:`"""

    def __init__(self, folder: Path, auth: str = "", tls: Tokens | None = None) -> None:
        self._folder = folder
        self._auth = auth
        self._tls = f", tls: {{certificate: '{tls.certificate}', key: '{tls.key}'}}" if tls else ""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"

    def __enter__(self) -> Registry:
        need("docker-registry")
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "config.yml"
        config.write_text(
            f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {self._folder}/data}}, "
            f"delete: {{enabled: true}}}}\nhttp: {{addr: '{self.host}'{self._tls}}}\n{self._auth}"
        )
        with (self._folder / "log").open("wb") as log:
            # It takes settings from variables that begin so; $REGISTRY_AUTH_FILE is none of them.
            env = {name: value for name, value in os.environ.items() if not name.startswith("REGISTRY_")}
            self._process = subprocess.Popen(
                ["docker-registry", "serve", str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                assert self._process.poll() is None and time.monotonic() < until, (self._folder / "log").read_text()
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20)

    def push(self, layout: Path, name: str, *words: str, login: str = "") -> str:
        """Copy a layout into it; what it is called there."""
        need("skopeo")
        target = f"{self.host}/{name}"
        more = ["--dest-creds", login] if login else []
        environment = {**os.environ, "TMPDIR": str(self._folder)}
        done = subprocess.run(
            [*SKOPEO, "--dest-tls-verify=false", *more, *words, f"oci:{layout}", f"docker://{target}"],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return target

    def blob(self, digest: str) -> Path:
        """Where it keeps a blob, for a test to damage it."""
        name = digest.removeprefix("sha256:")
        return self._folder / f"data/docker/registry/v2/blobs/sha256/{name[:2]}/{name}/data"


@dataclass
class Said:
    """What a front answers instead of the registry: all of it, or the registry's own, cut after so many bytes."""

    status: int = 200
    headers: dict[str, str] | None = None
    body: bytes | None = None
    cut: int | None = None


class Front:
    """Stands before a registry and answers some requests itself: `act(path, headers)` says which. What was asked is in
    `asked`. `with Front(registry.host, act) as front:`"""

    def __init__(self, host: str, act: Callable[[str, Message], Said | None]) -> None:
        self.asked: list[tuple[str, str | None]] = []  # path, range
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                front.asked.append((self.path, self.headers["Range"]))
                said = act(self.path, self.headers)
                status, headers, body = said.status if said else 0, said.headers if said else None, b""
                if said is None or said.body is None:
                    behind = HTTPConnection(host)
                    sent = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                    behind.request("GET", self.path, headers=sent)
                    answer = behind.getresponse()
                    status, body = answer.status, answer.read()
                    headers = {
                        name: value for name, value in answer.getheaders() if name.lower() != "transfer-encoding"
                    }
                    behind.close()
                else:
                    body = said.body
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                cut = said.cut if said else None
                self.wfile.write(body[:cut])
                if cut is not None and cut < len(body):
                    self.close_connection = True

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Front:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Tokens:
    """Makes tokens that a registry takes whose `auth: token` trusts this key, with its certificate."""

    def __init__(self, folder: Path, words: str = "") -> None:
        need("openssl")
        folder.mkdir()
        self.key, self.certificate = folder / "key.pem", folder / "certificate.pem"
        words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=tests " + words
        files = ["-keyout", str(self.key), "-out", str(self.certificate)]
        subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)

    def auth(self, realm: str) -> str:
        """Of a registry's configuration."""
        words = f"realm: '{realm}', service: tests, issuer: tests, rootcertbundle: '{self.certificate}'"
        return f"auth: {{token: {{{words}}}}}"

    def make(self, repository: str, seconds: float) -> str:
        """One that is good for so many seconds from now (negative: ran out so long ago)."""
        pem = self.certificate.read_text().splitlines()
        head = {"typ": "JWT", "alg": "RS256", "x5c": ["".join(line for line in pem if "-----" not in line)]}
        now = int(time.time())
        claims = {
            "iss": "tests",
            "sub": "tests",
            "aud": "tests",
            "exp": int(now + seconds),
            "nbf": now - 1000,
            "iat": now - 1000,
            "jti": str(now),
            "access": [{"type": "repository", "name": repository, "actions": ["pull", "push"]}],
        }
        signed = ".".join(_letters(json.dumps(part).encode()) for part in (head, claims))
        command = ["openssl", "dgst", "-sha256", "-sign", str(self.key)]
        signature = subprocess.run(command, input=signed.encode(), check=True, capture_output=True).stdout
        return f"{signed}.{_letters(signature)}"


def _letters(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
