"""What the guests said, as tables: promises × guests and attacks × guests. Pure."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]  # what run.py's `boot` returns

HEAD = """\
# What holds where

Each column is a machine of its own: a QEMU guest with a kernel and a root file system out of Debian's packages, in
which the driver's tests, the conformance suite and the attacks of `tests/hostile` ran. `make kernels` runs them,
`python tests/kernels/run.py --write` makes this page as well. A guest's processor was {how}; they ran on {date}.
The attacks' controls ran where none are deselected.

{guests}
"""

PROMISES = """
## Promises

What `GET /v1/capabilities` and `sandlot doctor` say on each machine. What is lost is in `Info.losses` of each sandbox,
and a limit that somebody names and the machine cannot keep is refused before anything starts.
"""

ATTACKS = """
## Attacks

One line for each file of `tests/hostile`, which says what it tries and what must hold. *Contained*: it was tried and
did not work. *Named loss*: the machine does not keep the promise that it tries, and says so (for at least one of the
file's attacks; the others are contained). *Refused*: no sandbox is made on this machine.
"""


def impossible(row: Row) -> bool:
    return any(line["name"] == "sandboxes" and line["state"] == "impossible" for line in row["promises"])


def verdict(row: Row, attack: str) -> str:
    """The cell of one attack on one guest."""
    if impossible(row):
        return "refused"
    found = row["attacks"].get(attack)
    if found is None:
        return "not tried"
    return str(found["verdict"]).lower()


def grid(rows: list[Row], lines: list[tuple[str, list[str]]], corner: str) -> str:
    """A table in Markdown, its columns aligned for who reads the source."""
    table = [[corner, *(row["guest"] for row in rows)], *([name, *cells] for name, cells in lines)]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    text.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in text)


def verdicts(rows: list[Row]) -> str:
    """Attacks × guests."""
    attacks = sorted({name for row in rows for name in row["attacks"]})
    return grid(rows, [(name, [verdict(row, name) for row in rows]) for name in attacks], "attack")


def promises(rows: list[Row]) -> str:
    """Promises × guests, and below it what each loss is."""
    names = list(dict.fromkeys(line["name"] for row in rows for line in row["promises"] if line["name"] != "kernel"))
    table, said = [], []
    for name in names:
        cells = []
        for row in rows:
            found = {line["name"]: line for line in row["promises"]}
            cells.append(found[name]["state"] if name in found else "refused" if impossible(row) else "?")
        table.append((name, cells))
        lost: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            for line in row["promises"]:
                if line["name"] == name and line["state"] != "kept":
                    lost.setdefault((line["found"], line["fix"] or ""), []).append(row["guest"])
        said += [f"* **{name}** ({', '.join(guests)}): {found}. Fix: {fix}." for (found, fix), guests in lost.items()]
    return "\n\n".join([grid(rows, table, "promise"), "\n".join(said)])


def page(rows: list[Row], left_out: list[str]) -> str:
    """docs/concepts/what-holds-where.md."""
    guests = [f"* `{row['guest']}`: {row['about']}. {row['kernel']}: {row['tests']}." for row in rows]
    guests += [f"* left out: {line}." for line in left_out]
    how = " or ".join(sorted({row["processor"] for row in rows}))
    date = " and ".join(sorted({row["date"] for row in rows}))
    head = HEAD.format(how=how, date=date, guests="\n".join(guests))
    return "\n".join([head, PROMISES, promises(rows), ATTACKS, verdicts(rows), ""])
