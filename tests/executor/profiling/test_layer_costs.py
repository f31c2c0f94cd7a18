"""Costs of layers besides their time: against counts by hand, and against the allocator in one whole pass."""

from __future__ import annotations

from copy import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from penstock.examples import gpt, llama
from penstock.examples.synthetic import ImageJob
from penstock.executor.profiling.assembly import assemble
from penstock.executor.profiling.layer_costs import (
    UpdateWorkspace,
    joined,
    kept_bytes,
    update_times_ns,
    update_workspace,
    weight_shares,
    workspace_bytes,
)
from penstock.executor.profiling.memory_use import MemoryWatch, held_bytes
from penstock.executor.profiling.profile_rank import Passes
from penstock.executor.profiling.profiler import MEASURED_EXPECTED_ERROR, expected_error
from penstock.executor.profiling.rounds import (
    GROUP_ROUNDS,
    MIN_ROUNDS,
    PRECISION,
    WARM_UP_ROUNDS,
    Block,
    Rounds,
)
from penstock.executor.profiling.share import make_shares
from penstock.executor.profiling.stopwatch import BusyWatch
from penstock.executor.profiling.tracing import Tracer
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import Job, LayerSpec, load_job
from penstock.executor.runtime.cpu import CPU
from penstock.executor.stage.precision import Training, kept_casts
from penstock.schemas.profile import LayerMeasurement, Measurement, ProfileSource

WIDTH = 192
SAMPLES = 64
WIDE_BYTES = 4 * SAMPLES * WIDTH


class Detour(nn.Module):
    """A layer that makes three tensors at once which nothing keeps, and adds nothing to its input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            apart = [torch.zeros_like(x) for _ in range(3)]
            total = apart[0].add_(apart[1]).add_(apart[2])
        return x + total.sum()


def job(*layers: tuple[str, object]) -> Job:
    specs = [LayerSpec("flat", nn.Flatten), *[LayerSpec(name, build) for name, build in layers]]  # type: ignore[arg-type]
    return ImageJob("costs", lambda: specs, batch_size=SAMPLES, side=8, classes=WIDTH)


def test_workspace_is_what_neither_stash_nor_result_explains() -> None:
    (share,) = make_shares(
        job(("fc", partial(nn.Linear, WIDTH, WIDTH)), ("detour", Detour), ("relu", nn.ReLU)), 0, 2, [SAMPLES], CPU
    )
    stash = kept_bytes(share).stash
    flat, fc, detour = workspace_bytes(share, stash)
    assert flat == 0
    assert detour == pytest.approx(3 * WIDE_BYTES, rel=0.05)
    assert fc >= 4 * WIDTH * WIDTH, "its weight gradient, before it is added"


@pytest.mark.parametrize("width", [8, 512], ids=["little of weights", "much of weights"])
def test_workspace_on_the_meta_device_is_what_the_allocator_gives_out(width: int) -> None:
    """Gradients of weights before they are added, tensors that nothing keeps, scores in the loss."""

    def inner() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH))

    small_job = job(("inner", inner), ("detour", Detour), ("relu", nn.ReLU), ("head", partial(nn.Linear, WIDTH, WIDTH)))
    (share,) = make_shares(small_job, 0, 4, [SAMPLES], CPU)
    measured = workspace_bytes(share, kept_bytes(share).stash)
    chain = Chain(small_job)
    modules = [chain.build_layer(i, device="meta") for i in range(len(chain.specs))]
    traced = Tracer(chain, modules, None, counts_workspace=True).run(SAMPLES).costs
    assert [each.workspace_bytes for each in traced] == pytest.approx(measured, rel=0.02, abs=4096)
    assert Tracer(chain, modules, None).run(SAMPLES).costs[1].workspace_bytes == 0, "unless it is asked for"


@pytest.mark.parametrize("model", [gpt.tiny, llama.tiny])
def test_what_a_trace_under_autocast_keeps_is_what_torch_keeps(model: Job) -> None:
    """Storages, and copies of weights, of each layer under torch's autocast on a CPU, in tensors with numbers."""
    training, size = Training("bf16"), 2
    chain = Chain(model)
    (share,) = make_shares(model, 0, len(chain.specs) - 1, [size], CPU, training)
    with kept_casts():
        measured = kept_bytes(share)
    modules = [chain.build_layer(i, device="meta") for i in range(len(chain.specs))]
    run = Tracer(chain, modules, None, training=training).run(size)
    assert [cost.copied_bytes for cost in run.costs] == measured.copied
    assert [cost.stash_bytes for cost in run.costs] == pytest.approx(measured.stash, rel=0.01, abs=200)
    assert run.shapes == list(chain.infer_shapes(range(size), training, "cpu"))


