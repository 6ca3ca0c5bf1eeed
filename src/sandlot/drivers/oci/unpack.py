"""Writes a layer into a directory: a program that is run in a box, by the interpreter of the host's image.

    python3 unpack.py DIRECTORY OPTIONS < LAYER.tar
        {"entries", "bytes", "block", "first"} → {"entries", "bytes", "taken", "nobodys"}
    python3 unpack.py DIRECTORY OPTIONS
        {"user", "workdir"} → {"user", "group", "home"}

It changes its root to the directory first: whatever a name or a link in a layer says, it leads to somewhere in there.
What it reads comes from a stranger, so it has bounds on entries, on bytes, on how deep directories really go, links
followed, and on how much is said about entries. It answers with one line of JSON; {"error", "kind"} when it cannot go
on. Nothing of Sandlot is imported, for nothing of it is there. `archive.py` reads headers with it.

A mark `.wh.NAME` takes NAME of the layers below away, `.wh..wh..opq` all that they have in its directory; what this
layer has there stays, whichever comes first. Devices are left out: nobody could make one in a box.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")
About = dict[str, bytes]  # what a pax header says

PIECE = 1 << 20
ZEROS = bytes(PIECE)
BLOCK = tarfile.BLOCKSIZE
# A path is as long as the kernel takes one; directories are as deep as whoever removes them can go.
MOST_PATH, MOST_DEPTH = 4095, 256
MOST_WORDS = 1 << 20  # bytes of what is said about one entry
MOST_SHARED = 1 << 16  # bytes of what is said about all that follow: each of them is looked up in it
MOST_ID = 65_535
NOBODY = 65_534
LATEST = 1 << 33  # seconds before 1970 and after: times beyond are no times
LINKS = (tarfile.SYMTYPE, tarfile.LNKTYPE)
LEFT_OUT = (tarfile.CHRTYPE, tarfile.BLKTYPE, b"V")
FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE)
KNOWN = (*FILES, *LINKS, *LEFT_OUT, tarfile.DIRTYPE, tarfile.FIFOTYPE)
MARK, OPAQUE = ".wh.", ".wh..wh..opq"
# An attribute that this file system or this user cannot have is left out.
NOT_HAD = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EINVAL)


class Refused(Exception):
    """`kind`: bad (the layer), bound, bytes or entries (too many of it), space (on the disk), owners (they cannot be
    written)."""

    def __init__(self, error: str, kind: str = "bad") -> None:
        super().__init__(error)
        self.kind = kind


class Layer:
    """The tar as it comes, counted: its bytes, and what is taken on the disk, which is never less."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self.file = file
        self.most = most
        self.bytes = 0
        self.more = 0

    def count(self, size: int) -> None:
        self.bytes += size
        self.take(0)

    def take(self, size: int) -> None:
        """On the disk, beyond the bytes of the tar."""
        self.more += size
        if self.bytes + self.more > self.most:
            raise Refused(f"it unpacks to more than {self.most} bytes", "bytes")

    def exactly(self, size: int) -> bytes:
        self.count(size)
        data = self.file.read(size)
        if len(data) < size:
            raise Refused("it breaks off in the middle")
        return data

    def skip(self, size: int) -> None:
        while size > 0:
            size -= len(self.exactly(min(size, PIECE)))

    def words(self, size: int) -> bytes:
        """What is said about an entry, which fills whole blocks."""
        if size > MOST_WORDS:
            raise Refused(f"it says {size} bytes about one entry")
        data = self.exactly(size)
        self.skip(-size % BLOCK)
        return data


def records(data: bytes) -> About:
    """The pairs of a pax header."""
    found: About = {}
    at, end = 0, len(data.rstrip(b"\0"))
    while at < end:
        space = data.find(b" ", at, at + 8)
        length = data[at:space] if space > at else b""
        after = at + int(length) if length.isdigit() else 0
        word, equals, value = data[space + 1 : after - 1].partition(b"=")
        if not at < after <= len(data) or not equals or data[after - 1 : after] != b"\n":
            raise Refused("a header of it is malformed")
        found[word.decode("utf-8", "surrogateescape")] = value
        at = after
    return found


