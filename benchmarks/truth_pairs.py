"""Pairs of layouts whose order Megatron-Bridge's performance notes publish, by model FLOPs a second and GPU.

llama-3-70b is fine-tuned in FP8 on 32 H100 with 4,096 tokens and 32 samples a step; the others are compared with the
first layout. Qwen3-30B-A3B is trained on 16 H100 with 1,024 samples a step, with and without
``overlap_moe_expert_parallel_comm``. Plans have no such overlap, so it is simulated as if it hid all of each
all-to-all, and not counted. All are simulated on the kind that the pre-training row of Megatron-Bridge's table
calibrates (`truth_bridge`).
"""

from __future__ import annotations

from truth_layouts import Run, judged, mark

from penstock.examples.catalogue import shape

_SHAPE = shape("llama-3-70b").model_copy(update={"sequence_length": 4096})
_BASE = Run(_SHAPE, 4, 8, "H100", 32, tensor=4, pipeline=4, virtual_stages=5)
PUBLISHED = (
    (_BASE, 704.0),
    (_BASE._replace(pipeline=8), 668.0),
    (_BASE._replace(tensor=8), 508.7),
    (_BASE._replace(recompute=("mlp",)), 593.6),
)
"""The layouts, and TFLOP/s per GPU."""
_MIXTURE = shape("qwen3-30b-a3b").model_copy(update={"sequence_length": 4096})
_EXPERTS = Run(_MIXTURE, 2, 8, "H100", 1024, tensor=1, pipeline=1, expert=16)
OVERLAPPED = ((_EXPERTS, 24.7), (_EXPERTS._replace(hidden=frozenset({"expert"})), 21.0))
"""The layouts without and with overlap, and seconds of a step."""


def report(speed: float) -> int:
    """Print the table; return the number of layouts that are predicted on the wrong side of the first."""
    base, reached = judged(_BASE, speed).seconds, PUBLISHED[0][1]
    missed = 0
    print("Megatron-Bridge, order of layouts of llama-3-70b on 32 H100; times over the first's")
    for run, tera in PUBLISHED:
        prediction = judged(run, speed)
        ratio, measured = prediction.seconds / base, reached / tera
        wrong = run is not _BASE and (ratio > 1) != (measured > 1)
        missed += wrong
        verdict = "the first" if run is _BASE else mark(wrong)
        print(f"  {run.layout:35} measured {measured:5.2f}, predicted {ratio:5.2f}: {verdict}")
    times = [(judged(run, speed).seconds, seconds) for run, seconds in OVERLAPPED]
    ratio, measured = (after / before for before, after in zip(*times, strict=True))
    print(f"Qwen3-30B-A3B on 16 H100, {OVERLAPPED[1][0].layout}: measured {measured:.2f}, predicted {ratio:.2f}")
    print(f"  without overlap: measured {times[0][1]:.1f} s, predicted {times[0][0]:.1f} s")
    return missed
