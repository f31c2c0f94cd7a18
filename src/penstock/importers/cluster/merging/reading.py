"""The reading of one node: what the user says, what is noted, and a device as it comes out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from penstock.importers.cluster.hardware import Hardware, recognise
from penstock.importers.cluster.merging.contradictions import agree, told_by
from penstock.schemas.api.topology_import import ImportOptions
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.topology import Communicators


@dataclass(frozen=True)
class Known:
    """A device. ``hardware`` is None for a kind that the table does not have; it was given by an option."""

    kind: str
    memory_bytes: int
    hardware: Hardware | None
    context_bytes: int = 0
    price: float | None = None
    gpus: int = 1
    communicators: Communicators | None = None

    @cached_property
    def plain(self) -> dict[str, Any]:
        """A device of a topology, but for its name."""
        plain = {"kind": self.kind, "memory_bytes": self.memory_bytes, "context_bytes": self.context_bytes}
        return {**plain, "price": self.price, "gpus": self.gpus, "communicators": self.communicators}


@dataclass
class Reading:
    """One reading of alike hosts: what it notes is of all of them."""

    options: Options
    said: list[str] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)


class Options:
    """What the user says, and whether it was needed."""

    def __init__(self, given: ImportOptions) -> None:
        self.given = given
        self.usual: str | None = None
        self.called: dict[str, str] = {}
        self.used: set[str] = set()
        for text in given.devices:
            product, sign, kind = text.partition("=")
            if sign and product.strip() and kind.strip():
                self.called[product.strip().lower()] = kind.strip()
            elif sign or (self.usual is not None and self.usual != text):
                raise InvalidDocument(
                    f"the devices {text!r} are neither one kind nor PRODUCT=KIND",
                    remedy="--device-kind H100, or for a source's names --device-kind big=H100 --device-kind small=A10",
                )
            else:
                self.usual = text.strip()

    def meant(self, product: str | None) -> str | None:
        """What the user says that a product is; None: nothing, or nothing that its name does not tell."""
        if product is not None and product.lower() in self.called:
            self.used.add(product.lower())
            return self.called[product.lower()]
        if told_by(self.usual) <= told_by(product) and product is not None and recognise(product) is not None:
            return None
        if self.usual is None or not agree(product, self.usual):
            return None
        self.used.add("")
        return self.usual

    def unused(self) -> list[str]:
        """Devices that were given for nothing."""
        unused = [f"{product}={kind}" for product, kind in self.called.items() if product not in self.used]
        return unused + ([self.usual] if self.usual is not None and "" not in self.used else [])


def only(devices: Iterable[Known]) -> Hardware | None:
    """The hardware of all devices; None where they differ or the table does not know it."""
    different = {device.hardware for device in devices}
    return different.pop() if len(different) == 1 else None


def gib(size: int) -> str:
    """Bytes in the unit of memory: ``80 GiB``."""
    return f"{size / 2**30:.4g} GiB"


def gb(rate: int) -> str:
    """Bytes per second in the unit of device links: ``450 GB/s``."""
    return f"{rate / 1e9:.4g} GB/s"


def gbit(rate: int) -> str:
    """Bytes per second in the unit of network cards: ``400 Gbit/s``."""
    return f"{rate * 8 / 1e9:.4g} Gbit/s"