def entries(layer: Layer) -> Iterator[tuple[tarfile.TarInfo, About, bytes]]:
    """Each entry with what its headers say; what it holds is the layer's next."""
    shared: About = {}
    said: About = {}
    long: dict[str, str] = {}
    left = MOST_SHARED
    while True:
        layer.count(BLOCK)
        block = layer.file.read(BLOCK)
        if not block.strip(b"\0") and len(block) in (0, BLOCK) and layer.bytes + len(block) > BLOCK:
            return  # the end is two empty blocks, or one, or none
        if len(block) < BLOCK:
            raise Refused("it breaks off in the middle" if layer.bytes > BLOCK else "it is no tar")
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise Refused("it is no tar" if layer.bytes == BLOCK else "a header of it is damaged") from None
        if info.size < 0:
            raise Refused("a header of it is damaged")
        if info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            said = records(layer.words(info.size))
        elif info.type == tarfile.XGLTYPE:
            words = layer.words(info.size)
            left -= len(words)
            if left < 0:
                raise Refused(f"it says more than {MOST_SHARED} bytes about all its entries")
            shared.update(records(words))
        elif info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            word = "name" if info.type == tarfile.GNUTYPE_LONGNAME else "linkname"
            long[word] = layer.words(info.size).split(b"\0")[0].decode("utf-8", "surrogateescape")
        else:
            about = {**shared, **said}
            apply(info, about, long)
            yield info, about, block
            said, long = {}, {}


def apply(info: tarfile.TarInfo, about: About, long: dict[str, str]) -> None:
    """What the longer headers say instead of the short one."""
    try:
        info.name = text(about.get("GNU.sparse.name", about.get("path"))) or long.get("name") or info.name
        info.linkname = text(about.get("linkpath")) or long.get("linkname") or info.linkname
        info.size, info.uid, info.gid = (int(about.get(word, getattr(info, word))) for word in ("size", "uid", "gid"))
        whole, _, part = text(about.get("mtime", str(int(info.mtime)).encode())).partition(".")
        info.mtime = int(whole) * 10**9 + int((part + "0" * 9)[:9]) * (-1 if whole.startswith("-") else 1)
    except ValueError:
        raise Refused("a header of it is malformed") from None
    if info.size < 0:
        raise Refused("a header of it is malformed")
    if info.type == tarfile.AREGTYPE and info.name.endswith("/"):
        info.type = tarfile.DIRTYPE
    if info.type not in KNOWN:
        raise Refused(f"{info.name!r} is of a kind that no layer has, {info.type!r}")


def text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "surrogateescape")


def plain(name: str, what: str) -> str:
    """A name without what says nothing; "" for the root."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise Refused(f"{what} {name!r} leads out of it")
    path = "/".join(parts)
    if len(os.fsencode(path)) > MOST_PATH or len(parts) > MOST_DEPTH:
        raise Refused(f"{what} {name[:60]!r}… is longer than {MOST_PATH} bytes or {MOST_DEPTH} directories", "bound")
    return path


def number(field: bytes) -> int:
    """In octal digits, or, after a byte with the highest bit, as it is."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b"\0 ") or b"0", 8)


def pairs(block: bytes, start: int, count: int) -> list[tuple[int, int]]:
    """Offsets and sizes as the older GNU form has them."""
    found = ((block[at : at + 12], block[at + 12 : at + 24]) for at in range(start, start + 24 * count, 24))
    return [(number(offset), number(size)) for offset, size in found if size.strip(b"\0 ")]


def parts(layer: Layer, info: tarfile.TarInfo, about: About, block: bytes) -> tuple[list[tuple[int, int]], int, int]:
    """Which parts of a file are in the layer, as (offset, size), how long the file is, and how many bytes of what it
    holds were read to know that."""
    version = text(about.get("GNU.sparse.major"))
    read = 0
    try:
        if info.type == tarfile.GNUTYPE_SPARSE:
            found, more, length = pairs(block, 386, 4), block[482], number(block[483:495])
            while more:
                block = layer.exactly(BLOCK)
                found, more = found + pairs(block, 0, 21), block[504]
                if len(found) > MOST_WORDS:
                    raise Refused(f"{info.name!r} has too many holes", "bound")
            return found, length, 0
        if "GNU.sparse.map" in about:
            said, length = about["GNU.sparse.map"].split(b","), int(about["GNU.sparse.size"])
        elif version == "1":
            said, rest, length = [], b"", int(about["GNU.sparse.realsize"])
            while not said or len(said) <= 2 * int(said[0]):
                read += BLOCK
                if read > MOST_WORDS:
                    raise Refused(f"{info.name!r} has too many holes", "bound")
                *lines, rest = (rest + layer.exactly(BLOCK)).split(b"\n")
                said += lines
            said = said[1 : 1 + 2 * int(said[0])]
        elif "GNU.sparse.numblocks" in about:
            raise Refused(f"{info.name!r} has its holes in a form that nobody has written since 2006")
        else:
            return [(0, info.size)], info.size, 0
        numbers = [int(each) for each in said]
        return list(zip(numbers[::2], numbers[1::2], strict=True)), length, read
    except (ValueError, LookupError):
        raise Refused(f"{info.name!r} has its holes in a malformed place") from None


