"""The example models run forward and backward, and their shipped profiles are of the models as they stand."""

from __future__ import annotations

import paper_models
import pytest
import torch
from torch import Tensor

from penstock.examples.models import MODELS as SHIPPED
from penstock.executor.profiling.assembly import parameter_bytes
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import Job, load_job

pytestmark = pytest.mark.tier("ci")

MODELS = SHIPPED | paper_models.MODELS
TINY = [
    *(f"examples.{family}" for family in ("gpt", "llama", "moe", "bert", "transformer", "resnet")),
    *(f"paper_models.{family}" for family in ("xlnet", "gnmt", "awd_lstm", "vgg", "densenet", "amoebanet")),
]


def forward(job: Job, rows: range) -> tuple[Tensor, int, list[torch.nn.Module]]:
    chain = Chain(job)
    env, targets = job.batch(0, rows)
    modules = [chain.build_layer(i) for i in range(len(chain.specs))]
    for i, (spec, module) in enumerate(zip(chain.specs, modules, strict=True)):
        env.update(zip(spec.writes, chain.call(i, module, [env[name] for name in spec.reads]), strict=True))
    total, count = job.loss({name: env[name] for name in chain.outputs}, targets)
    return total, count, modules


@pytest.mark.parametrize("family", TINY)
def test_tiny_models_train(family: str) -> None:
    job = load_job(f"{family}:tiny")
    total, count, modules = forward(job, range(4))
    parameters = [parameter for module in modules for parameter in module.parameters()]
    assert count > 0
    total.backward()
    assert all(parameter.grad is not None for parameter in parameters)
    assert any(bool(parameter.grad.abs().max() > 0) for parameter in parameters if parameter.grad is not None)
    job.optimizer(parameters).step()
    assert torch.isfinite(torch.cat([parameter.flatten() for parameter in parameters])).all()


@pytest.mark.parametrize("family", TINY)
def test_shapes_on_the_meta_device_are_those_of_the_run(family: str) -> None:
    job = load_job(f"{family}:tiny")
    chain = Chain(job)
    env, _ = job.batch(0, range(3))
    for i, shapes in enumerate(chain.infer_shapes(range(3))):
        results = chain.call(i, chain.build_layer(i), [env[name] for name in chain.specs[i].reads])
        env.update(zip(chain.specs[i].writes, results, strict=True))
        for name, shape in shapes.items():
            tensor = env[name]
            assert (tuple(tensor.shape[1:]), tensor.dtype, tensor.requires_grad) == shape


@pytest.mark.parametrize("family", ["examples.gpt", "examples.bert", "paper_models.gnmt", "examples.resnet"])
def test_rows_are_the_same_wherever_they_are_asked_for(family: str) -> None:
    job = load_job(f"{family}:tiny")
    whole, targets = job.batch(2, range(8))
    part, part_targets = job.batch(2, range(3, 6))
    assert all(torch.equal(part[name], whole[name][3:6]) for name in whole)
    assert torch.equal(part_targets, targets[3:6])
    other, _ = job.batch(3, range(8))
    assert any(not torch.equal(other[name], whole[name]) for name in whole)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_shipped_profiles_have_the_layers_of_the_models(name: str) -> None:
    chain = Chain(load_job(MODELS[name].reference))
    profile = paper_models.profile(name)
    assert tuple(layer.name for layer in profile.layers) == chain.names
    names = [tuple(chain.tensor_name(i, k) for k in range(len(cut))) for i, cut in enumerate(chain.cuts)]
    assert [tuple(tensor.name for tensor in boundary) for boundary in profile.boundaries] == names
    width = 1 if profile.parameter_dtype == "fp32" else 2
    tied = {layer: size for _name, layers, size in chain.shared_parameters() for layer in layers[1:]}
    for i in {0, 1, len(chain.specs) // 2, len(chain.specs) - 1}:
        layer_bytes = parameter_bytes(chain.build_layer(i, device="meta")) - tied.get(i, 0)
        assert profile.layers[i].parameter_bytes * width == layer_bytes
    assert [tie.bytes * width for tie in profile.shared_parameters] == [tie[-1] for tie in chain.shared_parameters()]


def test_a_residual_and_an_encoder_cross_cuts_beside_the_main_tensor() -> None:
    resnet = Chain(load_job("examples.resnet:tiny"))
    assert resnet.cuts[1] == ("x", "branch")
    transformer = Chain(load_job("examples.transformer:tiny"))
    assert transformer.cuts[transformer.names.index("encoder.0")] == ("y", "x")
    assert transformer.cuts[transformer.names.index("decoder.0")] == ("x", "y")


@pytest.mark.parametrize("seed", [0, 7])
def test_a_layer_is_the_same_in_every_partition(seed: int) -> None:
    job = load_job("examples.gpt:tiny")
    chain = Chain(job)
    torch.manual_seed(1)
    forwards = [chain.build_layer(i, seed) for i in range(len(chain.specs))]
    torch.manual_seed(2)
    backwards = [chain.build_layer(i, seed) for i in reversed(range(len(chain.specs)))][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        states = one.state_dict(), other.state_dict()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(
        forwards[1].state_dict()["feed_forward.0.weight"], forwards[2].state_dict()["feed_forward.0.weight"]
    )
