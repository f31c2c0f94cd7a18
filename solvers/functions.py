"""Allocators and schedules: one line each, with what it cites and supports.

Each is a plain function with its settings. ``registry`` has them beside the planners, which combine them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.solvers.allocators.block_partition import block_partition
from penstock.solvers.allocators.dapple.search import search
from penstock.solvers.allocators.data_parallel import data_parallel
from penstock.solvers.allocators.hetpipe import groupings
from penstock.solvers.allocators.madpipe.contiguous import contiguous_optimum
from penstock.solvers.allocators.madpipe.labels import special_optimum
from penstock.solvers.allocators.model_parallel import model_parallel as spread
from penstock.solvers.allocators.pipedream.hierarchy import allocated
from penstock.solvers.allocators.spp.plans import partitioned
from penstock.solvers.planners import (
    dapple,
    gpipe,
    madpipe,
    model_parallel,
    spp,
)
from penstock.solvers.planners.options import Option
from penstock.solvers.schedules.advance_forward import advance_forward
from penstock.solvers.schedules.chimera import chimera
from penstock.solvers.schedules.eager import eager
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.gpipe import gpipe as all_forwards_first
from penstock.solvers.schedules.inside_out import inside_out
from penstock.solvers.schedules.interleaved import interleaved, looped_bfs, looped_bfs_lifo
from penstock.solvers.schedules.model_parallel import model_parallel as one_at_a_time
from penstock.solvers.schedules.one_f_one_b_star import one_f_one_b_star
from penstock.solvers.schedules.overtaking import overtaking
from penstock.solvers.schedules.periodic_ilp import periodic_ilp
from penstock.solvers.schedules.pipeline_execution import pipeline_execution
from penstock.solvers.schedules.v_shape import v_half, v_min, zb_v
from penstock.solvers.schedules.wpipe import wpipe as double_grouped
from penstock.solvers.schedules.zero_bubble import zb_h1, zb_h2

SYNCHRONOUS = frozenset({"synchronous"})


@dataclass(frozen=True, slots=True)
class Entry:
    """A function of the allocator or schedule table, with what it cites and its settings."""

    build: Callable[..., Any]
    cites: str
    help: str
    exact: bool = False
    supports: frozenset[str] = SYNCHRONOUS
    options: tuple[Option, ...] = ()


ALLOCATORS: dict[str, Entry] = {
    "data-parallel": Entry(data_parallel, "ALGORITHMS 7.1", "one stage on every device", exact=True),
    "block-partition": Entry(
        block_partition,
        "GPipe (Huang et al., NeurIPS 2019); block partition of Bárány and Grinberg",
        "contiguous stages whose largest is as small as can be",
        exact=True,
        options=gpipe.OPTIONS,
    ),
    "model-parallel": Entry(
        spread, "SPP section V", "one stage per device, memory balanced", options=model_parallel.OPTIONS
    ),
    "dapple": Entry(
        search,
        "DAPPLE (Fan et al., PPoPP 2021), section IV, formulas 1-5",
        "memoised search over partition, replication and placement",
        supports=frozenset({"synchronous", "heterogeneous"}),
        options=dapple.SEARCH_OPTIONS,
    ),
    "hetpipe": Entry(
        groupings,
        "HetPipe (Park et al., USENIX ATC 2020), sections 4 and 8",
        "devices grouped into virtual workers",
        supports=frozenset({"synchronous", "heterogeneous"}),
    ),
    "spp": Entry(
        partitioned,
        "SPP (Luo et al., INFOCOM 2022), section IV-B, Algorithms 2 and 4",
        "device order by recursive minimum cuts, then the partition whose slowest part is fastest, per stage count",
        exact=True,
        supports=frozenset({"synchronous", "heterogeneous", "recompute"}),
        options=spp.OPTIONS,
    ),
    "pipedream": Entry(
        allocated,
        "PipeDream (Narayanan et al., SOSP 2019), section 3.1",
        "hierarchical dynamic program over partition and replication",
        exact=True,
        supports=frozenset({"synchronous", "weight_stashing", "double_buffered"}),
    ),
    "madpipe": Entry(
        special_optimum,
        "MadPipe (Beaumont et al., 2022), section 4.2, Algorithm 1",
        "label search for the smallest period with a special processor, by the memory that its stages need at least",
        supports=frozenset({"double_buffered"}),
    ),
    "contiguous-1f1b-star": Entry(
        contiguous_optimum,
        "MadPipe (Beaumont et al., 2022), section 4.1",
        "contiguous stages with the smallest period under 1F1B*",
        exact=True,
        supports=frozenset({"double_buffered"}),
    ),
}

SCHEDULES: dict[str, Entry] = {
    "early-backward": Entry(
        early_backward,
        "DAPPLE section III-B; PipeDream-flush, 1F1B",
        "K forwards, then a backward and a forward in turn",
        supports=frozenset({"synchronous", "round_robin", "several_pipelines"}),
    ),
    "pe": Entry(
        pipeline_execution,
        "SPP (Luo et al., INFOCOM 2022), section IV-A, Algorithm 1",
        "early backward with 4 (S - n) + 1 forwards ahead on stage n",
        supports=frozenset({"synchronous", "round_robin", "several_pipelines"}),
    ),
    "gpipe": Entry(
        all_forwards_first,
        "GPipe (Huang et al., NeurIPS 2019)",
        "all forwards, then all backwards",
        supports=frozenset({"synchronous", "round_robin", "several_pipelines"}),
        options=(Option("backward", "fifo", "order of the backwards", choices=("fifo", "lifo")),),
    ),
    "eager": Entry(
        eager,
        "PipeDream (Narayanan et al., SOSP 2019), section 3.2: 1F1B and 1F1B-RR",
        "one forward and one backward in turn, without a flush",
        supports=frozenset({"weight_stashing", "double_buffered", "double_grouped", "round_robin"}),
    ),
    "wpipe": Entry(
        double_grouped,
        "WPipe (Yang et al., ICLR 2022), section 3.2",
        "M slots of one group, then M of the other, each 1F1B; group 0 a period ahead",
        supports=frozenset({"double_grouped"}),
        options=(
            Option(
                "policy", "A", "warm-up: N - i as in the paper, or 2 (N - i) - 1, which hides transfers", ("A", "B")
            ),
        ),
    ),
    "1f1b-star": Entry(
        one_f_one_b_star,
        "MadPipe (Beaumont et al., 2022), section 4.1",
        "the pattern of a contiguous allocation that keeps fewest micro-batches at its period",
        exact=True,
        supports=frozenset({"double_buffered"}),
    ),
    "inside-out": Entry(
        inside_out,
        "iterative modulo scheduling (Rau, MICRO 1994)",
        "a pattern for stages that share processors, placed from the last stage outwards",
        supports=frozenset({"double_buffered"}),
    ),
    "periodic-ilp": Entry(
        periodic_ilp,
        "MadPipe (Beaumont et al., 2022), section 4.4",
        "the pattern of the smallest period of any allocation, by the periodic ILP",
        exact=True,
        supports=frozenset({"double_buffered"}),
        options=madpipe.ILP_OPTIONS,
    ),
    "advance-forward": Entry(
        advance_forward,
        "AvgPipe (Chen et al., PPoPP 2023), section 4.2, algorithm 1",
        "1F1B with forwards in advance, fewer from stage to stage",
        supports=frozenset({"synchronous", "elastic_averaging", "round_robin", "several_pipelines"}),
        options=(
            Option("delta", 0, "forwards in advance on the first stage beyond 1F1B", low=0),
            Option("afab", False, "all forwards first"),
        ),
    ),
    "interleaved": Entry(
        interleaved,
        "Megatron-LM (Narayanan et al., SC 2021), section 2.2.2",
        "1F1B over several parts of the model on each device, micro-batches in groups",
    ),
    "looped-bfs": Entry(
        looped_bfs,
        "breadth-first pipeline parallelism (Lamy-Poirier, MLSys 2023)",
        "all micro-batches through one of a device's parts, then the next",
    ),
    "looped-bfs-lifo": Entry(
        looped_bfs_lifo,
        "breadth-first pipeline parallelism (Lamy-Poirier, MLSys 2023); PyTorch's ScheduleLoopedBFS",
        "looped-bfs, backwards from the last micro-batch on",
    ),
    "zb-h1": Entry(
        zb_h1,
        "zero bubble (Qi et al., ICLR 2024)",
        "1F1B with weight gradients apart and later, in the memory of 1F1B",
    ),
    "zb-h2": Entry(
        zb_h2, "zero bubble (Qi et al., ICLR 2024)", "weight gradients apart, twice the forwards in advance"
    ),
    "zb-v": Entry(
        zb_v,
        "zero bubble (Qi et al., ICLR 2024)",
        "two parts on each device in a V, weight gradients apart; no bubble for equal times, in the memory of 1F1B",
    ),
    "v-half": Entry(
        v_half, "controllable memory (Qi et al., NeurIPS 2024)", "a V with about half of the activations of 1F1B"
    ),
    "v-min": Entry(
        v_min, "controllable memory (Qi et al., NeurIPS 2024)", "a V with about a third of the activations of 1F1B"
    ),
    "chimera": Entry(
        chimera,
        "Chimera (Li and Hoefler, SC 2021)",
        "pipelines in opposite directions over the same devices, each filling the other's bubbles",
    ),
    "overtaking": Entry(
        overtaking,
        "list scheduling (Graham, 1966) under memory limits",
        "weight gradients apart, for unequal stages and transfers: what is ready overtakes, within the memory",
    ),
    "model-parallel": Entry(
        one_at_a_time,
        "DAPPLE section VII",
        "one micro-batch in the pipeline at a time",
        supports=frozenset({"synchronous", "round_robin", "several_pipelines"}),
    ),
}
