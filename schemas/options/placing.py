"""Options of a placement request that a plan request does not have."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from penstock.schemas.options.option import Option, described
from penstock.schemas.options.planning import PLAN_OPTIONS

NODES = "Nodes"
GOAL = "Goal"

PLACE_OPTIONS = {
    "free": Option(
        panel=NODES,
        help="free nodes as a hostlist (gpu[001-128]), or a free device (gpu001/3)",
        default="all",
        pointer="/free",
        flag="--free",
        metavar="NODES",
        is_repeatable=True,
    ),
    "busy": Option(
        panel=NODES,
        help="nodes or devices that are not free, instead of the free ones",
        default="none",
        pointer="/busy",
        flag="--busy",
        metavar="NODES",
        is_repeatable=True,
    ),
    "nodes_from": Option(
        panel=NODES,
        help="output of `scontrol show nodes` or `kubectl get nodes -o json`; - is standard input",
        default="all are free",
        flag="--nodes-from",
        metavar="FILE",
    ),
    "nodes": Option(
        panel=NODES,
        help="how many nodes: 16, 4-16, or 4- for 4 and more",
        default="any number",
        pointer="/jobs/0/nodes",
        flag="--nodes",
        metavar="COUNT",
    ),
    "objective": Option(
        panel=GOAL,
        help="what the chosen nodes are best at: samples per second, the same per device, or speed in a budget",
        default="throughput",
        pointer="/objective",
        flag="--objective",
        values={
            "throughput": "samples per second",
            "throughput_per_device": "samples per second and device",
            "fastest_within_budget": "speed within a budget; with a deadline, the fewest devices that keep it",
        },
        kind="choice",
    ),
    "max_devices": Option(
        panel=GOAL,
        help="budget of devices, such as 64",
        default="no limit",
        pointer="/jobs/0/budget/devices",
        flag="--max-devices",
        metavar="N",
        kind="whole",
    ),
    "max_price": Option(
        panel=GOAL,
        help="budget of money per hour, in the currency of the devices' prices, such as 98.50",
        default="no limit",
        pointer="/jobs/0/budget/price_per_hour",
        flag="--max-price",
        metavar="PRICE",
        kind="number",
    ),
    "deadline": Option(
        panel=GOAL,
        help="longest time of one step: 2.5s, 800ms",
        default="no limit",
        pointer="/jobs/0/budget/time_per_global_batch_ns",
        flag="--deadline",
        metavar="DURATION",
        kind="duration",
    ),
    "time_limit": replace(
        PLAN_OPTIONS["time_limit"],
        help="stop the whole search after this time: 30s, 5min",
        default="no limit, but large sets of nodes get regular layouts only",
        pointer="/time_limit_ns",
        page="",
    ),
}
"""Options of a placement request, by the names of the command's parameters."""
about = partial(described, PLACE_OPTIONS)
