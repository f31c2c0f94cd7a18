"""Times of a transformer's kernels on one GPU, and of whole per-rank blocks: medians in ns, as JSON.

    python benchmarks/gpu_kernels.py OUT.json [--only SECTION]... [--seconds LIMIT]

Needs Penstock on the path (``PYTHONPATH=src``), torch and a GPU, and takes about a minute. Everything but two rows of
``facts`` is in bf16:

``products``     y = x·wᵀ of a LLaMA's widths at tensor degrees of 1 to 8, its gradients of input and of weight
``attention``    causal ``scaled_dot_product_attention``, by the kernel that torch takes and by two named
``moved``        sums, activations and norms; ``bytes``: what they have to read and write
``grouped``      ``torch._grouped_mm`` of experts that get equally many rows
``blocks``       LLaMA blocks of one of ``tensor`` GPUs without its collectives (`gpu_blocks`)
``updates``      steps of optimizers over fp32 parameters, and the bytes that they allocate meanwhile
``head``         scores and cross-entropy
``facts``        a large product, fp32 and TF32, a copy, a launch, copies from and to the host

A section that takes longer than its limit ends early, and one that fails gives its reason in ``about``. The file has
the format of ``benchmarks/measured/``: `measured_kernels` reads all files there, so rows of a further run are a further
file. Tensors of a shape are new for each shape and the same for its rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmark_rows import Rows, written
from gpu_blocks import BLOCK_COLUMNS, block_rows
from gpu_operators import DEVICE, TENSOR, VOCABULARY, attention, grouped, moved, products, random, timed
from torch import Tensor, nn
from torch.nn import functional

COLUMNS = {
    "products": ("pass", "rows", "inner", "columns", "ns"),
    "attention": ("kernel", "batch", "length", "heads", "kv_heads", "score_width", "forward_ns", "backward_ns"),
    "moved": ("operation", "rows", "width", "bytes", "ns"),
    "grouped": ("pass", "groups", "rows", "inner", "columns", "ns"),
    "blocks": BLOCK_COLUMNS,
    "updates": ("optimizer", "kind", "parameters", "tensors", "ns", "extra_peak_bytes"),
    "head": ("hidden", "tensor", "tokens", "scores", "forward_ns", "backward_ns"),
    "facts": ("fact", "ns"),
}


def facts() -> Iterator[tuple[str, float]]:
    """Yield times of single operations with which other rows are compared."""
    yield "between_events", timed(lambda: None)
    large, other = random(8192, 8192), random(8192, 8192)
    yield "product_8192", timed(lambda: large @ other, least_ms=60)
    single, double = (random(4096, 4096, dtype=torch.float32) for _ in range(2))
    yield "fp32_product_4096", timed(lambda: single @ double)
    torch.backends.cuda.matmul.allow_tf32 = True
    yield "tf32_product_4096", timed(lambda: single @ double)
    torch.backends.cuda.matmul.allow_tf32 = False
    source = torch.empty(2**31, device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    yield "copy_2_gib", timed(lambda: target.copy_(source), least_ms=60)
    yield from _launches()
    device = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    for pinned in (True, False):
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=pinned)
        name = "pinned" if pinned else "pageable"
        yield f"from_{name}_256_mib", timed(lambda host=host: device.copy_(host, non_blocking=True))  # type: ignore[misc]
        yield f"to_{name}_256_mib", timed(lambda host=host: host.copy_(device, non_blocking=True))  # type: ignore[misc]


def _launches() -> Iterator[tuple[str, float]]:
    """Yield the cost of an operation on 8 numbers.

    First the host's cost of issuing it, then its time in a replayed graph.
    """
    few = torch.zeros(8, device=DEVICE)
    rounds = 2000
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(rounds):
        few.add_(1)
    yield "launch_by_host", (time.perf_counter_ns() - start) / rounds
    torch.cuda.synchronize()
    graph, number = torch.cuda.CUDAGraph(), 200
    with torch.cuda.graph(graph):
        for _ in range(number):
            few.add_(1)
    yield "kernel_in_graph", timed(graph.replay) / number


def updates() -> Iterator[tuple[Any, ...]]:
    """Yield rows of ``updates``."""
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "one by one": {"foreach": False},
    }
    for number, tensors in ((2**28, 16), (2**26, 64)):
        for kind, options in kinds.items():
            parameters = [nn.Parameter(torch.zeros(number // tensors, device=DEVICE)) for _ in range(tensors)]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            for name in ("AdamW", "SGD"):
                more: dict[str, Any] = {"lr": 1e-3} if name == "AdamW" else {"lr": 1e-3, "momentum": 0.9}
                optimizer = getattr(torch.optim, name)(parameters, **more, **options)
                optimizer.step()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                optimizer.step()
                torch.cuda.synchronize()
                extra = torch.cuda.max_memory_allocated() - before
                yield name, kind, number, tensors, timed(optimizer.step, least_ms=20, most=8), extra


def head() -> Iterator[tuple[Any, ...]]:
    """Yield rows of ``head``: scores of one of ``tensor`` GPUs and their cross-entropy in fp32."""
    tokens = 4096
    for hidden in (4096, 8192):
        for tensor in TENSOR:
            scores = VOCABULARY // tensor
            weight, x = random(scores, hidden).requires_grad_(), random(tokens, hidden).requires_grad_()
            labels = torch.randint(0, scores, (tokens,), device=DEVICE)

            def loss(x: Tensor = x, weight: Tensor = weight, labels: Tensor = labels) -> Tensor:
                return functional.cross_entropy(functional.linear(x, weight).float(), labels, reduction="sum")

            forward, result = timed(loss, least_ms=10, most=10), loss()
            backward = timed(
                lambda result=result, inputs=(x, weight): torch.autograd.grad(result, inputs, retain_graph=True),  # type: ignore[misc]
                least_ms=10,
                most=10,
            )
            yield hidden, tensor, tokens, scores, forward, backward


SECTIONS: dict[str, tuple[Callable[[], Iterator[tuple[Any, ...]]], float]] = {
    "facts": (facts, 10),
    "products": (products, 15),
    "attention": (attention, 15),
    "moved": (moved, 5),
    "grouped": (grouped, 5),
    "updates": (updates, 5),
    "head": (head, 5),
    "blocks": (lambda: block_rows(timed, random), 30),
}
"""A dict from sections to the function that measures each, and its limit in seconds."""


def about() -> dict[str, Any]:
    """Return the GPU, the versions and the date of a measurement."""
    properties = torch.cuda.get_device_properties(0)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "gpu": properties.name,
        "driver": driver,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def bounded(rows: Iterator[tuple[Any, ...]], seconds: float) -> tuple[list[tuple[Any, ...]], str | None]:
    """Return the rows for which ``seconds`` are enough, and a reason if they are incomplete."""
    end, measured = time.monotonic() + seconds, []
    with contextlib.closing(rows):  # type: ignore[type-var]
        try:
            for row in rows:
                measured.append(row)
                if time.monotonic() > end:
                    return measured, f"ended after {seconds:g} s"
        except RuntimeError as error:
            return measured, f"{type(error).__name__}: {error}"
    return measured, None


def main(arguments: list[str]) -> int:
    """Measure the sections and write the file; return 1 where a section failed. Invalid arguments exit with 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section to measure; default: all")
    parser.add_argument("--seconds", type=float, help="limit of each section, instead of its own")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    description, sections = about(), {}
    for name in options.only or SECTIONS:
        measure, limit = SECTIONS[name]
        start = time.monotonic()
        rows, why = bounded(measure(), options.seconds or limit)
        if why is not None:
            description[f"{name} incomplete"] = why
        sections[name] = Rows(COLUMNS[name], rows)
        print(
            f"{name}: {len(rows)} rows in {time.monotonic() - start:.1f} s{'' if why is None else ', ' + why}",
            flush=True,
        )
        options.out.write_text(written(description, sections), encoding="utf-8")
        torch.cuda.empty_cache()
    return int(any("Error" in str(why) for why in description.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
