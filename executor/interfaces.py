"""This machine's network interfaces: their addresses, and the one that leads to a host."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine's loopback, by name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface. ValueError lists the existing interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(f"interface {interface!r} is neither an address nor one of {names}") from None
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """Return the network interface that has ``address``, to which gloo and NCCL bind, or None."""
    if is_loopback(address) and address != "::1":
        address = "127.0.0.1"
    for _, name in socket.if_nameindex():
        try:
            if interface_address(name) == address:
                return name
        except ValueError:
            continue
    return None


def address_towards(host: str) -> str:
    """Return the address of this machine from which ``host`` is reached. ValueError without a route."""
    if is_loopback(host):
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"no route to {host!r} ({error}); give `interface`, the address of this node") from None
