"""Which addresses anybody on the internet could reach: all that a server asks on behalf of others, who could otherwise
reach through it what only its host reaches. Who may be asked in spite of it, its callers decide.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable

from sandlot.aio import deadline
from sandlot.errors import SandlotError, Unreachable

_LOOKUP_SECONDS = 10.0
# Networks whose addresses lead to those of another one, which stand in them.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


async def address_of(host: str, refusal: Callable[[str], SandlotError]) -> str:
    """An address of a host, all of whose addresses are public. It is to be connected to as it is: the name can
    mean another one a moment later. Raises Unreachable (no such host), or the `refusal` of an address that is not
    public."""
    loop = asyncio.get_running_loop()
    try:
        async with deadline(_LOOKUP_SECONDS, f"looking up {host}"):
            found = await loop.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"there is no host {host}: {error.strerror}") from error
    except UnicodeError as error:
        raise Unreachable(f"{host!r} cannot be asked: it is no host's name") from error
    addresses = [ipaddress.ip_address(each[4][0]) for each in found]
    for address in addresses:
        if not is_public(address):
            raise refusal(str(address))
    return str(addresses[0])


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.is_site_local or (inner is not None and not is_public(inner)):
            return False
    return address.is_global and not address.is_multicast
