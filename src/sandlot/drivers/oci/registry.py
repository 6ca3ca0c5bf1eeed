"""An image in a registry, over HTTP.

It promises that no byte is used whose digest is not the one that was asked for; that a download which breaks off goes
on where it was, a bounded number of times; that every wait has a deadline; that a login is shown to its registry and to
who that names for tokens, never over a connection that anybody can read, unless the registry is this machine or one
that `registries.conf` calls insecure; and, on a server, that no address is asked which is not public. Blobs lie in
files without a name, so that whatever happens none is left.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urljoin

import httpx2

from sandlot.drivers import public
from sandlot.drivers.base import Progress
from sandlot.drivers.layers import Room
from sandlot.drivers.oci import hosts, logins, manifest
from sandlot.drivers.oci.hosts import Place
from sandlot.drivers.oci.manifest import Blob, Contents, Manifest
from sandlot.drivers.oci.reference import Reference
from sandlot.errors import (
    BadImage,
    DeadlineExceeded,
    Denied,
    HostFault,
    NotFound,
    SandlotError,
    Unreachable,
    Unsupported,
    host_fault,
)

T = TypeVar("T")

# Seconds: to reach a host, and between two pieces of what it sends.
_CONNECT_SECONDS, _SILENCE_SECONDS = 10.0, 30.0
# Blobs at a time: more share the same line, and each more costs a registry a connection.
_AT_ONCE = 3
# How often in a row something is tried that fails in passing, and how long is waited between (seconds): 0.25, 0.5, 1 …
_TRIES = 5
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 8.0
# An attempt that brought so much of a blob counts as none (bytes).
_PROGRESS = 1 << 20
_MOST_REDIRECTS = 5
_TOKEN_BYTES = 1 << 20  # of an answer with a token

# Of a challenge: the word for a way to log in, or a parameter of the one before it.
_WORD = re.compile(r"""([^\s,="]+)(?:\s*(=)\s*("(?:[^"\\]|\\.)*"|[^\s,"]*))?""")

_PORTS = {"http": 80, "https": 443}
_MOST_PORT = 65_535


class _Passing(Exception):
    """What may be better the next time. `after`: seconds that the registry asks us to wait."""

    def __init__(self, error: SandlotError, after: float = 0.0) -> None:
        self.error = error
        self.after = after


class Registry:
    """One image of a registry, while it is fetched. `allowed` None: whatever the node's user asks for; else hosts that
    a server may ask, and where that is empty any that is public. To be closed."""

    def __init__(self, reference: Reference, directory: Path, allowed: Sequence[str] | None = None) -> None:
        self._reference = reference
        self._directory = directory
        self._places = hosts.places(reference, hosts.read())
        if allowed and _with_port(reference.host) not in map(_with_port, allowed):
            raise Denied(
                f"this server does not pull from {reference.host}",
                f"who runs it can allow it: `sandlot serve --allow-registry {reference.host}`",
            )
        named = (place.host for place in self._places if place.named_here)
        asked = None if allowed is None else frozenset(hosts.split(each) for each in (*allowed, *named))
        self._connections = _Connections(asked)
        self._speakers = {place: _Speaker(place, self._connections) for place in self._places}
        self._fetching: list[asyncio.Task[BinaryIO]] = []
        self.blobs: tuple[Blob, ...] = ()

    async def manifest(self) -> Manifest:
        """The manifest for this host. Raises NotFound, Denied, Unreachable, Unsupported, BadImage."""
        what = str(self._reference)
        data = await self._manifest(self._reference.digest)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        document = manifest.decoded(data, what)
        if (inner := manifest.chosen(document, what)) is not None:
            data = await self._manifest(inner.digest)
            digest, document = inner.digest, manifest.decoded(data, what)
        found = manifest.manifest(document, digest, what)
        self.blobs = found.layers
        return found

    async def _manifest(self, digest: str | None) -> bytes:
        return await self._first(
            lambda speaker: _patiently(lambda: speaker.manifest(self._reference, digest)),
        )

    async def contents(self, found: Manifest) -> Contents:
        what = str(self._reference)
        if found.config.size > manifest.MOST_BYTES:
            raise BadImage(f"the config of {what} is said to be {found.config.size} bytes long")
        with await self._blob(found.config, lambda _: None) as file:
            return manifest.contents(manifest.decoded(file.read(), f"the config of {what}"), what)

    def start(self, progress: Progress) -> None:
        """Begin to fetch the layers. Raises HostFault: there is no room for them."""
        size = sum(blob.size for blob in self.blobs)
        free = Room.of(self._directory).bytes
        if size > free:
            raise HostFault(
                f"{self._reference} is {size} bytes packed, and {self._directory} has room for {free}",
                "free some space there (`sandlot image prune`), or name another state directory",
            )
        turn = asyncio.Semaphore(_AT_ONCE)

        async def fetch(index: int, blob: Blob) -> BinaryIO:
            async with turn:
                return await self._blob(blob, lambda have: progress.fetched(index, have))

        self._fetching = [asyncio.ensure_future(fetch(*each)) for each in enumerate(self.blobs)]

    async def layer(self, index: int) -> BinaryIO:
        """A layer's blob when it is whole, for the caller to close. Raises what went wrong with any of them."""
        task = self._fetching[index]
        while not task.done():
            await asyncio.wait(
                [each for each in self._fetching[index:] if not each.done()], return_when=asyncio.FIRST_COMPLETED
            )
            for each in self._fetching:
                if each.done() and each.exception() is not None:
                    each.result()
        return task.result()

    async def close(self) -> None:
        for task in self._fetching:
            task.cancel()
        if self._fetching:
            await asyncio.wait(self._fetching)
        for task in self._fetching:
            if not task.cancelled() and task.exception() is None:
                task.result().close()
        await self._connections.close()

    async def _first(self, ask: Callable[[_Speaker], Awaitable[T]]) -> T:
        """The answer of the first place that has one: a mirror need not have everything."""
        *_, last = self._speakers
        for place, speaker in self._speakers.items():
            try:
                return await ask(speaker)
            except (NotFound, Unreachable, Denied, BadImage, Unsupported, DeadlineExceeded):
                if place == last:
                    raise
        raise AssertionError("there is a last place")

    async def _blob(self, blob: Blob, told: Callable[[int], None]) -> BinaryIO:
        try:
            file: BinaryIO = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115  (it is returned)
            try:
                await self._first(lambda speaker: _Download(speaker, blob, file, told).run())
                file.seek(0)
            except BaseException:
                file.close()
                raise
        except OSError as error:
            raise host_fault(error, f"write a layer of {self._reference} to {self._directory}") from error
        return file


async def _patiently(attempt: Callable[[], Awaitable[T]]) -> T:
    """What comes of an attempt, tried again while it fails in passing."""
    for number in range(1, _TRIES):
        try:
            return await attempt()
        except _Passing as failed:
            await _pause(number, failed)
    try:
        return await attempt()
    except _Passing as failed:
        raise failed.error from None


async def _pause(failures: int, failed: _Passing) -> None:
    await asyncio.sleep(min(max(_FIRST_WAIT * 2 ** (failures - 1), failed.after), _LONGEST_WAIT))


class _Download:
    """One blob on its way into a file. Goes on where it broke off, as long as each attempt brings something."""

    def __init__(self, speaker: _Speaker, blob: Blob, file: BinaryIO, told: Callable[[int], None]) -> None:
        self._speaker, self._blob, self._file, self._told = speaker, blob, file, told
        self._begin()

    def _begin(self) -> None:
        self._have = 0
        self._digest = hashlib.sha256()
        self._file.seek(0)
        self._file.truncate()

    async def run(self) -> None:
        size = self._blob.size
        stuck = most = 0
        while True:
            try:
                await self._go_on()
                break
            except _Passing as failed:
                # Beyond what it ever had: one that always sends the whole from its beginning gets nowhere.
                stuck = 0 if self._have - most >= _PROGRESS else stuck + 1
                most = max(most, self._have)
                if stuck == _TRIES:
                    raise failed.error from None
                await _pause(stuck, failed)
        if self._have != size or f"sha256:{self._digest.hexdigest()}" != self._blob.digest:
            said = f"ends after {self._have} of {size} bytes" if self._have < size else "has another digest"
            said = f"is longer than the {size} bytes that its manifest says" if self._have > size else said
            self._begin()
            raise BadImage(
                f"the blob {self._blob.digest} of {self._speaker.place} {said}",
                "the registry, or something on the way to it, damaged it: push the image again",
            )

    async def _go_on(self) -> None:
        asked = {"Range": f"bytes={self._have}-"} if self._have else {}
        async with self._speaker.get(f"blobs/{self._blob.digest}", asked, (416,)) as answer:
            if answer.status_code == 416:  # there is no more of it
                return
            if self._have and not answer.headers.get("content-range", "").startswith(f"bytes {self._have}-"):
                self._begin()  # it sends the whole once more
            with _InPassing(f"fetching {self._blob.digest} from {self._speaker.place}"):
                async for piece in answer.aiter_raw():
                    self._have += len(piece)
                    if self._have > self._blob.size:
                        return
                    # On the loop: a piece is 64 kB at most, 0.1 ms to write to memory and to hash.
                    self._digest.update(piece)
                    self._file.write(piece)
                    self._told(self._have)
        if self._have < self._blob.size and "content-length" not in answer.headers:
            raise _Passing(Unreachable(f"{self._speaker.place} broke off while it sent {self._blob.digest}"))
        if self._have < self._blob.size and not asked:
            # Its own length says that there is no more. It is asked for the rest once, so that it can say so.
            await self._go_on()


class _Speaker:
    """Speaks to a registry of one repository: which scheme, which token."""

    def __init__(self, place: Place, connections: _Connections) -> None:
        self.place = place
        self._connections = connections
        self._base = ""
        self._authorization = ""
        self._greeting = asyncio.Lock()

    async def manifest(self, reference: Reference, digest: str | None) -> bytes:
        """Its bytes, which are those of the digest, where one is given."""
        what = f"{reference.repository}@{digest}" if digest else str(reference)
        async with self.get(f"manifests/{digest or reference.tag}", {"Accept": manifest.ACCEPTED}) as answer:
            with _InPassing(f"fetching the manifest of {what}"):
                data = await _read(answer, manifest.MOST_BYTES, f"the manifest of {what}")
        return manifest.checked(data, digest, f"the manifest of {what}") if digest else data

    @asynccontextmanager
    async def get(self, path: str, headers: dict[str, str], also: tuple[int, ...] = ()) -> AsyncIterator[Any]:
        """The answer to a GET in the repository, its body not read yet. Raises NotFound, Denied; `_Passing` for what
        may be better the next time. Statuses in `also` are answers too."""
        await self._greet()
        url = f"{self._base}/v2/{self.place.path}/{path}"
        for renewed in (False, True):  # a token runs out in the middle of a pull
            answer = await self._connections.get(url, {**headers, **self._signed()}, self.place.insecure)
            try:
                if answer.status_code == 401 and not renewed:
                    await self._authorize(answer.headers.get("www-authenticate", ""))
                    continue
                if answer.status_code in (200, 206, *also):
                    yield answer
                    return
                raise await self._refusal(answer, path)
            finally:
                await answer.aclose()

    def _signed(self) -> dict[str, str]:
        return {"Authorization": self._authorization} if self._authorization else {}

    async def _greet(self) -> None:
        """Find out how it is spoken to."""
        async with self._greeting:
            if self._base:
                return
            schemes = ("https", "http") if self.place.insecure else ("https",)
            for scheme in schemes:
                try:
                    answer = await self._connections.get(f"{scheme}://{self.place.host}/v2/", {}, self.place.insecure)
                except _Passing as failed:
                    if scheme == schemes[-1]:
                        raise failed from None
                    continue
                challenge = answer.headers.get("www-authenticate", "") if answer.status_code == 401 else ""
                await answer.aclose()
                self._base = f"{scheme}://{self.place.host}"
                if challenge:
                    await self._authorize(challenge)
                return

    async def _authorize(self, challenge: str) -> None:
        """Get what the registry wants to see. Raises Denied."""
        offered = challenges(challenge)
        asked = next((words for kind, words in offered if kind == "bearer" and "realm" in words), None)
        login = await asyncio.to_thread(logins.find, self.place.host, self.place.path)
        if asked is not None:
            self._authorization = f"Bearer {await self._token(asked, login)}"
        elif login is not None and any(kind == "basic" for kind, _ in offered):
            self._authorization = _basic(login)
        else:
            raise Denied(
                f"the registry {self.place.host} wants a login", f"`docker login {self.place.host}`, or `skopeo login`"
            )

    async def _token(self, asked: dict[str, str], login: logins.Login | None) -> str:
        realm = _led(f"{self._base}/v2/", asked["realm"])
        words = {"service": asked.get("service", ""), "scope": f"repository:{self.place.path}:pull"}
        safe = realm.startswith("https://") or self.place.insecure
        if login is not None and not safe:
            raise Denied(f"{self.place.host} asks for its login over plain HTTP, at {realm}")
        if login is not None and login.token:
            form = {**words, "grant_type": "refresh_token", "refresh_token": login.secret, "client_id": "sandlot"}
            answer = await self._connections.post(realm, form, self.place.insecure)
        else:
            url = str(httpx2.URL(realm).copy_merge_params(words))
            shown = {"Authorization": _basic(login)} if login is not None else {}
            answer = await self._connections.get(url, shown, self.place.insecure)
        try:
            if answer.status_code in (400, 401, 403):
                raise Denied(
                    f"the registry {self.place.host} does not take the login that this host has for it",
                    f"it may have run out: `docker login {self.place.host}`, or `skopeo login`",
                )
            with _InPassing(f"fetching a token for {self.place}"):
                says = await _read(answer, _TOKEN_BYTES, f"the answer of {realm}")
            if answer.status_code != 200:
                raise _Passing(Unreachable(f"{realm} answered {answer.status_code} when it was asked for a token"))
            token = manifest.decoded(says, f"the answer of {realm}")
            return str(token.get("token") or token["access_token"])
        except KeyError:
            raise BadImage(f"{realm} answered without a token") from None
        finally:
            await answer.aclose()

    async def _refusal(self, answer: Any, path: str) -> Exception:
        kind, _, name = path.partition("/")
        words = await _words(answer)
        said = f": {words}" if words else ""
        what = f"{self.place}{'@' if ':' in name else ':'}{name}"
        if answer.status_code == 404:
            if kind == "blobs":
                return BadImage(f"{self.place.host} has no blob {name}, which its own manifest of {self.place} names")
            return NotFound(
                f"there is no image {what} in its registry{said}",
                f"`skopeo list-tags docker://{self.place}` shows the tags that there are",
            )
        if answer.status_code in (401, 403):
            return Denied(
                f"the registry {self.place.host} does not let us have {what}{said}",
                f"it is misspelt, or wants another login: `docker login {self.place.host}`, or `skopeo login`",
            )
        error = Unreachable(f"the registry {self.place.host} answered {answer.status_code} for {what}{said}")
        if answer.status_code != 429 and answer.status_code < 500:
            return error
        after = answer.headers.get("retry-after", "")
        return _Passing(error, float(after) if after.isdecimal() else 0.0)


def challenges(header: str) -> list[tuple[str, dict[str, str]]]:
    """The ways to log in that an answer offers, each with its parameters. Pure."""
    found: list[tuple[str, dict[str, str]]] = []
    for word, equals, value in _WORD.findall(header):
        if not equals:
            found.append((word.lower(), {}))
        elif found:
            found[-1][1][word.lower()] = re.sub(r"\\(.)", r"\1", value[1:-1]) if value[:1] == '"' else value
    return found


def _with_port(host: str) -> tuple[str, int]:
    name, port = hosts.split(host)
    return name, port or _PORTS["https"]


def _led(at: str, where: str) -> str:
    """The URL that an answer of `at` leads to. Raises Unreachable: it is none."""
    with suppress(ValueError, httpx2.InvalidURL):
        url = urljoin(at, where)
        if httpx2.URL(url).host:
            return url
    raise Unreachable(f"{httpx2.URL(at).host} leads us to {where[:200]!r}, which is no URL")


def _basic(login: logins.Login) -> str:
    return "Basic " + base64.b64encode(f"{login.name}:{login.secret}".encode()).decode()


async def _words(answer: Any) -> str:
    """What a registry says of why, cut: it is a stranger's text."""
    try:
        errors = json.loads(await _read(answer, 1 << 16, "an error"))["errors"]
        return "".join(each for each in str(errors[0]["message"])[:200] if each.isprintable())
    except (httpx2.HTTPError, BadImage, ValueError, LookupError, TypeError):
        return ""


async def _read(answer: Any, most: int, what: str) -> bytes:
    data = b""
    async for piece in answer.aiter_bytes():
        data += piece
        if len(data) > most:
            raise BadImage(f"{what} is longer than {most} bytes")
    return data


class _InPassing:
    """What breaks off in here may be better the next time."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, httpx2.HTTPError):
            word = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise _Passing(Unreachable(f"the connection broke while {self._doing}: {word}")) from None


class _Connections:
    """HTTP to whoever may be asked: `public` None is everybody, else who has a public address or is named in it, by
    `hosts.split`, with a port or for all of them."""

    def __init__(self, public: frozenset[tuple[str, int | None]] | None) -> None:
        self._public = public
        self._clients: dict[tuple[str, bool], httpx2.AsyncClient] = {}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def get(self, url: str, headers: dict[str, str], insecure: bool) -> Any:
        """The answer, redirects followed, its body not read yet: the caller closes it."""
        shown = dict(headers)
        for _ in range(_MOST_REDIRECTS + 1):
            answer = await self._send("GET", url, insecure, headers=shown)
            where = answer.headers.get("location")
            if answer.status_code not in (301, 302, 303, 307, 308) or where is None:
                return answer
            await answer.aclose()
            before, url = httpx2.URL(url), _led(url, where)
            after = httpx2.URL(url)
            if after.scheme != "https" and not insecure:
                raise Unsupported(f"{before.host} sends us to {url[:200]}, which is not https")
            if (after.host, after.port) != (before.host, before.port):
                shown.pop("Authorization", None)  # it is between the registry and us
        raise Unreachable(
            f"{httpx2.URL(url).host} sends us from one place to another, more than {_MOST_REDIRECTS} times"
        )

    async def post(self, url: str, form: dict[str, str], insecure: bool) -> Any:
        return await self._send("POST", url, insecure, data=form)

    async def _send(self, method: str, url: str, insecure: bool, **said: Any) -> Any:
        try:
            return await self._sent(httpx2.Request(method, url, **said), insecure)
        except ValueError as error:  # a port, a host or a token that no request can carry
            raise Unreachable(f"{url[:200]!r} cannot be asked: {error}") from error

    async def _sent(self, request: httpx2.Request, insecure: bool) -> Any:
        host, where = request.url.host, request.url.netloc.decode()
        name, port = hosts.split(host)[0], request.url.port or _PORTS.get(request.url.scheme)
        if port is not None and port > _MOST_PORT:
            raise ValueError(f"there is no port {port}")
        request.headers.setdefault("User-Agent", "sandlot")
        request.headers["Accept-Encoding"] = "identity"  # a blob is what its digest says, not what a proxy makes of it
        request.extensions = {
            "timeout": {
                "connect": _CONNECT_SECONDS,
                "read": _SILENCE_SECONDS,
                "write": _SILENCE_SECONDS,
                "pool": _SILENCE_SECONDS,
            }
        }
        if self._public is not None and self._public.isdisjoint({(name, None), (name, port)}):
            # The very address that was looked at is asked: a name can mean another one a moment later.
            request.url = request.url.copy_with(host=await _public_address(host))
            request.extensions["sni_hostname"] = host
        key = (where, insecure)
        if key not in self._clients:  # one for each name: a connection is good for the name that its certificate has
            proxied = self._public is None  # an address behind a proxy cannot be looked at
            trusted = False if insecure else _trusted()
            self._clients[key] = httpx2.AsyncClient(verify=trusted, trust_env=proxied, follow_redirects=False)
        try:
            return await self._clients[key].send(request, stream=True)
        except httpx2.HTTPError as error:
            word = str(error) or type(error).__name__
            if "CERTIFICATE_VERIFY_FAILED" in word:
                raise Unreachable(
                    f"the registry {where} has a certificate that is not trusted: {word}",
                    "name the file of who signed it in SSL_CERT_FILE, or the registry as `insecure` in registries.conf",
                ) from error
            raise _Passing(
                Unreachable(
                    f"the registry {where} cannot be reached: {word}", "is its name right, and is there a network?"
                )
            ) from error


async def _public_address(host: str) -> str:
    """An address of a host that anybody on the internet could reach. Raises Denied, `_Passing` (no such host)."""

    def refusal(address: str) -> Denied:
        return Denied(
            f"this server asks no registry that is not public, and {host} is at {address}",
            f"who runs it can allow it: `sandlot serve --allow-registry {host}`",
        )

    try:
        return await public.address_of(host, refusal)
    except Unreachable as error:
        raise _Passing(error) from error


def _trusted() -> ssl.SSLContext:
    """With the host's certificates, or those of SSL_CERT_FILE, whether there is a proxy or not."""
    try:
        return httpx2.create_ssl_context()
    except OSError as error:
        reason = error.strerror or str(error)
        raise HostFault(
            f"the certificates that SSL_CERT_FILE or SSL_CERT_DIR names cannot be read: {reason}"
        ) from error
