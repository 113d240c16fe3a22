"""Refuses requests for foreign host names and from pages of other origins.

A web page elsewhere can make its own name point to this machine (DNS rebinding). Its browser then sends
requests here, with that name in the Host header, and lets the page read the replies. An IP address in the
Host header cannot be forged in this way.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from retriever.service.replies import error_reply

# Names of this machine that no other machine can have.
LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
LONGEST_NAME = 253  # letters of a name in the domain name system
# A host with an optional port; an IPv6 address stands in brackets.
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.%]+)\]|(?P<name>[^\s:/?#@\[\]]+))(?::\d*)?", re.IGNORECASE)


def host_name(header: str) -> str:
    """Return the name or address in a Host header: lower case, without brackets, port and last dot.

    Args:
        header: Value of the header.

    Returns:
        The name; empty if the header is none.
    """
    match = _HOST.fullmatch(header.strip())
    if match is None:
        return ""
    name = match["address"] or match["name"]
    name = name.lower().removesuffix(".")
    return name if len(name) <= LONGEST_NAME else ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a name is; None for other names."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Return whether only this machine is reached by a host name or address.

    Args:
        name: A name or an IP address, as `host_name` returns it.
    """
    address = _address(name)
    if address is None:
        return name in LOOPBACK_NAMES
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


@dataclass(frozen=True)
class AllowedHosts:
    """The hosts that a service answers for.

    They are the loopback names and addresses, the host that it listens on and `names`. A service that other
    machines reach also answers for every IP address and for this machine's own name.

    Attributes:
        bound: Address or name that the service listens on.
        names: Further names; `*` stands for any characters, as in `*.cluster.local`.
    """

    bound: str = "127.0.0.1"
    names: Sequence[str] = ()

    def allows(self, header: str) -> bool:
        """Return whether a request with this Host header is answered.

        Args:
            header: Value of the header; empty if there is none.
        """
        name = host_name(header)
        if not name:
            return False
        bound = self.bound.lower()
        if is_loopback(name) or name == bound:
            return True
        if any(fnmatchcase(name, allowed.lower()) for allowed in self.names):
            return True
        if is_loopback(bound):
            return False
        return _address(name) is not None or name in _machine_names()


def _machine_names() -> tuple[str, ...]:
    """Return the name of this machine, with and without its domain."""
    name = socket.gethostname().lower()
    return name, name.partition(".")[0]


class RequireHost:
    """Replies 403 to a request for a foreign host, or from a page of another origin.

    Args:
        app: The application.
        hosts: The hosts that are answered for; None for all, where a token protects the service.
    """

    def __init__(self, app: Any, hosts: AllowedHosts | None):
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if not refusal:
            await self.app(scope, receive, send)
            return
        reply = error_reply(403, refusal)
        await reply(scope, receive, send)

    def _refusal(self, scope: Any) -> str:
        """Return why a request is refused; empty if it is not."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if self.hosts is not None and not self.hosts.allows(host):
            name = host_name(host)
            if not name:
                return "send the header Host with the name or address of this service"
            return f"host {name!r}: start the service with --allowed_hosts {name}, or with a token"
        if origin and origin.partition("://")[2].lower() != host.lower():
            return "pages of other origins are not served"
        return ""
