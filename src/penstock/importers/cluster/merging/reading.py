"""The reading of one node: the user's options, the notes, and the devices that result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from penstock.importers.cluster.hardware import Hardware, recognise
from penstock.importers.cluster.merging.contradictions import agree, precision_of
from penstock.schemas.api.topology_import import ImportOptions
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.topology import Communicators


@dataclass(frozen=True)
class NodeDevice:
    """A device. ``hardware`` is None for a kind that the table does not have, which an option states."""

    kind: str
    memory_bytes: int
    hardware: Hardware | None
    context_bytes: int = 0
    price: float | None = None
    gpus: int = 1
    communicators: Communicators | None = None

    @cached_property
    def plain(self) -> dict[str, Any]:
        """Return the device as plain data of a topology, without its name."""
        plain = {"kind": self.kind, "memory_bytes": self.memory_bytes, "context_bytes": self.context_bytes}
        return {**plain, "price": self.price, "gpus": self.gpus, "communicators": self.communicators}


@dataclass
class Reading:
    """One reading of alike hosts; its notes are about all of them."""

    options: Options
    sentences: list[str] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)


class Options:
    """The user's options about devices, and whether each was needed."""

    def __init__(self, import_options: ImportOptions) -> None:
        self.import_options = import_options
        self.usual: str | None = None
        self.called: dict[str, str] = {}
        self.used: set[str] = set()
        for text in import_options.devices:
            product, sign, kind = text.partition("=")
            if sign and product.strip() and kind.strip():
                self.called[product.strip().lower()] = kind.strip()
            elif sign or (self.usual is not None and self.usual != text):
                raise InvalidDocument(
                    f"device kind {text!r} is neither PRODUCT=KIND nor the only kind",
                    remedy="--device-kind H100, or one for each name in the sources: --device-kind big=H100 "
                    "--device-kind small=A10",
                )
            else:
                self.usual = text.strip()

    def meant(self, product: str | None) -> str | None:
        """Return the kind that the user states for a product; None without one, or if its name is as exact."""
        if product is not None and product.lower() in self.called:
            self.used.add(product.lower())
            return self.called[product.lower()]
        if precision_of(self.usual) <= precision_of(product) and product is not None and recognise(product) is not None:
            return None
        if self.usual is None or not agree(product, self.usual):
            return None
        self.used.add("")
        return self.usual

    def unused(self) -> list[str]:
        """Return the devices of the options that no product used."""
        unused = [f"{product}={kind}" for product, kind in self.called.items() if product not in self.used]
        return unused + ([self.usual] if self.usual is not None and "" not in self.used else [])


def only(devices: Iterable[NodeDevice]) -> Hardware | None:
    """Return the hardware of all devices; None where they differ or the table does not know it."""
    different = {device.hardware for device in devices}
    return different.pop() if len(different) == 1 else None


def gib(size: int) -> str:
    """Format bytes in the unit of memory: ``80 GiB``."""
    return f"{size / 2**30:.4g} GiB"


def gb(rate: int) -> str:
    """Format bytes per second in the unit of device links: ``450 GB/s``."""
    return f"{rate / 1e9:.4g} GB/s"


def gbit(rate: int) -> str:
    """Format bytes per second in the unit of network cards: ``400 Gbit/s``."""
    return f"{rate * 8 / 1e9:.4g} Gbit/s"
