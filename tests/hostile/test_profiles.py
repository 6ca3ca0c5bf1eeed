"""Attack: do under one profile what only another allows.

Must hold: `strict` leaves no capability, not even through a file or setuid, and denies further calls; `default` traces
nothing; `debug` adds tracing of the box's own processes and nothing else; `nested` adds namespaces and mounts and no
tracing; and the usual programs run under `default`.
"""

from __future__ import annotations

import shutil

import pytest

from sandlot.drivers.native import seccomp
from tests.support.calls import CALL, NUMBERS, answers
from tests.support.hostile import Arena

PROMISE = "system call filter"

TRY = (
    CALL
    + """
os.makedirs("/tmp/x", exist_ok=True)
say("trace", call("ptrace", 0, 0, 0, 0))
say("namespace", call("unshare", 0x10000000))
say("mount", call("mount", b"none", b"/tmp/x", b"tmpfs", 0, None))
say("chroot", call("chroot", b"/"))
say("chown", attempt(os.chown, "/tmp/x", 5, 5))
say("keyctl", call("keyctl", 0, -2, 1))
say("io_uring", call("io_uring_setup", 8, ctypes.create_string_buffer(120)))
say("userfaultfd", call("userfaultfd", 1))
say("shm", call("shmget", 0, 4096, 0o1600))
"""
)
EXPECTED = {
    "strict": set(),
    "default": {"chroot", "chown", "shm"},
    "debug": {"trace", "chroot", "chown", "shm"},
}


async def test_each_profile_allows_what_it_says(arena: Arena) -> None:
    alone = set() if arena.users else {"chown"}  # there is nobody else to give a file to
    for profile, expected in EXPECTED.items():
        said = answers((await arena.python(TRY, profile=profile)).stdout)
        assert {word for word, answer in said.items() if answer == "ok"} == expected - alone, profile
        assert len(said) == 9


@pytest.mark.control
async def test_control_nested_allows_namespaces_and_nothing_else(arena: Arena) -> None:
    said = answers((await arena.python(TRY, nested=True)).stdout)
    # The program is in its new namespace by then, where nobody is mapped yet: no mount in the old mount namespace.
    assert {word for word, answer in said.items() if answer == "ok"} <= {"namespace", "chroot", "shm", "chown"}
    assert said["namespace"] == "ok"
    assert {said[word] for word in ("trace", "keyctl", "io_uring", "userfaultfd")} == {"EPERM"}


async def test_strict_has_no_capability_and_gets_none_back(arena: Arena) -> None:
    box = await arena.box(profile="strict", setuid=True)
    program = "cp /usr/bin/cat /tmp/cat; chmod 6755 /tmp/cat; /tmp/cat /proc/self/status | grep ^Cap"
    sets = (await arena.sh(program, box=box)).stdout.split()[1::2]
    assert len(sets) == 5
    assert {int(each, 16) for each in sets} == {0}


async def test_each_call_that_only_strict_denies_is_denied_there(arena: Arena) -> None:
    names = [name for name in seccomp._STRICT if name in NUMBERS]
    program = CALL + "for name in sys.argv[1:]: say(name, call(name, -1, -1, -1, -1, -1, -1))"
    strict = answers((await arena.python(program, *names, profile="strict")).stdout)
    assert set(strict.values()) == {"EPERM"}
    default = answers((await arena.python(program, *names)).stdout)  # the control
    assert {name for name, answer in default.items() if answer == "EPERM"} <= {"sethostname", "setdomainname"}, default


COMPILE = (
    "printf 'int main(void){return 7;}' > a.c && gcc a.c -o a && ./a; echo $?;"
    "printf 'all:\\n\\techo made\\n' > Makefile && make -s"
)
PROGRAMS = {
    "gcc": (COMPILE, "7\nmade\n"),
    "git": (
        "git init -q r && cd r && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x && echo ok",
        "ok\n",
    ),
    "perl": ("perl -e 'print 6 * 7'", "42"),
    "node": ("node -e 'console.log(6 * 7)'", "42\n"),
    "dpkg-deb": (
        "mkdir -p p/DEBIAN p/opt/x && printf 'Package: x\\nVersion: 1\\nArchitecture: all\\nMaintainer: m\\n"
        "Description: d\\n' > p/DEBIAN/control && echo hi > p/opt/x/f && dpkg-deb -b p p.deb > /dev/null && "
        "mkdir -p /var/lib/dpkg/info /var/lib/dpkg/updates /var/lib/dpkg/triggers && touch /var/lib/dpkg/status && "
        "dpkg -i --force-not-root p.deb > /dev/null && cat /opt/x/f",
        "hi\n",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_the_usual_programs_run(arena: Arena, name: str) -> None:
    if not (shutil.which(name) or "").startswith("/usr/"):
        pytest.skip(f"this host has no {name} in /usr")
    text, expected = PROGRAMS[name]
    result = await arena.sh(text, limits={**arena.limits.model_dump(exclude_defaults=True), "memory": None})
    assert result.stdout == expected, result.stderr
