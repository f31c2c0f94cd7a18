"""The agent's settings: from a TOML file, then ``PENSTOCK_AGENT_…``, then the command line; later sources win.

.. code-block:: toml

    server = "http://planner:8642"
    name = "node0"
    cpu_devices = 2
    directory = "/srv/training"
    output_directories = ["/shared/checkpoints"]
    [models]
    gpt = "mytrain:job"
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

import httpx
from pydantic import Field, SecretStr, model_validator

from penstock.executor.interfaces import address_towards, interface_address, is_loopback
from penstock.schemas.document import Document
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.quantities import AgentName, Name

PREFIX = "PENSTOCK_AGENT_"
ANY_MODEL = "*"
_REFERENCE = re.compile(r"[^\s:]+:[^\s:]+")
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


class AgentSettings(Document):
    """The settings that an agent needs before it contacts the service."""

    kind: ClassVar[str] = "agent settings"

    name: AgentName = Field(default_factory=socket.gethostname, description="unique among the service's agents")
    server: str = Field(description="the service's address, http://host:port or https://host:port")
    token: SecretStr = Field(default=SecretStr(""), description="key of scope agent; a service without keys needs none")
    ca: Path | None = Field(
        default=None, description="certificates to trust in addition to the system's, as a PEM file"
    )
    cpu_devices: int = Field(
        default=0, ge=0, le=4096, strict=True, description="0: offer the GPUs that nvidia-smi shows"
    )
    cpu_kind: Name = Field(default="cpu", description="what profiles call a CPU device of this machine")
    models: dict[Name, str] = Field(default_factory=dict, description="key of a model: its job as module:attribute")
    directory: Path = Field(default=Path(), description="where the training project lies, and where ranks write")
    output_directories: tuple[Path, ...] = Field(
        default=(),
        description="below these, runs may write and read checkpoints and metrics; none: anywhere while the server is "
        "on loopback, else nowhere",
    )
    interface: str = Field(default="", description="address or network interface of stores and ranks; empty: found")
    probe_port: int = Field(
        default=0, ge=-1, le=65535, strict=True, description="answers `penstock probe` here; 0: a free port, -1: never"
    )
    allow_any_model: bool = Field(default=False, strict=True, description="run any module:attribute; loopback only")
    prepare_limit_s: float = Field(default=300, gt=0, description="how long importing a model may take")
    stop_grace_s: float = Field(
        default=30, ge=0, description="between SIGTERM and SIGKILL: time for ranks to save when they are asked to end"
    )
    peer_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="a rank whose instruction takes longer has failed; none: 600 in the first step, later ten times as "
        "long as the first step took, 60 at least",
    )
    name_wait_s: float = Field(
        default=15,
        ge=0,
        description="at its start: how long the service may take to notice that the last agent of this name is dead",
    )
    alive_file: Path | None = Field(
        default=None, description="touched every few seconds while the agent goes on: for probes of containers"
    )
    log_directory: Path | None = Field(default=None, description="keeps what ranks write; none: until the agent ends")
    log_bytes: int = Field(default=10_000_000, ge=1000, strict=True, description="of each rank; older lines go")
    log_runs: int = Field(default=20, ge=1, strict=True, description="of how many runs logs are kept")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        parts = urlsplit(self.server)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"server {self.server!r} is not an address; write http://host:port")
        for key, reference in self.models.items():
            if not _REFERENCE.fullmatch(reference):
                raise ValueError(f"model {key!r} is {reference!r}; write module:attribute, such as mytrain:job")
        if not self.directory.is_dir():
            raise ValueError(f"directory {str(self.directory)!r} does not exist")
        relative = [str(path) for path in self.output_directories if not path.is_absolute()]
        if relative:
            raise ValueError(f"output_directories {relative} are relative; give absolute paths")
        if self.ca is not None and not self.ca.is_file():
            raise ValueError(f"ca {str(self.ca)!r} is not a file; give the PEM file of the certificates to trust")
        address = self.address()
        if self.allow_any_model and not (is_loopback(parts.hostname) and is_loopback(address)):
            raise ValueError(
                f"allow_any_model runs any code that a request names, so it needs a loopback server and interface; "
                f"these are {parts.hostname!r} and {address!r}"
            )
        if not self.models and not self.allow_any_model:
            raise ValueError(
                "no model is configured, so there is nothing to run; give models = {key = 'module:attribute'}"
            )
        return self

    @classmethod
    def load(
        cls, path: str | Path | None = None, *, environ: Mapping[str, str], options: Mapping[str, Any] | None = None
    ) -> Self:
        """Read settings from the file, ``environ`` and ``options``, whose None values do not count. InvalidDocument."""
        data: dict[str, Any] = _read_toml(Path(path)) if path is not None else {}
        data |= _from_environment(environ)
        data |= {key: value for key, value in (options or {}).items() if value is not None}
        return cls.parse(data, origin=repr(str(path)) if path is not None else "")

    def model_keys(self) -> tuple[str, ...]:
        """Return the keys of the models that the agent offers; ``*`` where any model may run."""
        return (*sorted(self.models), *((ANY_MODEL,) if self.allow_any_model else ()))

    def reference(self, model: str) -> str | None:
        """Return the job of a model key; None where the configuration lacks it."""
        if model in self.models:
            return self.models[model]
        return model if self.allow_any_model and _REFERENCE.fullmatch(model) else None

    def outputs(self) -> tuple[str, ...] | None:
        """Return the directories that runs may use; None: any."""
        if not self.output_directories and is_loopback(urlsplit(self.server).hostname or ""):
            return None
        return tuple(os.path.normpath(path) for path in self.output_directories)

    def credentials(self) -> dict[str, str]:
        """Return the headers that authenticate the agent. Raises InvalidDocument for a token that cannot be one."""
        token = self.token.get_secret_value().strip()
        if not (token.isascii() and token.isprintable()):
            raise InvalidDocument("the token has characters that a key cannot have", remedy="copy it again: psk_…")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def trusted(self) -> ssl.SSLContext:
        """Return the certificates that the agent trusts. Raises InvalidDocument when ``ca`` holds no certificate."""
        trusted = httpx.create_ssl_context()
        if self.ca is not None:
            try:
                trusted.load_verify_locations(self.ca)
            except (OSError, ssl.SSLError) as error:
                raise InvalidDocument(f"ca {str(self.ca)!r} holds no certificate: {error}") from None
        return trusted

    def address(self) -> str:
        """Return the IP address at which other nodes reach the stores and ranks of this node."""
        if not self.interface:
            return address_towards(urlsplit(self.server).hostname or "")
        try:
            return str(ipaddress.ip_address(self.interface))
        except ValueError:
            return interface_address(self.interface)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidDocument(f"cannot read the agent's settings {str(path)!r}: {error}") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    fields = set(AgentSettings.model_fields) - {"schema_version"}
    data: dict[str, Any] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX):
            continue
        field = variable.removeprefix(PREFIX).lower()
        if field not in fields:
            names = ", ".join(PREFIX + name.upper() for name in sorted(fields))
            raise InvalidDocument(f"{variable} is not a setting of an agent; known are {names}")
        data[field] = _read_variable(variable, field, text)
    return data


def _read_variable(variable: str, field: str, text: str) -> Any:
    match field:
        case "models":
            pairs = [part.partition("=") for part in text.split(",") if part.strip()]
            return {key.strip(): reference.strip() for key, _, reference in pairs}
        case "output_directories":
            return [part for part in text.split(os.pathsep) if part]
        case "cpu_devices" | "log_bytes" | "log_runs":
            if not text.isdecimal():
                raise InvalidDocument(f"{variable} is {text!r}; give a whole number")
            return int(text)
        case "probe_port":
            if not text.removeprefix("-").isdecimal():
                raise InvalidDocument(f"{variable} is {text!r}; give a port, or -1")
            return int(text)
        case "allow_any_model":
            if text.lower() not in _TRUE | _FALSE:
                raise InvalidDocument(f"{variable} is {text!r}; give true or false")
            return text.lower() in _TRUE
        case _:
            return text
