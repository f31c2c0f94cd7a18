"""Documents by their content hash, and the answers to requests that were asked before.

A request is stored with its profile and topology as hashes, under the hash of the request with both inline, which is
the address that a plan names. Everything here is immutable, so nothing is ever written twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa

from penstock.planning.code_digest import code_digest
from penstock.schemas.api.jobs import DocumentOut, DocumentPage
from penstock.schemas.document import Document, Part, address_of, canonical_object, read_stored
from penstock.schemas.errors import NotFound
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest, Training
from penstock.schemas.topology import ClusterTopology
from penstock.service.db.database import Database
from penstock.service.db.tables import answers, documents, iso, now_ms

D = TypeVar("D", bound=Document)

FRESH_MS = 86_400_000
"""A document that is stored again within a day is not marked as used once more."""

TOPOLOGIES_KEPT = 100
"""The newest ones of a tenant; the links of living agents are looked for in them."""

PARSED = 64
"""Most profiles and topologies that are kept as objects; a profile of 20,000 layers takes about 50 MB."""

WHERE_TO_POST = {
    "profile": "POST the profile to /v1/profiles first",
    "topology": "POST the topology to /v1/topologies first",
    "plan": "POST a request to /v1/plans first; its job names the plan's hash",
    "plan request": "POST the request to /v1/plans first",
}


WHERE_IT_IS = {"profile": "/v1/profiles", "topology": "/v1/topologies"}


class Kept(NamedTuple):
    """A document as it is stored: its kind, its name if it has one, and its canonical JSON."""

    kind: str
    name: str | None
    body: bytes

    @classmethod
    def of(cls, document: Document, body: bytes) -> Kept:
        """Return the stored form of a document."""
        name: str | None = getattr(document, "name", None)
        return cls(document.kind, None if name is None else name.replace("\0", "\N{REPLACEMENT CHARACTER}"), body)


Rows = Mapping[str, Kept]
"""Documents by their addresses."""


@dataclass(frozen=True)
class Filed:
    """A request as it is stored: each of its documents written out once.

    ``address`` is its content hash, with profile and topology inline; its own body names them by their addresses.
    """

    address: str
    profile: str
    documents: Rows

    @classmethod
    def of(cls, request: PlanRequest) -> Filed:
        """Convert a request, whose profile and topology are inline, to the rows that store it."""
        assert isinstance(request.profile, ModelProfile)
        assert isinstance(request.topology, ClusterTopology)
        parts: dict[str, Document] = {"profile": request.profile, "topology": request.topology}
        bodies = {name: part.canonical_json() for name, part in parts.items()}
        addresses = {name: address_of(body) for name, body in bodies.items()}
        fields = request.model_copy(update=addresses).canonical_fields()
        address = address_of(canonical_object(fields | bodies))
        stored = {addresses[name]: Kept.of(parts[name], bodies[name]) for name in parts}
        return cls(address, addresses["profile"], {**stored, address: Kept.of(request, canonical_object(fields))})


class Stores:
    """The stores of all tenants; a tenant never sees another's documents, even under the same hash."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._parsed = lru_cache(maxsize=PARSED)(self._parse)

    def of(self, tenant: str) -> Store:
        """Return the store of one tenant."""
        return Store(self._database, tenant, partial(self._parsed, tenant))

    def _parse(self, tenant: str, kind: type[D], address: str) -> D:
        return read_stored(kind, self.of(tenant).body(kind.kind, address))


