"""Output and configuration files of Slurm, for tests of the readers."""

from __future__ import annotations

import json
from typing import Any


def record(
    name: str,
    state: str = "IDLE",
    gres: str = "gpu:h100:8(S:0-1)",
    tres: str | None = "gres/gpu=8,gres/gpu:h100=8",
    allocated_tres: str = "",
    more: str = "",
) -> str:
    """Return one node as Slurm 24.05 prints it, without the fields that no reader uses."""
    tracked = (
        "" if tres is None else f"   CfgTRES=cpu=128,mem=2000000M,billing=128,{tres}\n   AllocTRES={allocated_tres}\n"
    )
    return (
        f"NodeName={name} Arch=x86_64 CoresPerSocket=32 \n"
        "   CPUAlloc=0 CPUEfctv=128 CPUTot=128 CPULoad=0.05\n"
        "   AvailableFeatures=ib,rack7\n"
        f"   Gres={gres}\n"
        f"   NodeAddr={name} NodeHostName={name} Version=24.05.3\n"
        "   OS=Linux 5.14.0-427.el9.x86_64 #1 SMP PREEMPT_DYNAMIC Fri Gres=none \n"
        "   RealMemory=2000000 AllocMem=0 FreeMem=1900000 Sockets=2 Boards=1\n"
        f"   State={state} ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A\n"
        "   Partitions=gpu \n"
        f"{tracked}"
        "   CurrentWatts=0 AveWatts=0\n"
        f"{more}   \n\n"
    )


def on_one_line(text: str) -> str:
    return "\n".join(" ".join(part.split()) for part in text.split("\n\n") if part.strip()) + "\n"


def as_json(*nodes: dict[str, Any]) -> str:
    return json.dumps({"meta": {}, "nodes": list(nodes), "errors": []}, indent=1)


REASON = "   Reason=gpu 3 fell off: State=IDLE x=1 [root@2026-01-05T10:00:00]\n   Comment=call 17\n"
CLUSTER = (
    record("n1")
    + record("n2", "MIXED+PLANNED", allocated_tres="cpu=64,mem=1G,gres/gpu=3,gres/gpu:h100=3")
    + record("n3", "IDLE+DRAIN", more=REASON)
    + record("login", gres="(null)", tres="billing=1")
)
SHOWN_TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=empty Level=0 LinkSpeed=1 Nodes=
SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=n[1-2] Switches=leaf1,empty
SwitchName=spine2 Level=1 LinkSpeed=1 Switches=leaf2
SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-4] Switches=spine[1-2]
"""
CONF_TREE = """\
# the machine hall
SwitchName=leaf1 Nodes=n[1-3]   # a rack
switchname = leaf2 NODES=n[4,\\
    6] LinkSpeed=100

SwitchName=spine Switches=leaf[1-2]
"""
SEVERAL = """\
---
- topology: plain
  cluster_default: false
  flat: true
- topology: hall   # the whole machine
  cluster_default: True
  tree:
    switches:
      - {switch: root, children: "leaf[1-2]"}
      - switch: leaf1
        nodes: n[01-02]
      - switch: leaf2
        nodes: [n03, 'n[04-05]']
- topology: racks
  block:
    block_sizes: [2, 4]
    blocks:
      - {block: b1, nodes: n1}
      - {block: b2, nodes: n2}
      - {block: b3, nodes: "n[3-4]"}
- topology: circle
  ring: {rings: [{ring: r, nodes: "n[1-3]"}]}
"""
TORUS = """\
- topology: cube
  torus3d:
    toruses:
      - name: t
        dims: {x: 3, y: 2, z: 1}
        nodes: n[0-5]
        placements: [{dims: {x: 1, y: 1, z: 1}}]
"""
FLAT = "- {topology: a, flat: true}"
