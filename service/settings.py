"""The service's settings, read once: from arguments, ``PENSTOCK_…`` variables and a TOML file (``configuration``)."""

from __future__ import annotations

import ipaddress
import os
import secrets
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from penstock.schemas.document import faults_of
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.machine.processors import available_processors
from penstock.schemas.topology import MAX_DEVICES
from penstock.service import configuration

SHORTEST_DAYS = 2
"""A document that was stored within the last day is not marked again when it is read."""


class Settings(BaseSettings):
    """The settings that an operator may choose. Times are seconds, sizes are bytes."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", frozen=True, extra="forbid")

    database: str = Field(default="penstock.sqlite", description="a file of SQLite, or the URL of a PostgreSQL server")
    database_connections: int = Field(default=20, ge=2, le=1000, description="connections of a process, at most")
    database_wait_s: float = Field(
        default=60.0, ge=0, description="how long a start waits for a PostgreSQL server that does not answer yet"
    )
    upgrade_database: bool | None = Field(
        default=None, description="upgrade the tables of an older Penstock at the start; by default on SQLite only"
    )
    host: str = Field(
        default="127.0.0.1", description="address to listen on; any but loopback can be reached from other machines"
    )
    port: int = Field(default=8642, ge=0, le=65535, description="0: any free port")
    allow_unauthenticated: bool = Field(
        default=False, description="listen on other addresses than loopback although no key is required"
    )
    slots: int = Field(
        default_factory=lambda: max(1, available_processors() // 2),
        ge=0,
        le=256,
        description="solves at a time; by default half the processors",
    )
    solve_workers: int = Field(
        default=0, ge=0, le=256, description="processes of one solve; 0: the processors divided by the slots"
    )
    solve_memory_bytes: int = Field(
        default=0, ge=0, description="memory that a process of a solve may allocate beyond the loaded code; 0: no limit"
    )
    keep_jobs_days: float = Field(
        default=0.0,
        ge=0,
        description="jobs and sweeps that ended this long ago, at least 2 days, are removed with the documents that "
        "only they use; 0: never",
    )
    max_sweep_cases: int = Field(default=1000, ge=1, description="plan requests of one sweep")
    solve_entry: str = Field(
        default="penstock.planning.solve:solve_here", description="module:function that answers a plan request"
    )
    lease_s: float = Field(default=30.0, gt=0, description="a worker that is silent for longer has lost its job")
    max_attempts: int = Field(default=3, ge=1, description="a job that was lost this number of times fails")
    max_solve_s: float = Field(
        default=3600.0, gt=0, description="longest time limit, and that of a request without one"
    )
    max_question_s: float = Field(
        default=20.0,
        gt=0,
        description="longest time for an import, an explanation or a calibration: what plans nothing anew",
    )
    question_wait_s: float = Field(
        default=30.0, ge=0, description="how long a question waits for a process while all are at work; then 503"
    )
    solve_grace_s: float = Field(
        default=1.5, ge=0, description="from the request's limit until the child is terminated"
    )
    kill_grace_s: float = Field(default=2.0, ge=0, description="from SIGTERM to SIGKILL")
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024, description="largest body of a request")
    max_held_body_bytes: int = Field(
        default=256 * 2**20,
        ge=2048,
        description="bodies of all requests under way together, beyond 64 KiB each; a tenant's at most half of it",
    )
    max_wait_s: float = Field(default=300.0, ge=0, description="longest `Prefer: wait`")
    agent_hold_s: float = Field(default=10.0, ge=0, description="longest time that a sync is held")
    agent_timeout_s: float = Field(
        default=15.0, gt=0, description="an agent that is silent for longer, except during a held sync, is dead"
    )
    recovery_wait_s: float = Field(
        default=60.0, ge=0, description="how long a run waits for an agent to come back when none with a device is left"
    )
    warm_up: bool = Field(default=True, description="load and compile the solvers in the background at the start")
    drain_s: float = Field(
        default=0.0,
        ge=0,
        description="how long the service still answers, not ready, after SIGTERM: for a load balancer",
    )
    log_format: Literal["auto", "json", "text"] = Field(
        default="auto", description="auto: text on a terminal, JSON elsewhere"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least urgent lines")
    metrics_port: int = Field(
        default=0, ge=0, le=65535, description="where `penstock worker` serves its metrics, on loopback; 0: nowhere"
    )
    security: Literal["off", "keys"] = Field(
        default="off", description="keys: every client needs a key of `penstock keys`; off: none does, on loopback only"
    )
    session_secret: SecretStr = Field(
        default_factory=lambda: SecretStr(secrets.token_hex(32)),
        description="signs browsers' sessions; by default a new one each start, which signs all users out",
    )
    session_s: float = Field(default=43200.0, gt=0, description="how long a browser stays signed in")
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="names that a service on loopback without keys answers to, in addition to its own",
    )
    metrics_on_loopback: bool = Field(
        default=False, description="/metrics needs no key from loopback; not behind a proxy on the same machine"
    )
    requests_per_s: float = Field(
        default=200.0,
        ge=0,
        description="for each key, and for each address other than loopback without one; 0: no limit",
    )
    max_open_requests: int = Field(default=1000, ge=1, description="for each key: waits, streams and held syncs")
    max_layers: int = Field(default=50_000, ge=1, description="of a profile")
    max_devices: int = Field(default=MAX_DEVICES, ge=1, description="of a topology")
    max_micro_batches: int = Field(default=1_048_576, ge=1, description="of a global batch")
    tls_certificate: Path | None = Field(default=None, description="PEM file; with it the service speaks HTTPS only")
    tls_key: Path | None = Field(default=None, description="PEM file of the certificate's key, if it is another file")

    @field_validator("keep_jobs_days")
    @classmethod
    def _keeps_what_is_in_use(cls, value: float) -> float:
        if 0 < value < SHORTEST_DAYS:
            raise ValueError(
                f"entries that are {value:g} days old may still be in use; keep at least {SHORTEST_DAYS} days"
            )
        return value

    @classmethod
    def load(cls, path: str | Path | None = None, **arguments: Any) -> Self:
        """Load settings from ``arguments``, the environment and a TOML file (default: ``PENSTOCK_SETTINGS``).

        Raises InvalidDocument naming the setting.
        """
        return cls.load_with_origins(path, **arguments)[0]

    @classmethod
    def load_with_origins(cls, path: str | Path | None = None, **arguments: Any) -> tuple[Self, dict[str, str]]:
        """Return the settings, and where each one that is no default comes from. Raises InvalidDocument."""
        names = list(cls.model_fields)
        configuration.refuse_misspelt(os.environ, names)
        by_variable = configuration.in_environment(os.environ, names)
        path = path or os.environ.get(configuration.FILE_VARIABLE)
        by_file = configuration.read_file(path, names) if path else {}
        try:
            settings = cls(**{name: by_file[name] for name in by_file.keys() - by_variable} | arguments)
        except ValidationError as error:
            raise InvalidDocument(
                "the settings of the service are not valid; they come from arguments, PENSTOCK_… variables and the "
                "settings file",
                faults=tuple(faults_of(error.errors())),
            ) from None
        origins = dict.fromkeys(by_file, str(path)) | dict.fromkeys(by_variable, "environment")
        return settings, origins | dict.fromkeys(arguments, "argument")

    def database_url(self) -> str:
        """Return ``database`` as a SQLAlchemy URL."""
        return self.database if "://" in self.database else f"sqlite:///{Path(self.database).absolute()}"

    @property
    def limits_of_tasks(self) -> dict[str, int]:
        """The limits within which a child answers a question."""
        return {
            "most_devices": self.max_devices,
            "most_micro_batches": self.max_micro_batches,
            "memory_bytes": self.solve_memory_bytes,
        }

    def refuse_unprotected(self) -> None:
        """Raise UnsupportedRequest when the service would be open to other hosts although no setting allows it."""
        if self.security == "keys" or self.allow_unauthenticated or is_loopback(self.host):
            return
        raise UnsupportedRequest(
            f"host {self.host!r} can be reached from other machines, but security is off: anyone who reaches the "
            "service could start training runs",
            remedy="set security = 'keys' (PENSTOCK_SECURITY=keys) and make a key with `penstock keys create`, listen "
            "on 127.0.0.1, or set allow_unauthenticated (PENSTOCK_ALLOW_UNAUTHENTICATED=1) where the network itself "
            "keeps strangers out",
        )


def is_loopback(host: str) -> bool:
    """Return whether ``host``, a name or an address, is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
