"""torchtitan's settings, as one table of tables, from every form in which they are written.

The reader takes TOML and JSON, also in a log, flags (``--parallelism.pipeline_parallel_degree 4``) and the Python of
newer versions (``config.parallelism.pipeline_parallel_degree = 4``), none of which is run.

.. [1] torchtitan, ``config/job_config.py``, ``config/manager.py``.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.importers.lines import Faults
from penstock.layouts.drawn import Expressed
from penstock.layouts.files.configurations import configuration, refusal
from penstock.layouts.files.logs import printed_json
from penstock.layouts.files.positions import place
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.solvers.model.degrees import Modules
from penstock.solvers.model.trainer_limits import Recomputing

NONE: Mapping[str, str] = MappingProxyType({})
CHECKPOINT = "activation_checkpoint"
MODEL = "model"
OPTIMIZER, EARLY_STEP = "optimizer", "early_step_in_backward"
"""The one setting of the optimizer's table that is read."""
SELECTIVE = "selective_ac_option"
"""The setting of 0.2 for selective checkpoints: a divisor of the recomputed layers' numbers, or ``op``."""
TABLES = ("parallelism", "training", CHECKPOINT, "experimental", MODEL, OPTIMIZER)
LENGTH = "max_context_length"
"""The name of a sample's tokens in newer heads than 0.3."""
_ARGUMENTS = {"model_spec.0": "flavor", "model_spec.flavor": "flavor", "model_spec.num_mtp_layers": "num_mtp_layers"}
"""The arguments of ``model_registry("8B")`` of 0.3, by the names that ``[model]`` of 0.2 has."""
_FLAG = re.compile(
    rf"--({'|'.join(TABLES)})\.([a-z_]+)(?:(?:[ \t]*=[ \t]*|[ \t]+)(?!--)(\"[^\"\n]*\"|'[^'\n]*'|[^\s'\"]+))?"
)
_PYTHON = re.compile(r"(?m)^(?:def |from |import |class |[ \t]*config\.\w)")
_PRINTED = re.compile(r"Running with (?:args|configs?): (?=\{)")
"""Words of a log before the configuration as JSON (``--debug.print_config``)."""
OLD_NAMES = {
    "batch_size": "local_batch_size",
    "pipeline_parallel_module_fqns_per_model_part": "module_fqns_per_model_part",
}


class Settings:
    """The tables. Methods that return a value note a fault for a wrong one, with its line where it can be seen.

    ``remarks``: values that are given more than once and differ.
    """

    def __init__(self, text: str, source: str, overrides: Mapping[str, str] = NONE, config: str | None = None) -> None:
        text = printed_json(text, _PRINTED)
        self.text, self.faults, self.is_python = text, Faults(source), _is_python(text)
        self.config = config
        self.remarks: list[str] = []
        self._tables: dict[str, dict[str, Any]] = {}
        parsed = _parsed(text, source, overrides, config, self.remarks)
        for name, table in _of_overrides(overrides).items():
            parsed[name] = {**(parsed.get(name) or {}), **table}
        for name, table in parsed.items():
            if name not in TABLES:
                continue
            if not isinstance(table, dict):
                self.faults.add(self.line(name), f"{name} is no table")
                continue
            into = "parallelism" if name == "experimental" else name
            renamed = {OLD_NAMES.get(str(key), str(key)): value for key, value in table.items()}
            self._tables[into] = renamed | self._tables.get(into, {})
        self.faults.stop("[parallelism], [training] and [activation_checkpoint], as in torchtitan's configuration")

    @property
    def empty(self) -> bool:
        """True where the text has no settings that are read."""
        return not any(table for name, table in self._tables.items() if name not in (MODEL, OPTIMIZER))

    def get(self, table: str, name: str) -> Any:
        """Return the value; None where it is missing."""
        return self._tables.get(table, {}).get(name)

    def line(self, name: str) -> int | None:
        """Return the line of the name, if it occurs."""
        match = re.search(rf"(?<![\w.]){re.escape(name)}\b|\.{re.escape(name)}\b", self.text)
        return None if match is None else place(self.text, match.start())[0]

    def fault(self, name: str, detail: str) -> None:
        """Add a fault at the line of a name."""
        self.faults.add(self.line(name), detail, code="layout")

    def number(self, table: str, name: str, least: int = 1) -> int | None:
        """Return the number; None where it is absent or left to torchtitan (-1)."""
        value = self.get(table, name)
        if value is None or value == -1:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 10**9:
            self.fault(name, f"{table}.{name} is {value!r}, not a whole number of at least {least}")
            return None
        return value


class Checkpoints(NamedTuple):
    """Layers that are recomputed whole, or the modules that every layer recomputes."""

    recompute: Recomputing = Recomputing()
    modules: Modules = ()
    assumptions: tuple[str, ...] = ()


def checkpoints_of(settings: Settings) -> Checkpoints:
    """Return the recomputation; torchtitan's default is every second layer in 0.2, and by operator in 0.3."""
    stated = settings.get(CHECKPOINT, "mode")
    option = settings.get(CHECKPOINT, SELECTIVE) or ("op" if settings.is_python else 2)
    if stated in ("none", "full"):
        return Checkpoints(Recomputing("uniform", 1) if stated == "full" else Recomputing())
    if stated not in (None, "selective"):
        settings.fault("mode", f"activation_checkpoint.mode {stated!r} is none of none, full, selective")
    words = "by operator" if option == "op" else f"of every layer whose number {option} divides"
    default = f"no activation_checkpoint in the text: torchtitan's own, selective {words}"
    assumptions = () if stated else (default,)
    if option == "op":
        return Checkpoints(modules=("operators",), assumptions=assumptions)
    if not str(option).isdecimal():
        settings.fault(SELECTIVE, f"activation_checkpoint.{SELECTIVE} {option!r} is neither a number nor 'op'")
        return Checkpoints()
    number = int(option)
    return Checkpoints(Recomputing("every", number) if number else Recomputing("uniform", 1), (), assumptions)


