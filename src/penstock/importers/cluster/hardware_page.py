"""The table of devices as the documentation shows it; ``python -m`` with the page renews it there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.importers.cluster.hardware import Hardware, table
from penstock.importers.cluster.merging.reading import gb, gbit, gib

BEGIN, END = "<!-- devices: hardware.yaml -->\n", "<!-- end of devices -->\n"


def markdown() -> str:
    """Return a row for each form of each kind, with the source of each figure."""
    lines = [
        "| kind | sold as | memory | between devices of a node | network cards of a node |",
        "|---|---|---|---|---|",
    ]
    lines += [row for forms in table().values() for form in forms for row in _rows(form)]
    return "\n".join(lines) + "\n"


def renewed(page: str) -> str:
    """Return the page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{markdown()}{END}{after}"


def _rows(form: Hardware) -> Iterator[str]:
    memory = " or ".join(gib(size.value) for size in form.memory)
    fabric = f"{form.fabric}, {gb(form.fabric_bytes_per_s.value)}"
    nic, nic_source = "asked for", ""
    if form.nic_bytes_per_s is not None:
        nic = f"{gbit(form.nic_bytes_per_s.value)} {'a device' if form.nic_per_device else 'in all'}"
        nic_source = form.nic_bytes_per_s.source
    yield f"| {form.kind} | {form.form} | {memory} | {fabric} | {nic} |"
    memory_sources = "; ".join(dict.fromkeys(size.source for size in form.memory))
    yield f"| | | *{memory_sources}* | *{form.fabric_bytes_per_s.source}* | {f'*{nic_source}*' if nic_source else ''} |"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(renewed(target.read_text(encoding="utf-8")), encoding="utf-8")