class Sum(nn.Module):
    """Adds what an early layer wrote."""

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return x + early


@pytest.mark.parametrize(("first", "last", "roots"), [(2, 3, 1), (1, 3, 2), (3, 4, 2), (2, 5, 1)])
def test_layers_do_not_pay_for_a_tensor_that_they_only_pass_on(first: int, last: int, roots: int) -> None:
    """``early`` is written by layer 1 and read by 4 and 5: a share that does neither goes back from its own alone."""
    linear = partial(nn.Linear, WIDTH, WIDTH)
    specs = [
        LayerSpec("flat", nn.Flatten),
        LayerSpec("early", linear, ("x",), ("early",)),
        LayerSpec("one", linear),
        LayerSpec("two", linear),
        LayerSpec("first sum", Sum, ("x", "early"), ("x",)),
        LayerSpec("second sum", Sum, ("x", "early"), ("x",)),
    ]
    skips = ImageJob("skips", lambda: specs, batch_size=SAMPLES, side=8, classes=WIDTH)
    (share,) = make_shares(skips, first, last, [SAMPLES], CPU)
    assert len(share.forward(lambda _index, _results: None)) == roots


def test_the_weight_half_of_a_backward() -> None:
    (share,) = make_shares(
        job(("tanh", nn.Tanh), ("fc", partial(nn.Linear, WIDTH, WIDTH)), ("head", partial(nn.Linear, WIDTH, WIDTH))),
        0,
        3,
        [SAMPLES],
        CPU,
    )
    flat, tanh, fc, _ = weight_shares(share, BusyWatch())
    assert flat == tanh == 0
    assert fc > 0.5, "its input needs no gradient, so nearly all is weight"
    (embedding,) = make_shares(load_job("examples.gpt:tiny"), 0, 1, [2], CPU)
    assert all(0 < part <= 1 for part in weight_shares(embedding, BusyWatch()))


def test_growth_is_counted_to_the_byte() -> None:
    kept: list[Tensor] = []
    with MemoryWatch(CPU) as watch:
        with watch.stretch("temporary"):
            torch.zeros(1000)
        with watch.stretch("kept"):
            kept.append(torch.zeros(1000) + torch.zeros(1000))
        with watch.stretch("nothing"):
            pass
    assert watch.growth("temporary") == (4000 + 32, 0) or watch.growth("temporary") == (4000, 0)
    peak, left = watch.growth("kept")
    assert peak >= 3 * 4000 - 4000
    assert left == held_bytes(kept) == 4000
    assert watch.growth("nothing") == (0, 0)


def test_lower_precision_runs_as_a_rank_does() -> None:
    tiny = load_job("examples.gpt:tiny")
    ((full,), (low,)) = (make_shares(tiny, 1, 4, [2], CPU, Training(one)) for one in ("fp32", "bf16"))  # type: ignore[arg-type]
    assert {tensor.dtype for tensor in full.env.values() if tensor.requires_grad} == {torch.float32}
    with torch.no_grad():
        _, wide = full.forward(lambda i, results: None), kept_bytes(full).stash
    assert sum(kept_bytes(low).stash) != sum(wide)
    assert all(time_ns >= 1 for time_ns in update_times_ns(low, tiny, BusyWatch()))


