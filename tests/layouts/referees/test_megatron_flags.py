"""Every setting of the newest Megatron-Core's configuration classes is read, named as changing an answer, or idle."""

from __future__ import annotations

import ast

import pytest
from installed import RELEASES, folder_of

from penstock.layouts.megatron.irrelevant_flags import IRRELEVANT
from penstock.layouts.megatron.names import READ
from penstock.layouts.megatron.other_flags import CHANGING

pytestmark = pytest.mark.tier("quick")

CLASSES = {
    "TransformerConfig": "transformer/transformer_config.py",
    "MLATransformerConfig": "transformer/transformer_config.py",
    "ModelParallelConfig": "model_parallel_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
}


@pytest.mark.parametrize("release", RELEASES["megatron-core"])
def test_every_setting_is_classified(release: str, pytestconfig: pytest.Config) -> None:
    core = folder_of(f"megatron-core-{release}", pytestconfig.getoption("tier")) / "megatron" / "core"
    settings: list[str] = []
    for name, file in CLASSES.items():
        classes = {
            node.name: node for node in ast.parse((core / file).read_text()).body if isinstance(node, ast.ClassDef)
        }
        fields = (each.target for each in classes[name].body if isinstance(each, ast.AnnAssign))
        settings += [field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_")]
    assert len(settings) > 300
    flags = IRRELEVANT | READ | CHANGING.keys()
    assert [name for name in settings if name.replace("_", "-") not in flags] == []
