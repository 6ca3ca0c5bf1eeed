"""Which sandboxes are listed, and in which order: a page at a time, by plain functions.

The order is that of their creation, which nothing changes afterwards, and a cursor names a place in it, not a number of
sandboxes: what comes or goes between two pages shifts nothing.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence

from sandlot.api import Filter, Info, Page
from sandlot.errors import InvalidRequest
from sandlot.node.live import Live

MOST = 1000  # of one page

_CURSOR = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)~([!-~]{1,100})")


Place = tuple[float, str]


def place(cursor: str | None, limit: int) -> Place:
    """Where a page of so many begins: after that one. Raises InvalidRequest."""
    if not 0 < limit <= MOST:
        raise InvalidRequest(f"a page has 1 to {MOST} sandboxes, not {limit}")
    if cursor is None:
        return 0.0, ""
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise InvalidRequest(f"{cursor!r} is not a cursor", "take it from the page before, as it is")
    return float(match[1]), match[2]


def page(found: Iterable[Live | Info], wanted: Filter, after: Place, limit: int, ended: Sequence[Info] = ()) -> Page:
    """The first `limit` after a place, of those that were found and of those that `ended`, of which only such were
    looked for as are wanted. What is in both ended meanwhile."""
    gone = {each.id for each in ended}
    later = (each for each in found if _order(each) > after and each.id not in gone and _fits(each, wanted))
    first = heapq.nsmallest(limit + 1, (*later, *ended), key=_order)
    infos = tuple(each if isinstance(each, Info) else each.info() for each in first[:limit])
    more = f"{infos[-1].created_at!r}~{infos[-1].id}" if len(first) > limit else None
    return Page(sandboxes=infos, next=more)


def _order(each: Live | Info) -> Place:
    return each.created_at, each.id


def _fits(each: Live | Info, wanted: Filter) -> bool:
    if isinstance(each, Info):
        state, labels, image, tenant = each.state, each.labels, each.image, each.tenant
    else:
        state = "paused" if each.box.paused else "running"
        labels, image, tenant = each.spec.labels, each.spec.image, each.spec.tenant
    return (
        state in wanted.states
        and (wanted.image is None or image == wanted.image)
        and (wanted.tenant is None or tenant == wanted.tenant)
        and all(name in labels and value in (None, labels[name]) for name, value in wanted.labels.items())
    )