def test_copies_of_weights_are_kept_once_and_are_no_stash() -> None:
    linear = partial(nn.Linear, WIDTH, WIDTH, bias=False)
    (share,) = make_shares(job(("fc", linear), ("head", linear)), 0, 2, [SAMPLES], CPU, Training("bf16"))
    with kept_casts():
        kept, again = kept_bytes(share), kept_bytes(share)
    assert kept == again
    assert kept.copied == [0, *[2 * WIDTH * WIDTH] * 2], "autocast keeps a copy also where autograd needs none"
    apart = kept_bytes(share)
    assert apart.copied == [0, 0, 0], "where each forward makes its own copies"
    flat, first, second = kept.stash
    assert apart.stash == [flat, first, second + 2 * WIDTH * WIDTH], "the first's input needs no gradient"


def test_a_profile_has_the_copies_with_their_layers() -> None:
    chain = Chain(job(("fc", partial(nn.Linear, WIDTH, WIDTH))))
    modules = list(chain.build_layers(range(2), device="meta").values())
    costs = LayerMeasurement(forward_ns=1, backward_ns=2, stash_bytes=3)
    measured = Measurement(device_kind="cpu", micro_batch_size=1, layers=(costs, costs))
    source = ProfileSource(method="measured", expected_error=0.1)
    shapes = chain.infer_shapes(range(1))
    for copied, expected in ((None, [None, None]), ([0, 5], [None, 5])):
        profile = assemble(chain, modules, shapes, [0, 0], [measured], source=source, copied_bytes=copied)
        assert [layer.copied_bytes for layer in profile.layers] == expected


def rounds_of(*times_ns: tuple[int, ...]) -> Rounds:
    """Build rounds of one layer in one process, from times by round and size: half of each of two passes' time."""
    rounds = Rounds()
    for times in times_ns:
        rounds.add([[Block([time], [0], passes=2, wall_ns=4 * time)] for time in times])
    return rounds