def checkpoints_in_words(plan: Expressed, release: str) -> dict[str, str]:
    """Return the settings of a plan's recomputation. Raises UnsupportedRequest where a release has no words."""
    if plan.modules:
        return {"mode": "selective", SELECTIVE: "op"}
    method, layers = plan.recompute
    if method == "every" and layers > 1:
        if release != "0.2":
            raise UnsupportedRequest(
                f"torchtitan {release} cannot express this plan: it recomputes every transformer layer or none, "
                f"but the plan recomputes one layer in {layers}",
                remedy="--set release=0.2, or a plan with recompute always or never",
            )
        return {"mode": "selective", SELECTIVE: str(layers)}
    return {"mode": "none" if method == "none" else "full"}


def unmodelled(settings: Settings) -> tuple[str, ...]:
    """Return the settings that lower memory and are not counted."""
    each = {
        "training.dtype bfloat16 (parameters and optimizer states of 2 bytes)": settings.get("training", "dtype")
        == "bfloat16",
        "training.enable_cpu_offload": settings.get("training", "enable_cpu_offload") is True,
        f"{OPTIMIZER}.{EARLY_STEP}": settings.get(OPTIMIZER, EARLY_STEP) is True,
    }
    return tuple(name for name, is_on in each.items() if is_on)


def _of_overrides(overrides: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the overrides of settings, by their dotted names."""
    data: dict[str, dict[str, Any]] = {}
    for path, value in overrides.items():
        table, dot, name = path.removeprefix("--").partition(".")
        if dot and table in TABLES:
            data.setdefault(table, {})[name] = _plain(value)
    return data


def _parsed(
    text: str, source: str, overrides: Mapping[str, str], config: str | None, remarks: list[str]
) -> dict[str, Any]:
    try:
        if config is not None and not _PYTHON.search(text):
            raise InvalidDocument(f"{source} has no named configurations", remedy="leave --config out")
        if text.lstrip().startswith("{"):
            data = json.loads(text)
        elif _FLAG.search(text):
            data = _of_flags(text)
        elif _is_python(text):
            ast.parse(text)
            data = _of_python(text, source, overrides, config, remarks)
        else:
            data = tomllib.loads(text)
    except SyntaxError as error:
        raise InvalidDocument(
            f"{source} is not valid Python, line {error.lineno}, column {error.offset}: {error.msg}"
        ) from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError, ValueError) as error:
        raise InvalidDocument(f"{source} is neither TOML nor JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidDocument(f"{source} holds {type(data).__name__}, not tables of settings")
    return data


def _is_python(text: str) -> bool:
    """Return whether the text is a module of newer versions, and neither JSON nor flags."""
    return not text.lstrip().startswith("{") and not _FLAG.search(text) and bool(_PYTHON.search(text))


def _of_flags(text: str) -> dict[str, Any]:
    data: dict[str, dict[str, Any]] = {}
    for table, name, value in _FLAG.findall(re.sub(r"(?m)(^|(?<=\s))#.*$", "", text)):
        data.setdefault(table, {})[name] = _plain(value.strip("'\""))
    return data


def _plain(word: str) -> Any:
    """Read a number, a text or a list of flags."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return word


def _of_python(
    text: str, source: str, overrides: Mapping[str, str], config: str | None, remarks: list[str]
) -> dict[str, Any]:
    """Read the settings of a configuration in a Python module.

    ``remarks`` gets the configuration's name, and the calls that are not followed.
    """
    values = {name: _plain(value) for name, value in overrides.items()}
    one = configuration(text, source, config, values, lambda path, _setting: (_table_of(path) or (MODEL,))[0] != MODEL)
    if one.name:
        remarks.append(f"the configuration {one.name}")
    if one.elsewhere:
        remarks.append(f"in other files and not read, what the configuration is made by: {', '.join(one.elsewhere)}")
    data: dict[str, dict[str, Any]] = {}
    for path, setting in one.settings.items():
        if (at := _table_of(path)) is not None:
            table, name = at
            if name != "mode" and (why := refusal(setting)) is not None:
                remarks.append(f"{table}.{name}, line {setting.line}, is not read: {why}")
            else:
                data.setdefault(table, {})[name] = _mode(setting.value) if name == "mode" else setting.value
    return data


def _table_of(path: str) -> tuple[str, str] | None:
    """Return the table and the name in it of a dotted path; None for any other path."""
    *owners, name = path.split(".")
    if path in _ARGUMENTS:
        return MODEL, _ARGUMENTS[path]
    if (owners[-1:] == [CHECKPOINT] and name not in ("mode", SELECTIVE)) or (
        owners[-1:] == [OPTIMIZER] and name != EARLY_STEP
    ):
        return None
    if owners and owners[-1] in TABLES and "validator" not in owners and owners[0] != "model_spec":
        return owners[-1], name
    return (CHECKPOINT, "mode") if name == CHECKPOINT else None


def _mode(value: Any) -> str:
    """Return the mode of 0.3's ``FullAC.Config()``, ``SelectiveAC.Config()`` or None; else the value's text."""
    modes = {"FullAC": "full", "SelectiveAC": "selective", "None": "none"}
    return next((mode for name, mode in modes.items() if str(value).startswith(name)), str(value))
