"""A process with a trainer on its path: what the trainer itself prints of a configuration.

Reads ``{"trainer": …, "configurations": [{table: {name: value}}]}``; writes the text that each run would log.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock


def of_deepspeed(configuration: dict[str, Any]) -> None:
    module = import_module("deepspeed.runtime.config")
    config = object.__new__(module.DeepSpeedConfig)  # its constructor asks a process group for its size
    config._param_dict = configuration
    config.print("DeepSpeedEngine configuration")


def of_torchtitan(configuration: dict[str, Any]) -> None:
    config = import_module("torchtitan.config.job_config").JobConfig()
    config.job.print_config = True
    for table, values in configuration.items():
        for name, value in values.items():
            assert hasattr(getattr(config, table), name), (table, name)
            setattr(getattr(config, table), name, value)
    config.maybe_log()


UNUSED = ("tyro", "tokenizers", "torchtitan.components.quantization")
"""Modules that torchtitan imports for its command line and its kernels; no configuration needs them."""
PRINTED = {"deepspeed": of_deepspeed, "torchtitan": of_torchtitan}


def main() -> None:
    task = json.load(sys.stdin)
    for name in UNUSED:
        sys.modules[name] = MagicMock()
    import_module(task["trainer"])
    texts = []
    for configuration in task["configurations"]:
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("[rank0]:%(asctime)s [%(levelname)s] %(message)s"))
        loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
        for each in loggers:
            each.addHandler(handler)
            each.setLevel(logging.INFO)
        PRINTED[task["trainer"]](configuration)
        for each in loggers:
            each.removeHandler(handler)
        texts.append(stream.getvalue())
    sys.stdout.write("\n" + json.dumps(texts) + "\n")


main()
