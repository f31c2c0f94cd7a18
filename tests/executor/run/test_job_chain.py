"""The job protocol, and the chain that a job makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.executor.run.chain import Chain, derived_seed
from penstock.executor.run.job import Job, LayerSpec, SimpleJob, alike, checked_job, load_job
from penstock.schemas.errors import InvalidDocument, ModelMismatch, NotFound, PenstockError

WIDTH = 4


class Add(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.detach() + 1


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class SmallJob(SimpleJob):
    def __init__(self, layers: list[Any], outputs: tuple[str, ...] = ("x",)) -> None:
        super().__init__("small", batch_size=8, seed=3)
        self._layers = layers
        self.outputs = outputs

    def layers(self) -> list[Any]:
        return self._layers

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        return {"x": torch.ones(len(rows), WIDTH), "mask": torch.ones(len(rows), 1)}, None

    def loss(self, outputs: dict[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        return torch.stack([tensor.sum() for tensor in outputs.values()]).sum(), 1

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)


def chain(*layers: Any, outputs: tuple[str, ...] = ("x",)) -> Chain:
    return Chain(SmallJob(list(layers), outputs))


def test_pairs_read_and_write_x() -> None:
    pairs = chain(("a", linear), ("b", linear), ("c", linear))
    assert pairs.names == ("a", "b", "c")
    assert pairs.specs[1] == LayerSpec("b", linear, ("x",), ("x",))
    assert pairs.cuts == (("x",), ("x",))
    assert pairs.inputs == (("x",), (), ())
    assert [pairs.writers(i) for i in range(2)] == [(0,), (1,)]


def test_a_residual_crosses_every_cut_to_its_last_reader_and_no_further() -> None:
    residual = chain(
        ("a", linear),
        LayerSpec("b", linear, ("x",), ("y",)),
        LayerSpec("c", linear, ("y",), ("y",)),
        LayerSpec("d", Add, ("x", "y"), ("x",)),
        ("e", linear),
    )
    assert residual.cuts == (("x",), ("x", "y"), ("x", "y"), ("x",))
    assert [residual.writers(i) for i in range(4)] == [(0,), (0, 1), (0, 2), (3,)]


def test_of_layers_alike_one_is_run_for_the_shapes() -> None:
    """The first layer reads what needs no gradient, the others what does; the last one has another width."""
    built: list[tuple[int, int]] = []

    def build(make: Callable[[int, int], nn.Module], width: int) -> nn.Module:
        built.append((WIDTH, width))
        return make(WIDTH, width)

    layers = [(f"layer.{i}", partial(build, partial(nn.Linear, bias=i < 0), WIDTH)) for i in range(32)]
    shapes = chain(*layers, ("last", partial(build, partial(nn.Linear, bias=False), 2)), ("end", nn.Identity))
    result = shapes.infer_shapes(range(2))
    assert [cut["x"].sample_shape for cut in result] == [(WIDTH,)] * 32 + [(2,)]
    assert built == [(WIDTH, WIDTH)] * 2 + [(WIDTH, 2)]
    kinds = [alike(spec.build) for spec in shapes.specs]
    assert kinds[0] == kinds[31] != kinds[32]
    assert alike(partial(nn.Linear, bias=[])) != alike(partial(nn.Linear, bias=[1]))


def test_inputs_cross_no_cut_and_outputs_cross_all() -> None:
    crossing = chain(
        LayerSpec("a", linear, ("x",), ("aux",)),
        LayerSpec("b", Add, ("x", "mask"), ("x",)),
        LayerSpec("c", Add, ("x", "mask"), ("x",)),
        outputs=("x", "aux"),
    )
    assert crossing.cuts == (("aux",), ("aux", "x"))
    assert crossing.inputs == (("x",), ("x", "mask"), ("mask",))


def test_an_unused_tensor_crosses_nothing() -> None:
    assert chain(LayerSpec("a", Pair, ("x",), ("x", "y")), ("b", linear)).cuts == (("x",),)


def test_shapes_say_whether_a_gradient_comes_back() -> None:
    pairs = chain(
        ("a", linear),
        LayerSpec("b", Pair, ("x",), ("x", "y")),
        LayerSpec("c", Add, ("x", "y"), ("x",)),
    )
    first, second = pairs.infer_shapes(range(2))
    assert first["x"] == ((WIDTH,), torch.float32, True)
    assert second["x"].needs_grad
    assert not second["y"].needs_grad
    assert second["y"].bytes_per_sample == 4 * WIDTH


def test_the_seed_depends_on_seed_and_name_alone() -> None:
    assert derived_seed(1, "a") == derived_seed(1, "a")
    assert len({derived_seed(1, "a"), derived_seed(2, "a"), derived_seed(1, "b")}) == 3
    assert 0 <= derived_seed(1, "a") < 2**63
    one = chain(("a", linear), ("b", linear)).build_layer(1).state_dict()
    other = chain(("b", linear)).build_layer(0).state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(one["weight"], chain(("b", linear)).build_layer(0, seed=4).state_dict()["weight"])


def test_building_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    chain(("a", linear)).build_layer(0)
    assert torch.equal(torch.rand(3), expected)


def boom() -> nn.Module:
    raise ValueError("no such width")


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


@pytest.mark.parametrize(
    ("layers", "outputs", "message"),
    [
        ([], ("x",), "no layers"),
        ([("a", linear), ("a", linear)], ("x",), "layers 0 and 1 are both called 'a'"),
        ([("a", linear)], ("y",), "outputs ['y']"),
        ([("", linear)], ("x",), "non-empty"),
        ([("a", 3)], ("x",), "cannot be called"),
        ([("a", nn.Linear(1, 1))], ("x",), "is a built module"),
        ([linear], ("x",), "give a LayerSpec"),
        ([LayerSpec("a", linear, "x")], ("x",), "give a tuple of tensor names"),  # type: ignore[arg-type]
        ([LayerSpec("a", linear, ("x", "x"))], ("x",), "names a tensor twice"),
        ([LayerSpec("a", linear, ("x",), ())], ("x",), "writes nothing"),
    ],
)
def test_malformed_layers_are_refused(layers: list[Any], outputs: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        Chain(SmallJob(layers, outputs))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (("a", boom), "layer 'a' cannot be built: ValueError: no such width"),
        (LayerSpec("a", linear, ("z",)), "reads 'z', which no earlier layer writes"),
        (LayerSpec("a", linear, ("x",), ("x", "y")), "writes ('x', 'y') but returned (Tensor)"),
        (("a", lambda: nn.Linear(9, 9)), "layer 'a' does not run on x (2, 4)"),
        (("a", Wide), "dimension 0 has to be the sample"),
        (("a", lambda: 3), "returned int, not an nn.Module"),
    ],
)
def test_layers_that_do_not_run_are_named(layer: Any, message: str) -> None:
    with pytest.raises(PenstockError) as caught:
        chain(layer, ("last", linear)).infer_shapes(range(2))
    assert message in str(caught.value)


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, : int(x.sum().item()) // x.numel() * 2]


def test_a_model_that_looks_at_its_numbers_is_run_on_the_cpu() -> None:
    looking = chain(("looks", Looks), ("last", lambda: nn.Linear(2, 2)))
    assert looking.infer_shapes(range(3))[0]["x"] == ((2,), torch.float32, False)


def test_a_wrong_number_of_results_is_a_mismatch() -> None:
    mismatched = chain(("a", Pair))
    with pytest.raises(ModelMismatch):
        mismatched.call(0, mismatched.build_layer(0), [torch.ones(1, WIDTH)])


def write_job(directory: Path, module: str, text: str) -> None:
    (directory / f"{module}.py").write_text(text, encoding="utf-8")


@pytest.mark.tier("quick")
def test_load_job_appends_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    write_job(tmp_path, "json", "raise RuntimeError('the standard library comes first')\n")
    write_job(tmp_path, "owntrain", "from penstock.examples.gpt import tiny as job\nimport json\njson.dumps(1)\n")
    before = list(sys.path)
    job = load_job("owntrain:job", tmp_path)
    assert isinstance(job, Job)
    assert sys.path == [*before, str(tmp_path)]
    after = list(sys.path)
    load_job("owntrain:job", tmp_path)
    assert sys.path == after


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("reference", "kind", "message"),
    [
        ("examples.gpt", InvalidDocument, "module:attribute"),
        ("no_such_module_here:job", NotFound, "no module 'no_such_module_here'"),
        ("examples.gpt:jbo", NotFound, "did you mean 'job'"),
        ("examples.gpt:Config", InvalidDocument, "a class"),
        ("examples.gpt:layers", InvalidDocument, "it lacks"),
        ("broken_training:job", InvalidDocument, "ZeroDivisionError"),
        ("needs_missing:job", InvalidDocument, "not_installed_here"),
    ],
)
def test_what_is_no_job_is_said(
    reference: str, kind: type[PenstockError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    write_job(tmp_path, "broken_training", "1 / 0\n")
    write_job(tmp_path, "needs_missing", "import not_installed_here\n")
    with pytest.raises(kind) as caught:
        load_job(reference, tmp_path)
    assert message in str(caught.value)


def test_a_batch_size_has_to_be_a_number_of_samples() -> None:
    job = SmallJob([("a", linear)])
    job.batch_size = 0
    with pytest.raises(InvalidDocument, match="batch_size 0"):
        checked_job(job, "here:job")
