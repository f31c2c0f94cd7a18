"""CPU time of importing a cluster of 10,000 nodes: each of Slurm's formats alone, then a whole import of two of them.

Prints ``name value unit target ok|MISSED`` for each row; times are of the CPU, the median of several runs.
The tree has three levels: 10,000 nodes of 8 devices below 400 leaf switches, 20 above these, and one above all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median

from penstock.importers.cluster.formats import import_topology
from penstock.importers.cluster.hostlist import expand, fold
from penstock.importers.cluster.ibnetdiscover import read_ibnetdiscover
from penstock.importers.cluster.slurm.scontrol_nodes import read_scontrol_nodes
from penstock.importers.cluster.slurm.scontrol_topology import read_scontrol_topology
from penstock.importers.cluster.slurm.slurm_conf import read_slurm_conf
from penstock.importers.cluster.slurm.slurm_yaml import read_slurm_yaml
from penstock.schemas.api.topology_import import ImportSource

NODES, PER_LEAF, LEAVES_PER_SPINE = 10_000, 25, 20
RUNS = 5


def main() -> None:
    """Run every row."""
    names = [f"n{number:05}" for number in range(NODES)]
    _row("hostlist: fold", lambda: fold(reversed(names)), 0.1)
    _row("hostlist: expand", lambda: expand(fold(names)), 0.1)
    conf, nodes = _conf(names), "".join(_node(name) for name in names)
    _row("topology.conf", lambda: read_slurm_conf(conf), 1)
    _row("topology.conf, every node by name", lambda: read_slurm_conf(_conf(names, ",".join)), 1)
    _row("topology.yaml", lambda: read_slurm_yaml(_yaml(names)), 1)
    _row("scontrol show topology", lambda: read_scontrol_topology(_shown(names)), 1)
    _row("scontrol show nodes", lambda: read_scontrol_nodes(nodes), 1)
    as_json = json.dumps({"nodes": [_json_node(name) for name in names]}, indent=1)
    _row("scontrol show nodes --json", lambda: read_scontrol_nodes(as_json), 1)
    fabric = _fabric(names)
    _row("ibnetdiscover, one adapter a node", lambda: read_ibnetdiscover(fabric), 2)
    sources = [ImportSource(text=conf, format="slurm-conf"), ImportSource(text=nodes, format="scontrol-nodes")]
    _row(f"whole import, {NODES * 8:,} devices", lambda: import_topology(sources), 2)


def _row(name: str, run: Callable[[], object], target_s: float) -> None:
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    took = median(times)
    print(f"{name:45} {took:8.3f} s  target {target_s:g} s  {'ok' if took <= target_s else 'MISSED'}")


def _leaves(names: list[str]) -> list[tuple[str, list[str]]]:
    return [(f"leaf{i // PER_LEAF:03}", names[i : i + PER_LEAF]) for i in range(0, len(names), PER_LEAF)]


def _spines(names: list[str]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    leaves = _leaves(names)
    step = LEAVES_PER_SPINE
    return [(f"spine{i // step:02}", leaves[i : i + step]) for i in range(0, len(leaves), step)]


def _conf(names: list[str], short: Callable[[list[str]], str] = fold) -> str:
    lines = [f"SwitchName={leaf} Nodes={short(nodes)} LinkSpeed=400" for leaf, nodes in _leaves(names)]
    lines += [f"SwitchName={spine} Switches={fold(leaf for leaf, _ in below)}" for spine, below in _spines(names)]
    return "\n".join([*lines, f"SwitchName=core Switches={fold(spine for spine, _ in _spines(names))}"])


def _yaml(names: list[str]) -> str:
    lines = ["- topology: hall", "  tree:", "    switches:"]
    for leaf, nodes in _leaves(names):
        lines += [f"      - switch: {leaf}", f'        nodes: "{fold(nodes)}"']
    for spine, below in _spines(names):
        lines += [f"      - switch: {spine}", f'        children: "{fold(leaf for leaf, _ in below)}"']
    children = fold(spine for spine, _ in _spines(names))
    return "\n".join([*lines, "      - switch: core", f'        children: "{children}"', ""])


def _shown(names: list[str]) -> str:
    lines = [f"SwitchName={leaf} Level=0 LinkSpeed=1 Nodes={fold(nodes)}" for leaf, nodes in _leaves(names)]
    for spine, below in _spines(names):
        nodes = fold(node for _, nodes in below for node in nodes)
        leaves = fold(leaf for leaf, _ in below)
        lines.append(f"SwitchName={spine} Level=1 LinkSpeed=1 Nodes={nodes} Switches={leaves}")
    spines = fold(spine for spine, _ in _spines(names))
    return "\n".join([*lines, f"SwitchName=core Level=2 LinkSpeed=1 Nodes={fold(names)} Switches={spines}"])


def _node(name: str) -> str:
    return (
        f"NodeName={name} Arch=x86_64 CoresPerSocket=32 \n"
        "   CPUAlloc=0 CPUEfctv=128 CPUTot=128 CPULoad=0.05\n"
        "   AvailableFeatures=h100,ib,rack7\n   ActiveFeatures=h100,ib,rack7\n"
        "   Gres=gpu:h100:8(S:0-1)\n"
        f"   NodeAddr={name} NodeHostName={name} Version=24.05.3\n"
        "   OS=Linux 5.14.0-427.el9.x86_64 #1 SMP PREEMPT_DYNAMIC Fri May 3 2024 \n"
        "   RealMemory=2000000 AllocMem=0 FreeMem=1900000 Sockets=2 Boards=1\n"
        "   State=MIXED ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A\n"
        "   Partitions=gpu \n"
        "   BootTime=2026-01-05T10:00:00 SlurmdStartTime=2026-01-05T10:00:00\n"
        "   LastBusyTime=2026-01-05T10:00:00 ResumeAfterTime=None\n"
        "   CfgTRES=cpu=128,mem=2000000M,billing=128,gres/gpu=8,gres/gpu:h100=8\n"
        "   AllocTRES=cpu=64,mem=1000000M,gres/gpu=4,gres/gpu:h100=4\n"
        "   CurrentWatts=0 AveWatts=0\n\n"
    )


def _json_node(name: str) -> dict[str, object]:
    tres = "cpu=128,mem=2000000M,billing=128,gres/gpu=8"
    return {"name": name, "state": ["IDLE"], "gres": "gpu:h100:8(S:0-1)", "tres": tres, "tres_used": "", "reason": ""}


def _fabric(names: list[str]) -> str:
    blocks = []
    for index, (leaf, nodes) in enumerate(_leaves(names)):
        ports = []
        for port, node in enumerate(nodes, start=1):
            guid = f"{index * PER_LEAF + port:016x}"
            ports.append(f'[{port}]\t"H-{guid}"[1]({guid}) \t\t# "{node} mlx5_0" lid 1 4xNDR')
            adapter = f'[1]({guid}) \t"S-{index:016x}"[{port}]\t\t# lid 1 lmc 0 "{leaf}" lid 1 4xNDR'
            blocks.append(f'vendid=0x2c9\ncaguid=0x{guid}\nCa\t1 "H-{guid}"\t\t# "{node} mlx5_0"\n{adapter}\n')
        head = f'switchguid=0x{index:x}\nSwitch\t64 "S-{index:016x}"\t\t# "{leaf}" enhanced port 0 lid 1 lmc 0'
        blocks.append("\n".join([head, *ports, ""]))
    return "\n".join(blocks)


if __name__ == "__main__":
    main()