@pytest.mark.tier("quick")
def test_rounds_are_repeated_until_their_mean_is_precise_at_every_size() -> None:
    assert not rounds_of(*[(100, 200)] * (MIN_ROUNDS - 1)).precise
    assert rounds_of(*[(100, 200)] * MIN_ROUNDS).precise
    assert rounds_of((100, 200)).error == 1.0
    stretches = [(100, 200)] * GROUP_ROUNDS + [(100, 240)] * GROUP_ROUNDS
    slow_at_times = rounds_of(*[(100, 200)] * WARM_UP_ROUNDS, *stretches * 2)
    assert slow_at_times.error == pytest.approx(20 * (4 / 3) ** 0.5 / 220 / 2), "deviation 20, of 4 groups about 220"
    assert not slow_at_times.precise, "though its last rounds are equal"
    assert rounds_of(*[(100, 200)] * WARM_UP_ROUNDS, *stretches * 20).precise
    jitter = [(100, 200), (100, 240)] * (MIN_ROUNDS // 2)
    assert rounds_of(*jitter).error == 0, "each group has equally many of both"


@pytest.mark.tier("quick")
def test_the_mean_counts_without_the_first_rounds_and_drift_leaves_the_relation_between_sizes_alone() -> None:
    fast_at_first = rounds_of(*[(50, 90)] * WARM_UP_ROUNDS, *[(100, 200)] * 3, (140, 280))
    assert [fast_at_first.forward_ns(size, 0) for size in (0, 1)] == [[110], [220]]
    assert fast_at_first.passes(1) == 2 * 4
    assert rounds_of((50, 90), (100, 200)).forward_ns(0, 0) == [100], "of few rounds, the later half"
    drifting = rounds_of(*[(100 + 10 * k, 200 + 20 * k) for k in range(MIN_ROUNDS)])
    assert drifting.forward_ns(1, 0)[0] == 2 * drifting.forward_ns(0, 0)[0]


@pytest.mark.tier("quick")
def test_the_layers_of_all_passes_take_their_wall_clock_time() -> None:
    """One process waits for its processor, the other one does work outside its layers: one factor makes up for both."""
    rounds = Rounds()
    for _ in range(2):
        rounds.add([[Block([20, 10], [40, 30], 3, 450), Block([50], [50], 2, 220)]])
    assert rounds.slowdown == pytest.approx((450 + 220) / (3 * 100 + 2 * 100))
    passes = (3, 2)
    layers = [sum(rounds.forward_ns(0, k)) + sum(rounds.backward_ns(0, k)) for k in range(2)]
    total = sum(count * rounds.slowdown * time for count, time in zip(passes, layers, strict=True))
    assert total == pytest.approx(450 + 220)


def test_imprecise_measurements_state_a_larger_error() -> None:
    assert expected_error(0.0) == expected_error(PRECISION) == MEASURED_EXPECTED_ERROR
    assert expected_error(0.5) == pytest.approx(MEASURED_EXPECTED_ERROR + 0.5 - PRECISION)
    assert expected_error(1.0) == 1.0


def test_a_share_runs_at_every_size_with_one_set_of_layers() -> None:
    small, large = make_shares(load_job("examples.gpt:tiny"), 4, 5, [1, 2], CPU)
    assert small.modules is large.modules
    for share, size in ((small, 1), (large, 2)):
        assert {tensor.shape[0] for tensor in share.env.values()} == {size}
        block = Passes(share, BusyWatch()).block(least_s=0.0)
        assert block.passes == 1
        assert len(block.forward_ns) == len(block.backward_ns) == 2
        assert 0 < block.total_ns <= block.wall_ns


class Temporary(torch.optim.SGD):
    """Needs a copy of all that it steps at once, or of one parameter after the other."""

    at_once = True

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        parameters = [one for group in self.param_groups for one in group["params"]]
        for some in [parameters] if self.at_once else [[one] for one in parameters]:
            copies = [one.detach().clone() for one in some]
            del copies


class InTurn(Temporary):
    at_once = False


@pytest.mark.parametrize(("optimizer", "in_turn"), [(Temporary, False), (InTurn, True)])
def test_what_a_step_needs_while_it_runs(optimizer: type[Temporary], in_turn: bool) -> None:
    small_job = job(
        ("fc", partial(nn.Linear, WIDTH, WIDTH, bias=False)), ("head", partial(nn.Linear, WIDTH, 8, bias=False))
    )
    small_job.optimizer = partial(optimizer, lr=0.1)  # type: ignore[method-assign]
    (share,) = make_shares(small_job, 0, 2, [SAMPLES], CPU)
    assert update_workspace(share, small_job) == ([0, 4 * WIDTH * WIDTH, 4 * WIDTH * 8], in_turn)


def test_what_shares_saw_is_joined() -> None:
    """Shares of one layer cannot tell; one that contradicts the others makes it a sum, which is never too little."""
    shares, parts = [(0, 0), (1, 2)], [UpdateWorkspace([5], None), UpdateWorkspace([6, 7], True)]
    assert joined(shares, parts) == ([5, 6, 7], True)
    assert joined([*shares, (3, 4)], [*parts, UpdateWorkspace([8, 9], False)]) == ([5, 6, 7, 8, 9], False)
    assert joined(shares[:1], parts[:1]) == ([5], False)


@pytest.mark.parametrize("foreach", [True, False])
def test_adams_step_needs_as_much_as_it_steps_at_once(foreach: bool) -> None:
    """The root of the second moments: of all parameters, or twice one after the other; fused needs no workspace."""
    tiny = copy(load_job("examples.gpt:tiny"))
    (share,) = make_shares(tiny, 1, 4, [2], CPU)
    for module in share.modules:
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
    sizes = [[one.nbytes for one in module.parameters()] for module in share.modules]
    tiny.optimizer = partial(torch.optim.AdamW, lr=0.1, foreach=foreach)  # type: ignore[method-assign]
    needed, in_turn = update_workspace(share, tiny)
    for workspace, size in zip(needed, sizes, strict=True):
        assert workspace == pytest.approx(sum(size) if foreach else 2 * max(size), rel=0.25)
    assert in_turn is not foreach
    tiny.optimizer = partial(torch.optim.AdamW, lr=0.1, fused=True)  # type: ignore[method-assign]
    assert max(update_workspace(share, tiny).layers_bytes) <= 1024
