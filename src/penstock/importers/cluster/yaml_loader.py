"""The YAML loader of texts from outside: libyaml's, ten times faster than Python's, where it is there."""

from __future__ import annotations

from typing import Any

import yaml

YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