class Store:
    """Content-addressed documents of one tenant in the database. ``parsed`` reads a typed one by its address."""

    def __init__(self, database: Database, tenant: str, parsed: Callable[[type[Any], str], Any]) -> None:
        self._database, self.tenant, self._parsed = database, tenant, parsed

    def profile(self, address: str) -> ModelProfile:
        """Return a stored profile. Raises NotFound."""
        profile: ModelProfile = self._parsed(ModelProfile, address)
        return profile

    def topology(self, address: str) -> ClusterTopology:
        """Return a stored topology. Raises NotFound."""
        topology: ClusterTopology = self._parsed(ClusterTopology, address)
        return topology

    def put(self, document: Document) -> str:
        """Keep a document; return its address."""
        body = document.canonical_json()
        address = address_of(body)
        self._insert({address: Kept.of(document, body)})
        return address

    def put_plan(self, body: bytes) -> None:
        """Keep a plan that is canonical JSON already."""
        self._insert({address_of(body): Kept(Plan.kind, None, body)})

    def keep(self, filed: Filed) -> None:
        """Keep a request with its documents."""
        self._insert(filed.documents)

    def keep_in(self, filed: Filed, connection: sa.Connection) -> None:
        """Keep a request with its documents, in a writing transaction."""
        self._insert_in(connection, filed.documents)

    def body(self, kind: str, address: str) -> bytes:
        """Return the canonical JSON at an address. Raises NotFound naming what to POST first."""
        query = sa.select(documents.c.body).where(self._mine(documents), documents.c.hash == address)
        query = query.where(documents.c.kind == kind)
        with self._database.read() as connection:
            body = connection.scalar(query)
        if body is None:
            raise NotFound(f"no {kind} is stored under {address!r}", remedy=WHERE_TO_POST[kind])
        return bytes(body)

    def listed(self, kind: str, before: str | None, limit: int) -> DocumentPage:
        """Return documents of a kind, newest first, without bodies, older than the one that ``before`` names."""
        columns = (documents.c.hash, documents.c.name, documents.c.size_bytes, documents.c.created_ms)
        query = sa.select(*columns).where(self._mine(documents), documents.c.kind == kind)
        if before is not None:
            at_ms, _, address = before.partition("-")
            key = sa.tuple_(documents.c.created_ms, documents.c.hash)
            query = query.where(key < (int(at_ms) if at_ms.isdecimal() else 0, address))
        query = query.order_by(documents.c.created_ms.desc(), documents.c.hash.desc()).limit(limit)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        items = tuple(
            DocumentOut(
                hash=row.hash,
                name=row.name,
                size_bytes=row.size_bytes,
                created_at=iso(row.created_ms),
                href=f"{WHERE_IT_IS[kind]}/{row.hash}",
            )
            for row in rows
        )
        more = len(rows) == limit
        return DocumentPage(items=items, next_cursor=f"{rows[-1].created_ms}-{rows[-1].hash}" if more else None)

    def newest_topologies(self) -> Iterator[ClusterTopology]:
        """Return at most ``TOPOLOGIES_KEPT`` of the POSTed topologies, the newest first."""
        query = (
            sa.select(documents.c.body)
            .where(self._mine(documents), documents.c.kind == ClusterTopology.kind)
            .order_by(documents.c.created_ms.desc())
            .limit(TOPOLOGIES_KEPT)
        )
        with self._database.read() as connection:
            bodies = connection.scalars(query).all()
        return (ClusterTopology.parse_json(bytes(body)) for body in bodies)

    def resolve(self, document: D) -> D:
        """Return a document with stored profiles, topologies and plans inline, validated as if they had been sent so.

        Raises NotFound for a hash that nothing is stored under, and InvalidDocument where the parts contradict.
        """
        fields = self._inline(document)
        return document if fields is None else type(document).parse(fields)

    def _inline(self, part: Part) -> dict[str, Any] | None:
        """Return the fields of a part with documents in place of hashes; None where there is no hash."""
        changed: dict[str, Any] = {}
        for name in type(part).model_fields:
            value = getattr(part, name)
            if isinstance(value, str) and name in self._finders:
                changed[name] = self._finders[name](value)
            elif isinstance(value, Document) and not isinstance(value, PlanFile | ModelProfile | ClusterTopology):
                if (inner := self._inline(value)) is not None:
                    changed[name] = inner
            elif isinstance(value, tuple) and any(isinstance(each, Training) for each in value):
                several = [(each, self._inline(each)) for each in value]
                if any(inner is not None for _, inner in several):
                    changed[name] = [each if inner is None else inner for each, inner in several]
        return {name: getattr(part, name) for name in type(part).model_fields} | changed if changed else None

    @property
    def _finders(self) -> dict[str, Callable[[str], Part]]:
        """Fields that may hold a hash, and what finds its document."""
        return {"profile": self.profile, "topology": self.topology, "plan": self.plan_file}

    def plan(self, address: str) -> Plan:
        """Return a stored plan. Raises InvalidPlan where another version wrote a plan that this one cannot read."""
        return read_stored(Plan, self.body("plan", address))

    def plan_file_body(self, plan_address: str) -> bytes:
        """Return a stored plan with its request inline, as JSON."""
        plan = self.body("plan", plan_address)
        return self._file_body(plan, json.loads(plan)["request_hash"])

    def plan_file(self, plan_address: str) -> PlanFile:
        """Return a stored plan with its request inline. Raises as ``plan``."""
        return read_stored(PlanFile, self.plan_file_body(plan_address))

    def file_of(self, plan: Plan) -> PlanFile:
        """Return a plan, stored or not, with its stored request inline."""
        return read_stored(PlanFile, self._file_body(plan.canonical_json(), plan.request_hash))

    def request(self, address: str) -> PlanRequest:
        """Return a stored request with its documents inline."""
        return self.resolve(read_stored(PlanRequest, self.body("plan request", address)))

    def request_body(self, address: str) -> bytes:
        """Return a stored request with its documents inline, as JSON. Raises NotFound."""
        request = json.loads(self.body("plan request", address))
        profile = self.body("profile", request.pop("profile"))
        topology = self.body("topology", request.pop("topology"))
        rest = json.dumps(request, separators=(",", ":")).encode()
        return b'{"profile":%b,"topology":%b,%b' % (profile, topology, rest[1:])

    def answer(self, cache_key: str) -> bytes | None:
        """Return the finished job that answers a request as the JSON to send, or None if it was never asked before."""
        with self._database.read() as connection:
            body = connection.scalar(_ANSWER, {"tenant": self.tenant, "cache_key": cache_key})
        return None if body is None else bytes(body)

    def _file_body(self, plan: bytes, request_address: str) -> bytes:
        return b'{"schema_version":1,"plan":%b,"request":%b}' % (plan, self.request_body(request_address))

    def _insert(self, rows: Rows) -> None:
        with self._database.read() as connection:
            is_stale = self._stored_addresses(connection, rows)
        if rows.keys() - is_stale.keys() or any(is_stale.values()):
            with self._database.write() as connection:
                self._insert_in(connection, rows)

    def _insert_in(self, connection: sa.Connection, rows: Rows) -> None:
        is_stale = self._stored_addresses(connection, rows)
        if stale := [address for address, stale in is_stale.items() if stale]:
            here = sa.and_(self._mine(documents), documents.c.hash.in_(stale))
            connection.execute(documents.update().where(here).values(used_ms=now_ms()))
        if new := sorted(rows.keys() - is_stale.keys()):
            connection.execute(_NEW, [self._row(address, rows[address]) for address in new])

    def _row(self, address: str, kept: Kept) -> dict[str, Any]:
        return {"tenant": self.tenant, "hash": address, "size_bytes": len(kept.body), **kept._asdict()}

    def _stored_addresses(self, connection: sa.Connection, rows: Rows) -> dict[str, bool]:
        """Return the stored ones among the addresses, each with whether it was last stored long ago."""
        stored_rows = connection.execute(_STORED, {"tenant": self.tenant, "addresses": list(rows)})
        return {row.hash: bool(row.is_stale) for row in stored_rows}

    def _mine(self, table: sa.Table) -> sa.ColumnElement[bool]:
        return table.c.tenant == self.tenant


def stored_before(ms: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    """Return whether a document was last stored before a moment."""
    return sa.func.coalesce(documents.c.used_ms, documents.c.created_ms) < ms


_STORED = sa.select(documents.c.hash, stored_before(now_ms() - FRESH_MS).label("is_stale")).where(
    documents.c.tenant == sa.bindparam("tenant"), documents.c.hash.in_(sa.bindparam("addresses", expanding=True))
)
_NEW = documents.insert().values(created_ms=now_ms())
_ANSWER = sa.select(answers.c.body).where(
    answers.c.tenant == sa.bindparam("tenant"), answers.c.cache_key == sa.bindparam("cache_key")
)


def cache_key(request_hash: str) -> str:
    """Return the key of an answer: the request with all defaults and seed, and the code that would compute it."""
    return hashlib.sha256(f"{request_hash} {code_digest()}".encode()).hexdigest()
