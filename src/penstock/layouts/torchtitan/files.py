"""The files that torchtitan's releases read: TOML up to 0.2, Python from 0.3 on.

.. [1] torchtitan, ``config/manager.py`` (0.2: TOML), ``models/llama3/config_registry.py`` (0.3: functions).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_DOCUMENTED = """
torchtitan 0.3 reads no TOML; its configurations are functions of a model's config_registry.py. Import ``planned`` there
and add one:

    def llama3_8b_planned() -> Trainer.Config:
        return planned(llama3_8b())
"""


_POLICIES = {"full": "FullAC", "selective": "SelectiveAC"}


def toml(remarks: Sequence[str], tables: Mapping[str, Mapping[str, Any]], checkpoints: Mapping[str, str]) -> str:
    """Write tables, with remarks above them; ``checkpoints`` are the settings of activation checkpoints."""
    lines = [f"# {line}" for line in remarks]
    for name, table in {**tables, "activation_checkpoint": checkpoints}.items():
        lines += [f"[{name}]", *(f"{key} = {_value(value, 0)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def python(remarks: Sequence[str], tables: Mapping[str, Mapping[str, Any]], checkpoints: Mapping[str, str]) -> str:
    """Write a module with one function, ``planned``, that sets the tables' values in a ``Trainer.Config``."""
    policy = _POLICIES.get(checkpoints["mode"])
    title, *more = [line.replace("\\", "/").replace('"', "'") for line in remarks]
    lines = [f'"""{title}', "", *more, _DOCUMENTED + '"""', ""]
    if policy is not None:
        lines += [f"from torchtitan.distributed.activation_checkpoint import {policy}", ""]
    lines += [
        "",
        "def planned(config):",
        '    """The configuration with the layout of the plan; it is changed in place."""',
    ]
    for name, table in tables.items():
        lines += [
            f"    config.{name}.{key} = {value if isinstance(value, bool) else _value(value, 4)}"
            for key, value in table.items()
        ]
    checkpoint = "None" if policy is None else f"{policy}.Config()"
    return "\n".join([*lines, f"    config.activation_checkpoint = {checkpoint}", "    return config", ""])


def _value(value: Any, indent: int) -> str:
    """Write a number, a text or a list of lists, as TOML and Python both do."""
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    inner = "".join(f"{' ' * (indent + 4)}{json.dumps(names, ensure_ascii=False)},\n" for names in value)
    return f"[\n{inner}{' ' * indent}]"