class Tree:
    """The directory, which is the root here. Places are where links lead: a file has one, however it is spelt."""

    def __init__(self, layer: Layer, options: dict[str, Any]) -> None:
        self.layer = layer
        self.most: int = options["entries"]
        self.block: int = options["block"]
        self.count = 0
        self.nobodys = 0  # entries whose owner is beyond those that a sandbox has
        self.times: dict[str, int] = {}  # of directories, set when nothing is put into them any more
        self.seen: set[str] | None = None if options["first"] else set()  # what this layer has over others
        self.owners: bool = options["owners"]
        # Where the directory of the last entry is, for the next one is mostly beside it. What is made beside it changes
        # nothing of that; what is removed may.
        self.at: tuple[str, str] | None = None

    def place(self, path: str) -> str:
        """Where a path is: links on the way to it are followed, itself is not."""
        folder, _, name = path.rpartition("/")
        if self.at is None or self.at[0] != folder:
            self.at = folder, os.path.realpath(folder or ".")
        place = os.path.join(self.at[1], name)
        if len(os.fsencode(place)) > MOST_PATH or place.count("/") > MOST_DEPTH:
            raise Refused(f"{path[:60]!r}… leads to more than {MOST_PATH} bytes or {MOST_DEPTH} directories", "bound")
        return place

    def add(self, info: tarfile.TarInfo, about: About, block: bytes) -> None:
        path = plain(info.name, "the name")
        folder, _, name = path.rpartition("/")
        left = info.size if info.type in FILES else 0  # of a link's size nothing follows
        if name.startswith(MARK):
            hidden = name[len(MARK) :]
            if hidden in ("", ".", ".."):
                raise Refused(f"the mark {info.name!r} says that nothing is deleted")
            if self.seen is None:
                pass  # there is nothing below
            elif name == OPAQUE:
                self.hide(os.path.dirname(self.place(path)))
            elif not hidden.startswith(MARK):  # else it is what another union file system writes down for itself
                self.hide_one(self.place(f"{folder}/{hidden}".lstrip("/")))
        elif not path and info.type != tarfile.DIRTYPE:
            raise Refused("its root is no directory")
        elif info.type not in LEFT_OUT:
            if self.seen is not None:
                self.note(self.place(path) if path else os.path.realpath("."))
            self.tally(left)
            left -= self.put(path or ".", info, about, block)
        self.layer.skip(left + -info.size % BLOCK if info.type in FILES else 0)

    def tally(self, size: int) -> None:
        """One more file or directory, of which the tar has so much, and the disk whole blocks."""
        self.count += 1
        if self.count > self.most:
            raise Refused(f"it has more than {self.most} entries", "entries")
        self.layer.take(max(0, max(self.block, size + -size % self.block) - BLOCK - size - -size % BLOCK))

    def note(self, place: str) -> None:
        """This layer has it."""
        while self.seen is not None and place not in self.seen:
            self.seen.add(place)
            place = os.path.dirname(place)

    def put(self, path: str, info: tarfile.TarInfo, about: About, block: bytes) -> int:
        """Make it. Returns how much was read of what it holds."""
        if info.type == tarfile.DIRTYPE:
            self.make(path, lambda: self.directory(path))
            self.finish(path, info, about)
            self.times[path] = int(info.mtime)
        elif info.type == tarfile.SYMTYPE:
            if not info.linkname or "\0" in info.linkname:
                raise Refused(f"the link {info.name!r} leads nowhere")
            self.make(path, lambda: os.symlink(info.linkname, path))
            self.finish(path, info, about)
        elif info.type == tarfile.LNKTYPE:
            target = plain(info.linkname, "the link of")
            if self.place(target) != self.place(path):
                self.make(path, lambda: os.link(target, path, follow_symlinks=False))
        elif info.type == tarfile.FIFOTYPE:
            self.make(path, lambda: os.mkfifo(path, 0o600))
            self.finish(path, info, about)
        else:
            fd = self.make(path, lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
            try:
                read = self.fill(fd, info, about, block)
                self.finish(fd, info, about)
                return read
            finally:
                os.close(fd)
        return 0

    def make(self, path: str, work: Callable[[], T]) -> T:
        """Do it, in the place of what is there, with the directories that lead to it."""
        for _ in range(2):
            try:
                return work()
            except FileExistsError:
                self.remove(path)
            except (FileNotFoundError, NotADirectoryError):
                self.lead_to(os.path.dirname(self.place(path)))
        return work()

    def directory(self, path: str) -> None:
        if not is_directory(path):
            self.place(path)
            os.mkdir(path, 0o700)

    def lead_to(self, folder: str) -> None:
        """Make the directories of a place; where a link leads that leads nowhere yet, too."""
        missing = []
        while not os.path.lexists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for each in reversed(missing):
            self.tally(0)
            os.mkdir(each, 0o755)

    def remove(self, path: str) -> None:
        self.at = None
        remove(path)

    def fill(self, fd: int, info: tarfile.TarInfo, about: About, block: bytes) -> int:
        found, length, read = parts(self.layer, info, about, block)
        holes = found != [(0, length)]
        for offset, size in found:
            if offset < 0 or size < 0 or read + size > info.size or offset + size > length:
                raise Refused(f"{info.name!r} has its holes in a malformed place")
            if offset:
                # What begins and ends within blocks takes them whole.
                blocks = (offset + size - 1) // self.block - offset // self.block + 1
                self.layer.take(blocks * self.block - size)
                os.lseek(fd, offset, os.SEEK_SET)
            read += size
            while size:
                piece = self.layer.exactly(min(size, PIECE))
                size -= len(piece)
                if piece == ZEROS:
                    os.lseek(fd, PIECE, os.SEEK_CUR)
                    holes = True
                else:
                    write(fd, piece)
        if holes:
            os.ftruncate(fd, length)
        return read

    def finish(self, place: int | str, info: tarfile.TarInfo, about: About) -> None:
        """Owner, mode, attributes, time, in this order: each but the last changes one before it otherwise."""
        link: dict[str, bool] = {} if isinstance(place, int) else {"follow_symlinks": False}
        if self.owners:
            self.nobodys += not (0 <= info.uid <= MOST_ID and 0 <= info.gid <= MOST_ID)
            uid, gid = (each if 0 <= each <= MOST_ID else NOBODY for each in (info.uid, info.gid))
            os.chown(place, uid, gid, **link)
        if info.type != tarfile.SYMTYPE:
            os.chmod(place, info.mode & 0o7777)
        for word, value in about.items():
            name = word[len("SCHILY.xattr.") :] if word.startswith("SCHILY.xattr.") else ""
            name = name.replace("%3D", "=").replace("%25", "%")  # as GNU tar writes what would end the word
            if name == "security.capability" or (name.startswith("user.") and not name.startswith("user.overlay.")):
                try:
                    os.setxattr(place, name, value, **link)
                except OSError as error:
                    if error.errno not in NOT_HAD:
                        raise
        if info.type != tarfile.DIRTYPE:
            set_time(place, int(info.mtime), link)

    def hide_one(self, place: str) -> None:
        """Take away what the layers below have at a place."""
        if self.seen is not None and place not in self.seen:
            self.remove(place)
        elif is_directory(place):
            self.hide(place)

    def hide(self, folder: str) -> None:
        """Take away what the layers below have in a directory."""
        if not is_directory(folder):
            return
        self.note(folder)
        for name in os.listdir(folder):
            self.hide_one(os.path.join(folder, name))

    def close(self) -> None:
        for path, mtime in self.times.items():
            with suppress(FileNotFoundError, NotADirectoryError):  # it was replaced later on
                set_time(path, mtime, {"follow_symlinks": False})


def set_time(place: int | str, mtime: int, link: dict[str, bool]) -> None:
    mtime = min(max(mtime, -LATEST * 10**9), LATEST * 10**9)
    os.utime(place, ns=(mtime, mtime), follow_symlinks=link.get("follow_symlinks", True))


def is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def remove(path: str) -> None:
    try:
        if is_directory(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        pass


def write(fd: int, piece: bytes) -> None:
    while piece:
        piece = piece[os.write(fd, piece) :]


def unpack(options: dict[str, Any]) -> dict[str, Any]:
    layer = Layer(sys.stdin.buffer, options["bytes"])
    tree = Tree(layer, options)
    name = ""
    try:
        for info, about, block in entries(layer):
            name = info.name
            tree.add(info, about, block)
        tree.close()
        while rest := layer.file.read(PIECE):  # what fills up a block of a tape
            layer.count(len(rest))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Refused("no space is left", "space") from None
        raise Refused(f"{name!r} cannot be made: {os.strerror(error.errno or 0)}") from None
    return {
        "entries": tree.count,
        "bytes": layer.bytes,
        "taken": layer.bytes + layer.more,
        "nobodys": tree.nobodys,
    }


def lines(path: str) -> list[list[str]]:
    """The fields of each line of a file in /etc; none of what is no file."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return [line.split(":") for line in file.read(PIECE).decode("utf-8", "replace").splitlines()]
    except OSError:
        pass
    return []


def is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 10


def entry(path: str, word: str) -> list[str]:
    """The fields of who is called so, by name or number, in /etc/passwd or /etc/group; none: nobody is."""
    named = [fields for fields in lines(path) if len(fields) > 3 and is_number(fields[2])]
    return next((fields for fields in named if word in (fields[0], fields[2])), [])


def person(user: str) -> tuple[int, int, str | None]:
    """The id of a user by name or number, that of the group, and the home that /etc/passwd gives it."""
    word, _, group = user.partition(":")
    found = entry("/etc/passwd", word)
    if not found and not is_number(word):
        raise Refused(f"its user is {word!r}, whom its /etc/passwd does not know")
    said = entry("/etc/group", group)[2:3] if group else []
    if not said and (not group or group == word):
        said = found[3:4]
    number = said[0] if said else group or "0"  # of who is in no list it is root's
    if not is_number(number):
        raise Refused(f"its user's group is {number!r}, which its /etc/group does not know")
    home = found[5] if len(found) > 5 and found[5].startswith("/") else None
    return int(found[2] if found else word), int(number), home


def settle(options: dict[str, Any]) -> dict[str, Any]:
    """Make what programs expect and the image lacks, and find out who its user is."""
    user, group, home = person(options["user"]) if options["user"] else (None, None, None)
    if user is not None and user > MOST_ID:
        raise Refused(f"its user is {user}, and a sandbox has users up to {MOST_ID}")
    workdir = options["workdir"]
    if workdir and ("\0" in workdir or len(os.fsencode(workdir)) > MOST_PATH or workdir.count("/") > MOST_DEPTH):
        raise Refused(f"its working directory is {workdir[:60]!r}, which is none")
    for path, mode in (("/root", 0o700), ("/tmp", 0o1777), (workdir, 0o755)):
        try:
            if path and not os.path.lexists(path):
                os.makedirs(path, 0o755)
                os.chmod(path, mode)
        except (FileExistsError, NotADirectoryError, FileNotFoundError):
            pass  # the image has something else there, and knows why
    try:
        os.makedirs("/etc", 0o755, exist_ok=True)
        if not os.path.lexists("/etc/hosts") or os.lstat("/etc/hosts").st_size == 0:
            remove("/etc/hosts")
            with open("/etc/hosts", "x") as file:
                file.write("127.0.0.1 localhost\n::1 localhost\n")
            os.chmod("/etc/hosts", 0o644)
    except (FileExistsError, NotADirectoryError, FileNotFoundError):
        pass
    return {"user": user, "group": group, "home": home}


def main() -> None:
    options = json.loads(sys.argv[2])
    try:
        with open("/proc/self/uid_map") as file:  # of one id alone: then all is root's, who is the only one
            options["owners"] = sum(int(line.split()[2]) for line in file) > 1
        os.chroot(sys.argv[1])
        os.chdir("/")
        os.umask(0o022)
        if os.lstat("/").st_uid == NOBODY:
            raise Refused("owners cannot be mapped here", "owners")
        answer = unpack(options) if "bytes" in options else settle(options)
    except Refused as refused:
        answer = {"error": str(refused), "kind": refused.kind}
    # A word or a number that no call of the system takes; links that lead on and on.
    except (ValueError, OverflowError, RecursionError):
        answer = {"error": "something that it says is malformed", "kind": "bad"}
    except MemoryError:
        answer = {"error": "it takes more memory than there is", "kind": "bound"}
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        answer = {"error": os.strerror(error.errno or 0), "kind": "space" if full else "bad"}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
