"""The interpreter against PyTorch's pipeline runtime on a GPU: two ranks over NCCL, the same layers in the same order.

    python benchmarks/bench_gpu_interpreter.py [iterations]

Prints one line of JSON: the median ratio of iteration times, Penstock's over PyTorch's, alternated in the same
processes, and the medians. With one GPU both ranks are on it: NCCL takes them to be on two hosts (NCCL_HOSTID) and
sends over its sockets, for both runtimes alike.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch.distributed as dist
from runtimes import MICRO_BATCHES, ROWS, SEED, TorchRuntime, gpt_job, in_processes, laid

from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.runtime.cuda import gpu_count
from penstock.executor.runtime.opening import open_device
from penstock.executor.transport import SETUP_LIMIT, make_transport
from penstock.solvers.model.allocation import Stage
from penstock.solvers.schedules.early_backward import one_f_one_b

ITERATIONS, WARMUP = 30, 5
RUNTIME = "_PipelineScheduleRuntime"
LAYERS, CUT = 10, 5


def compare(rank: int, world_size: int, iterations: int) -> dict[str, float] | None:
    """Return medians over iterations of both runtimes in turn on rank 0, None on others."""
    own_gpus = gpu_count() >= world_size
    if not own_gpus:
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    runtime = open_device(f"cuda:{rank if own_gpus else 0}")
    job = gpt_job()
    chain = Chain(job)
    stages = [Stage(0, CUT - 1, (0,)), Stage(CUT, LAYERS - 1, (1,))]
    plan = laid(chain, stages, MICRO_BATCHES, one_f_one_b)
    program = plan.programs("nccl")[rank]
    transport = make_transport("nccl", program, runtime)
    shapes = chain.infer_shapes(range(ROWS))
    interpreter = Interpreter(program, chain, shapes, seed=SEED, transport=transport, runtime=runtime)
    interpreter.agree()
    interpreter.rehearse()
    group = runtime.new_group(range(world_size), SETUP_LIMIT, "torch's runtime", for_messages=False)
    theirs = TorchRuntime(RUNTIME, plan, chain, rank, job, (group, runtime.device))
    candidates: dict[str, Callable[[], object]] = {"own": lambda: interpreter.step(0), RUNTIME: theirs.step}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(-WARMUP, iterations):
        for name in list(candidates) if i % 2 else list(candidates)[::-1]:
            theirs.zero_grad()
            runtime.synchronize()
            dist.barrier()
            start = time.perf_counter()
            candidates[name]()
            runtime.synchronize()
            dist.barrier()
            if i >= 0:
                times[name].append(time.perf_counter() - start)
            if name == RUNTIME and i == -WARMUP:
                interpreter.step(0)
                theirs.check_equal(interpreter)
    if rank:
        return None
    ratios = [a / b for a, b in zip(times["own"], times[RUNTIME], strict=True)]
    return {"ratio": statistics.median(ratios)} | {f"{n}_ms": 1e3 * statistics.median(t) for n, t in times.items()}


if __name__ == "__main__":
    print(json.dumps(in_processes(compare, 2, int(sys.argv[1]) if len(sys.argv) > 1 else ITERATIONS)))
