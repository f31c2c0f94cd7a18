"""Every error that Penstock raises on purpose: ``except penstock.errors.PenstockError``."""

from penstock.schemas.errors import (
    Conflict,
    Fault,
    Forbidden,
    InvalidDocument,
    InvalidPlan,
    MissingExtra,
    ModelMismatch,
    NotFound,
    PenstockError,
    QuotaExceeded,
    RunFailed,
    Unauthenticated,
    Unreachable,
    UnsupportedRequest,
    WrongDocument,
)

__all__ = [
    "Conflict",
    "Fault",
    "Forbidden",
    "InvalidDocument",
    "InvalidPlan",
    "MissingExtra",
    "ModelMismatch",
    "NotFound",
    "PenstockError",
    "QuotaExceeded",
    "RunFailed",
    "Unauthenticated",
    "Unreachable",
    "UnsupportedRequest",
    "WrongDocument",
]
