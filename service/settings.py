"""The service's settings, read once from ``PENSTOCK_…`` variables or given as arguments."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from penstock.schemas.document import faults_of
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.solvers.processors import available_processors


class Settings(BaseSettings):
    """What an operator may choose. Times are seconds, sizes are bytes."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", frozen=True, extra="forbid")

    database: str = Field(default="penstock.sqlite", description="a file of SQLite, or a SQLAlchemy URL")
    host: str = "127.0.0.1"
    port: int = Field(default=8642, ge=0, le=65535, description="0: any free port")
    allow_unauthenticated: bool = Field(
        default=False, description="listen beyond loopback although nobody has to say who he is"
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
    solve_entry: str = Field(default="penstock.api:solve", description="module:function that answers a plan request")
    compare_entry: str = "penstock.api:compare"
    lease_s: float = Field(default=30.0, gt=0, description="a worker that is silent for longer has lost its job")
    max_attempts: int = Field(default=3, ge=1)
    max_solve_s: float = Field(default=3600.0, gt=0, description="longest limit, and that of a request that names none")
    solve_grace_s: float = Field(
        default=1.5, ge=0, description="from the request's limit until the child is terminated"
    )
    kill_grace_s: float = Field(default=2.0, ge=0, description="from SIGTERM to SIGKILL")
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024)
    max_wait_s: float = Field(default=300.0, ge=0, description="longest `Prefer: wait`")
    agent_hold_s: float = Field(default=10.0, ge=0, description="longest time that a sync is held")
    agent_timeout_s: float = Field(
        default=15.0, gt=0, description="an agent that is silent for longer, beside a held sync, is dead"
    )
    recovery_wait_s: float = Field(
        default=60.0, ge=0, description="how long a run waits for an agent to come back when none with a device is left"
    )
    warm_up: bool = Field(default=True, description="load and compile the solvers in the background at the start")

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Settings from the environment and ``given``. Raises InvalidDocument naming the setting."""
        try:
            return cls(**given)
        except ValidationError as error:
            raise InvalidDocument(
                "the service's settings have faults; each is an argument or a variable PENSTOCK_…",
                faults=tuple(faults_of(error.errors())),
            ) from None

    def database_url(self) -> str:
        """``database`` as a SQLAlchemy URL."""
        return self.database if "://" in self.database else f"sqlite:///{Path(self.database).absolute()}"

    def refuse_open_doors(self) -> None:
        """Raise UnsupportedRequest when the service would be open to other hosts without having been told so."""
        if self.allow_unauthenticated or _is_loopback(self.host):
            return
        raise UnsupportedRequest(
            f"host {self.host!r} can be reached from other machines, and the service asks nobody for a key yet: "
            "whoever reaches it could start training runs",
            remedy="listen on 127.0.0.1, or set allow_unauthenticated (PENSTOCK_ALLOW_UNAUTHENTICATED=1) "
            "where the network itself keeps strangers out",
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
