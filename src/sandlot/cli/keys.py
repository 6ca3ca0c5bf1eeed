"""`sandlot keys`: who may call a server of this host, and how much of it they may use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from sandlot.api import Quota
from sandlot.cli import say
from sandlot.errors import InvalidRequest, invalid
from sandlot.server.keys import Key, Keys, Scope, keys_file

keys = typer.Typer(help="API keys of the servers of this host.")

State = Annotated[Path | None, typer.Option(help="As of the server: where its node keeps its directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@keys.command()
def create(
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose it is: it sees this tenant's sandboxes and images only.")
    ] = None,
    operator: Annotated[bool, typer.Option("--operator", help="It sees those of all tenants.")] = False,
    scope: Annotated[Scope, typer.Option(help="`read` looks, `run` does all else too.")] = Scope.RUN,
    boxes: Annotated[int | None, typer.Option(help="Sandboxes that the tenant may have at once.")] = None,
    cpus: Annotated[float | None, typer.Option(help="CPUs that they may have together.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory that they may have together, such as 64G.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second.")] = None,
    state_dir: State = None,
    json: Json = False,
) -> int:
    """Make a key and print it. It cannot be shown again: what is kept of it is a hash.

    A server that runs lets it in at once. A server without any key lets in every program of this machine, and from its
    first key on nobody without one.
    """
    if operator == (tenant is not None):
        raise InvalidRequest(
            "a key is either of one tenant or the operator's", "`sandlot keys create --tenant NAME`, or `--operator`"
        )
    try:
        quota = Quota.model_validate({"boxes": boxes, "cpus": cpus, "memory": memory})
        if operator and quota != Quota():
            raise InvalidRequest("a quota is a tenant's, and the operator has none", "give it to a key with `--tenant`")
        made, words = Keys(keys_file(state_dir)).create(tenant, scope, quota, rate)
    except ValidationError as error:
        raise invalid(error) from None
    if json:
        say.data({**_facts(made), "key": words})
    else:
        say.note(f"{made.id}, {'the operator' if tenant is None else f'tenant {tenant}'}'s, is shown this once:")
        say.out(words)
    return 0


@keys.command("list")
def list_(state_dir: State = None, json: Json = False) -> int:
    """Show which keys there are: what they may do, not the keys."""
    found = Keys(keys_file(state_dir)).all()
    if json:
        say.data([_facts(each) for each in found])
    else:
        say.table(("id", "tenant", "scope", "boxes", "cpus", "memory", "rate", "made"), [_row(each) for each in found])
    return 0


@keys.command()
def revoke(
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="As `sandlot keys list` shows them.")],
    state_dir: State = None,
    json: Json = False,
) -> int:
    """Take keys back. A server that runs knows at once; what a key made stays."""
    there = Keys(keys_file(state_dir))
    for key_id in ids:
        there.revoke(key_id)
        if not json:
            say.note(f"revoked {key_id}")
    if json:
        say.data([{"id": key_id} for key_id in ids])
    return 0


def _facts(key: Key) -> dict[str, object]:
    return key.model_dump(mode="json", exclude={"hash"})


def _row(key: Key) -> tuple[str, ...]:
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_at))
    memory = None if key.quota.memory is None else f"{key.quota.memory / (1 << 30):g}G"
    numbers = (key.quota.boxes, key.quota.cpus, memory, key.rate)
    return key.id, key.tenant or "(operator)", key.scope.value, *("-" if n is None else f"{n}" for n in numbers), made
