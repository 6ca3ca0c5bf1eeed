"""Promises of users by name, over real boxes, in this process and on a server:

1. A name is looked up in the sandbox's own /etc/passwd at each use: a user that was made a moment ago is known, with
   its home; `root` needs no entry. So it is for commands, those that are started, and shells.
2. A name that is not there is refused, with those that are; nothing is started.
3. What is at /etc/passwd is the sandbox's doing, and cannot hang the node or make it hold much.
"""

from __future__ import annotations

import pytest

from sandlot.errors import InvalidRequest, Unsupported
from sandlot.node.users import Person, people
from sandlot.sandbox import Sandbox
from tests.support.native import PYTHON


@pytest.fixture
async def people_inside(sandbox: Sandbox) -> None:
    """Of an ordinary user's node there may be only root."""
    try:
        await sandbox.run("true", user=65534)
    except Unsupported as error:
        pytest.skip(error.message)


@pytest.mark.usefixtures("people_inside")
async def test_a_name_is_looked_up_at_each_use(sandbox: Sandbox) -> None:
    assert (await sandbox.run(["id", "-u"], user="root")).stdout == "0\n"
    assert (await sandbox.run(["id", "-u"], user="nobody")).stdout == "65534\n"
    await sandbox.run("echo ann:x:1234:1234::/home/ann:/bin/sh >> /etc/passwd; mkdir /home/ann; chown 1234 /home/ann")
    said = await sandbox.run("id -u; id -un; echo $HOME; pwd", user="ann")
    assert said.stdout == "1234\nann\n/home/ann\n/\n"
    assert (await (await sandbox.start("id -un", user="ann")).wait()).stdout == "ann\n"
    async with await sandbox.shell(user="ann", cwd="/home/ann") as shell:
        assert (await shell.run("touch mine; stat -c %U mine")).stdout == "ann\n"


async def test_a_name_that_is_not_there_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="no user 'ann'") as refused:
        await sandbox.run(["touch", "/tmp/started"], user="ann")
    assert refused.value.hint and "root, nobody" in refused.value.hint
    with pytest.raises(InvalidRequest, match="no user 'ann'"):
        await (await sandbox.start(["touch", "/tmp/started"], user="ann")).wait()
    with pytest.raises(InvalidRequest, match="no user 'ann'"):
        await sandbox.shell(user="ann")
    for wrong in ("a:b", "two words", "", "-x"):
        with pytest.raises(InvalidRequest, match="user"):
            await sandbox.run("true", user=wrong)
    await sandbox.run("echo big:x:70000:70000::/:/bin/sh >> /etc/passwd")
    with pytest.raises(InvalidRequest, match="70000"):
        await sandbox.run("true", user="big")
    assert not (await sandbox.run(["test", "-e", "/tmp/started"])).ok


@pytest.mark.parametrize(
    "passwd",
    [
        "mkfifo /etc/passwd",
        "ln -s /dev/zero /etc/passwd",
        "ln -s passwd /etc/passwd",
        f"ln -s {'x' * 300} /etc/passwd",
        f"{PYTHON} -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/etc/passwd\")'",
        "ln -s /sys/kernel/uevent_seqnum /etc/passwd",
        "mkdir /etc/passwd",
        f"printf 'nobody:x:%0{4400}d:0::/:/bin/sh\\n' 1 >/etc/passwd",
        "true",
    ],
)
async def test_what_is_at_etc_passwd_cannot_hurt(sandbox: Sandbox, passwd: str) -> None:
    assert (await sandbox.run(f"rm /etc/passwd; {passwd}")).ok
    with pytest.raises(InvalidRequest, match="no user 'nobody'"):
        await sandbox.run("true", user="nobody")
    assert (await sandbox.run(["id", "-u"], user="root")).stdout == "0\n"


@pytest.mark.usefixtures("people_inside")
async def test_of_a_huge_passwd_only_the_beginning_counts(sandbox: Sandbox) -> None:
    grow = "yes a:x:1:1::/:/bin/sh | head -c 50000000 >> /etc/passwd; echo ann:x:1234:1234::/:/bin/sh >> /etc/passwd"
    assert (await sandbox.run(grow)).ok
    assert (await sandbox.run(["id", "-u"], user="nobody")).stdout == "65534\n"
    with pytest.raises(InvalidRequest, match="no user 'ann'"):
        await sandbox.run("true", user="ann")


@pytest.mark.usefixtures("people_inside")
async def test_root_may_become_a_user_and_make_one_in_the_host_image(sandbox: Sandbox) -> None:
    if not (await sandbox.run("command -v su && command -v useradd")).ok:
        pytest.skip("this host has no su or no useradd")
    made = await sandbox.run("useradd -m ann && su ann -s /bin/sh -c 'id -un; cd; pwd'")
    assert (made.stdout, made.stderr) == ("ann\n/home/ann\n", "")
    if (await sandbox.run("adduser --help 2>&1 | grep -e --comment")).ok:  # Debian's
        added = await sandbox.run(["adduser", "--comment", "", "--disabled-password", "bob"])
        assert added.ok, added.stderr
        assert (await sandbox.run(["id", "-un"], user="bob")).stdout == "bob\n"


def test_the_lines_of_a_passwd_file() -> None:
    lines = (
        "root:x:0:0:root:/root:/bin/sh",
        "# no",
        "bad:x:-1:0::/:",
        "bad:x:one:0::/:",
        "ann:x:7:8:::",
        "ann:x:9:9::/ann:",
        f"big:x:{'1' * 5000}:0::/:",
        "Zo\u2028e:x:8:8:a\x85b\x0bc:/zoe:",
    )
    text = "\n".join((*lines, "short:x:3", "")).encode()
    assert people(text) == {"root": Person(0, "/root"), "ann": Person(7, None), "Zo\u2028e": Person(8, "/zoe")}
