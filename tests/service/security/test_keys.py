"""Keys, sessions and rates: what each is, without HTTP."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa

from penstock.cli.main import main
from penstock.schemas.errors import Conflict, InvalidDocument, NotFound, QuotaExceeded
from penstock.service.db.database import Database
from penstock.service.db.tables import api_keys
from penstock.service.security.keys import Keys
from penstock.service.security.principals import OPENS
from penstock.service.security.rates import KEPT, OpenRequests, Rates
from penstock.service.security.sessions import Sessions


@pytest.fixture
def keys(database: Database) -> Keys:
    return Keys(database)


def test_a_key_is_found_by_its_id_and_known_by_its_secret(keys: Keys, database: Database):
    created, text = keys.create("blue", "ann", ["solve", "read", "solve"], max_queued=7)
    prefix, key_id, secret = text.split("_")
    assert (prefix, key_id, len(bytes.fromhex(secret))) == ("psk", created.id, 32)
    key = keys.look_up(key_id)
    assert key is not None
    assert (key.tenant, key.scopes, key.state, key.max_queued) == ("blue", ("read", "solve"), "valid", 7)
    assert key.has_secret(secret)
    assert not key.has_secret(secret[:-1] + ("0" if secret[-1] != "0" else "1"))
    assert not key.has_secret("")
    assert keys.look_up("0" * 12) is None
    with database.read() as connection:
        row = connection.execute(sa.select(api_keys)).mappings().one()
    assert secret not in repr(dict(row)), "the secret is not stored"
    assert key.hash not in repr(key)


def test_use_is_noted_but_not_each_time(keys: Keys, database: Database):
    created, _ = keys.create("blue", "ann", ["read"])
    assert created.last_used_ms is None
    keys.look_up(created.id)
    first = keys.listed()[0].last_used_ms
    assert first is not None
    keys.look_up(created.id)
    assert keys.listed()[0].last_used_ms == first
    with database.write() as connection:
        connection.execute(api_keys.update().values(last_used_ms=first - 120_000))
    keys.look_up(created.id)
    again = keys.listed()[0].last_used_ms
    assert again is not None
    assert again >= first


def test_keys_end(keys: Keys):
    brief, _ = keys.create("blue", "brief", ["read"], lifetime_s=0)
    longer, _ = keys.create("blue", "longer", ["read"], lifetime_s=3600)
    states = {key.name: key.state for key in keys.listed()}
    assert states == {"brief": "expired", "longer": "valid"}
    assert keys.revoke(longer.id).state == "revoked"
    assert keys.revoke(longer.id).revoked_ms == keys.revoke(longer.id).revoked_ms, "the first time counts"
    for over in (brief, longer):
        with pytest.raises(Conflict, match=r"is (expired|revoked)"):
            keys.rotate(over.id, 60)
    for unknown in (keys.revoke, lambda key_id: keys.rotate(key_id, 1)):
        with pytest.raises(NotFound, match="penstock keys list"):
            unknown("f" * 12)


def test_a_rotated_key_and_its_successor_are_both_valid_for_a_while(keys: Keys):
    old, _ = keys.create("blue", "ann", ["run"], lifetime_s=86400, max_running=2)
    new, text = keys.rotate(old.id, 3600)
    assert (new.tenant, new.name, new.scopes, new.max_running) == ("blue", "ann", ("run",), 2)
    assert new.id != old.id
    assert new.has_secret(text.split("_")[2])
    assert new.expires_ms is not None
    assert old.expires_ms is not None
    assert 0 <= new.expires_ms - old.expires_ms < 60_000, "as long a life as the old one had"
    listed = {key.id: key for key in keys.listed("blue")}
    ends = listed[old.id].expires_ms
    assert ends is not None
    assert 3_500_000 < ends - new.created_ms <= 3_600_000
    keys.rotate(new.id, 0)
    assert {key.id: key.state for key in keys.listed()}[new.id] == "revoked", "at once, by any clock"
    brief, _ = keys.create("blue", "brief", ["read"], lifetime_s=60)
    keys.rotate(brief.id, 3600)
    assert {key.id: key for key in keys.listed()}[brief.id].expires_ms == brief.expires_ms, "no longer than it had"


def test_a_key_made_while_the_clock_was_ahead_lives_no_longer_for_that(keys: Keys, database: Database):
    used, _ = keys.create("blue", "used", ["read"], lifetime_s=60)
    unused, _ = keys.create("blue", "unused", ["read"], lifetime_s=60)
    lasting, _ = keys.create("blue", "lasting", ["read"])
    hour_ms = 3_600_000
    with database.write() as connection:
        ahead = {"created_ms": api_keys.c.created_ms + hour_ms, "expires_ms": api_keys.c.expires_ms + hour_ms}
        connection.execute(api_keys.update().values(**ahead))
    shown = keys.look_up(used.id)
    assert shown is not None
    assert shown.state == "valid"
    now = shown.created_ms
    ends = {key.name: key.expires_ms for key in keys.listed()}
    assert ends["lasting"] is None
    for name in ("used", "unused"):
        assert ends[name] is not None
        assert abs(ends[name] - now - 60_000) < 100
    assert abs(now - used.created_ms) < 60_000, "dated as of the present"
    assert {unused.id, lasting.id} < {key.id for key in keys.listed()}


@pytest.mark.parametrize("made_ahead", [False, True], ids=["made before", "made ahead"])
def test_a_key_rotated_while_the_clock_was_ahead_ends_after_its_overlap(
    keys: Keys, database: Database, made_ahead: bool
):
    lasting, _ = keys.create("blue", "lasting", ["read"])
    brief, _ = keys.create("blue", "brief", ["read"], lifetime_s=86400)
    kept, _ = keys.create("blue", "kept", ["read"], lifetime_s=86400)
    for key in (lasting, brief):
        keys.rotate(key.id, 60)
    hour_ms = 3_600_000
    with database.write() as connection:
        rotated = api_keys.c.id.in_((lasting.id, brief.id))
        ahead = {name: api_keys.c[name] + hour_ms for name in ("end_set_ms", "expires_ms")}
        connection.execute(api_keys.update().where(rotated).values(**ahead))
        if made_ahead:
            connection.execute(api_keys.update().where(rotated).values(created_ms=api_keys.c.created_ms + hour_ms))
    mended = keys.look_up(lasting.id)
    assert mended is not None
    assert mended.end_set_ms is not None
    listed = {key.id: key for key in keys.listed()}
    for key in (lasting, brief):
        assert listed[key.id].expires_ms is not None
        assert abs(listed[key.id].expires_ms - mended.end_set_ms - 60_000) < 100
        assert abs(listed[key.id].created_ms - key.created_ms) < 60_000, "dated as of the present, or left"
    assert abs(mended.end_set_ms - lasting.created_ms) < 60_000
    assert listed[kept.id].expires_ms == kept.expires_ms


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("tenant", "name", "scopes", "words"),
    [
        ("Blue", "n", ["read"], "is not a valid tenant name"),
        ("a/b", "n", ["read"], "is not a valid tenant name"),
        ("", "n", ["read"], "is not a valid tenant name"),
        ("a" * 65, "n", ["read"], "is not a valid tenant name"),
        ("blue", "", ["read"], "1 to 128 printable"),
        ("blue", "n\n", ["read"], "1 to 128 printable"),
        ("blue", "n", ["write"], "unknown scope 'write'; the scopes are read, solve, run, agent, admin"),
        ("blue", "n", [], "a key needs a scope"),
    ],
)
def test_keys_that_cannot_be_are_refused(tmp_path: Path, tenant: str, name: str, scopes: list[str], words: str):
    database = Database(f"sqlite:///{tmp_path / 'k.sqlite'}")
    with pytest.raises(InvalidDocument, match=words):
        Keys(database).create(tenant, name, scopes)
    database.close()


@pytest.mark.tier("quick")
def test_a_database_that_cannot_be_written_keeps_nobody_out(tmp_path: Path):
    file = tmp_path / "k.sqlite"
    database = Database(f"sqlite:///{file}")
    database.create()
    created, _ = Keys(database).create("blue", "ann", ["read"])
    database.close()
    reader = sqlite3.connect(file)
    reader.execute("PRAGMA journal_mode=DELETE")
    reader.close()
    frozen = Database(f"sqlite:///{file}")
    with frozen.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only=ON")
    shown = Keys(frozen).look_up(created.id)
    assert shown is not None
    assert Keys(frozen).listed()[0].last_used_ms is None
    frozen.close()


@pytest.mark.tier("quick")
def test_scopes_imply_what_their_owner_needs():
    assert {scope for scope, opened in OPENS.items() if "read" in opened} == {"read", "solve", "run", "admin"}
    assert OPENS["admin"] == frozenset(OPENS)
    assert OPENS["agent"] == {"agent"}


def test_a_session_stands_for_its_key_until_either_ends(keys: Keys):
    now = [1000.0]
    sessions = Sessions("secret", 60, clock=lambda: now[0])
    key, text = keys.create("blue", "ann", ["read"])
    other, _ = keys.create("blue", "bob", ["read"])
    token = sessions.token(key)
    assert text.split("_")[2] not in token
    assert sessions.key_id(token) == key.id
    assert sessions.is_of(token, key)
    assert not sessions.is_of(token, other)
    assert not Sessions("another secret", 60).is_of(token, key), "another service"
    key_id, until, signature = token.split(".")
    assert not sessions.is_of(f"{key_id}.{int(until) + 1}.{signature}", key), "the end cannot be moved"
    now[0] += 61
    assert sessions.key_id(token) is None
    for nonsense in (
        "",
        "a.b.c",
        token + "0",
        token.replace(".", "-"),
        "\x00",
        key.id + "." + "9" * 400 + "." + signature,
    ):
        assert sessions.key_id(nonsense) is None


@pytest.mark.tier("quick")
def test_a_bucket_empties_and_fills_again():
    now = [0.0]
    rates = Rates(2.0, burst_s=1.5, clock=lambda: now[0])
    left = [allowance.remaining for _ in range(3) if (allowance := rates.take("ann"))]
    assert left == [2, 1, 0]
    with pytest.raises(QuotaExceeded, match="the limit is 2 per second, and 3 at once") as refused:
        rates.take("ann")
    assert refused.value.retry_after_s == 0.5
    assert rates.take("bob") is not None, "buckets are apart"
    now[0] += 0.5
    allowance = rates.take("ann")
    assert allowance is not None
    assert allowance.headers() == {"RateLimit-Policy": '"requests";q=3;w=2', "RateLimit": '"requests";r=0;t=2'}
    now[0] += 1e6
    allowance = rates.take("ann")
    assert allowance is not None
    assert allowance.remaining == 2, "no fuller than full"
    assert Rates(0).take("ann") is None


@pytest.mark.tier("quick")
def test_buckets_of_many_addresses_are_forgotten():
    now = [0.0]
    rates = Rates(1.0, burst_s=1, clock=lambda: now[0])
    for number in range(3 * KEPT):
        rates.take(f"address{number}")
        assert len(rates._buckets) <= KEPT
    with pytest.raises(QuotaExceeded):
        rates.take(f"address{3 * KEPT - 1}")


@pytest.mark.tier("quick")
def test_open_requests_are_counted_until_they_leave():
    requests = OpenRequests(2)
    leave, _ = requests.enter("ann"), requests.enter("ann")
    with pytest.raises(QuotaExceeded, match="2 requests of this key are already open"):
        requests.enter("ann")
    requests.enter("bob")
    leave()
    requests.enter("ann")


def test_the_command_line_makes_lists_rotates_and_revokes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    at = ["--database", str(tmp_path / "k.sqlite")]
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> str:
        assert main(["keys", *arguments, *at]) == 0
        return capsys.readouterr().out

    assert "no keys yet" in run("list")
    text = run("create", "--tenant", "blue", "--name", "ann", "--scope", "solve", "--scope", "run").strip()
    key_id = text.split("_")[1]
    (listed,) = json.loads(run("list", "--json"))
    assert (listed["id"], listed["tenant"], listed["scopes"], listed["state"]) == (
        key_id,
        "blue",
        ["run", "solve"],
        "valid",
    )
    assert key_id in run("list"), "in whole, on 80 columns, too"
    assert text.split("_")[2] not in json.dumps(listed)
    assert "hash" not in listed
    new = json.loads(run("rotate", key_id, "--overlap", "0s", "--json"))
    assert new["key"].startswith(f"psk_{new['id']}_")
    assert f"{new['id']} (ann of blue) is revoked" in run("revoke", new["id"])
    table = run("list", "--tenant", "blue")
    assert table.count("revoked") == 2, "the old key ended at once"
    assert "no keys yet" in run("list", "--tenant", "red")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["create", "--name", "n", "--scope", "write"], 65, "unknown scope 'write'"),
        (["create", "--name", "n", "--scope", "read", "--expires", "soon"], 64, "1h30min or 2d, or never"),
        (["create", "--name", "n", "--scope", "read", "--expires", "99999999d"], 64, "longer than a hundred years"),
        (["create", "--name", "n"], 64, "--scope"),
        (["rotate", "0" * 12, "--overlap", "never"], 64, "an overlap has to end"),
        (["rotate", "0" * 12], 1, "there is no key '000000000000'"),
        (["revoke", "x"], 1, "`penstock keys list` lists them"),
    ],
)
def test_the_command_line_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
):
    assert main(["keys", *arguments, "--database", str(tmp_path / "k.sqlite")]) == code
    assert words in capsys.readouterr().err
