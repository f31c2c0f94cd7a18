"""Plans of other versions of Penstock: pages say whose they are, and what cannot be read says why, with what to do."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from in_process import in_process
from pages_read import Page

from penstock.examples.tiny import tiny_plan_file
from penstock.schemas.document import OTHER_VERSION
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.plan import PlanFile
from penstock.service.db.tables import documents

AS_A_BROWSER = {"Accept": "text/html"}


def _opened(directory: Path, changes: dict[str, Any]) -> tuple[int, str]:
    """Return status and text of the page of a stored plan whose stored text has been changed."""

    async def opened() -> tuple[int, str]:
        async with in_process(directory) as client:
            service = client._transport.app.state.service  # type: ignore[attr-defined]
            file = PlanFile.parse(tiny_plan_file())
            address = service.planning.of("default").keep(file)
            body = json.loads(service.stores.of("default").body("plan", address)) | changes
            with service.database.write() as connection:
                here = documents.c.hash == address
                connection.execute(sa.update(documents).where(here).values(body=json.dumps(body).encode()))
            answer = await client.get(f"/plans/{address}", headers=AS_A_BROWSER)
            return answer.status_code, " ".join("".join(Page(answer.text).text).split())

    return asyncio.run(opened())


def _typed(directory: Path, text: str) -> tuple[int, str]:
    """Return status and text of the page to which opening the text of a plan file leads."""

    async def opened() -> tuple[int, str]:
        async with in_process(directory) as client:
            headers = AS_A_BROWSER | {"Sec-Fetch-Site": "same-origin"}
            answer = await client.post("/plans", data={"plan_text": text}, headers=headers, follow_redirects=True)
            return answer.status_code, " ".join("".join(Page(answer.text).text).split())

    return asyncio.run(opened())


def test_a_readable_plan_says_who_made_it(tmp_path: Path) -> None:
    status, text = _opened(tmp_path, {"versions": {"penstock": "0.0.9"}})
    assert status == 200
    assert f"Penstock 0.0.9 made this plan, and this is {version('penstock')}." in text


@pytest.mark.parametrize("changes", [{"schema_version": 2}, {"colour": "red"}], ids=["version", "field"])
def test_an_unreadable_plan_says_what_to_do(tmp_path: Path, changes: dict[str, Any]) -> None:
    status, text = _opened(tmp_path, changes | {"versions": {"penstock": "9.9.0"}})
    assert status == 422
    assert f"Penstock 9.9.0 stored this plan file, and Penstock {version('penstock')} cannot read it" in text
    assert f"/plan/{next(iter(changes))}" in text
    assert f"Try: {OTHER_VERSION}" in text


PLAN = tiny_plan_file()["plan"]
SCHEMA = ["/schema_version", "reads documents of version 1", OTHER_VERSION]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"schema_version": 2}, SCHEMA, id="newer"),
        pytest.param({"schema_version": 0}, SCHEMA, id="older"),
        pytest.param(
            {"plan": PLAN | {"colour": "red", "versions": {"penstock": "9.9.0"}}},
            ["/plan/colour", "Penstock 9.9.0 made this plan", OTHER_VERSION],
            id="newer field",
        ),
        pytest.param({"plan": PLAN | {"request_hash": f"sha256:{64 * '0'}"}}, ["was made for request"], id="torn"),
    ],
)
def test_a_file_that_is_opened_is_refused_in_words(
    tmp_path: Path, changes: dict[str, Any], expected: list[str]
) -> None:
    status, text = _typed(tmp_path, json.dumps(tiny_plan_file() | changes))
    assert status == 422
    assert [words for words in expected if words not in text] == []


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no plan was given"),
        ("[]", "but is a list"),
        (json.dumps(tiny_plan_file())[:-9], "this file is not JSON"),
        (json.dumps(tiny_plan_file()["request"]["profile"]), "this file is a profile, not a plan file"),
        (json.dumps(PLAN), "this file is a plan, not a plan file"),
        ("[" * 100_000, "this file"),
    ],
    ids=["empty", "list", "cut off", "profile", "plan alone", "deep"],
)
def test_what_is_no_plan_file_is_said(tmp_path: Path, text: str, expected: str) -> None:
    status, shown = _typed(tmp_path, text)
    assert status == 422
    assert expected in shown
    assert "Try: " in shown


def test_a_plan_file_of_another_version_that_can_be_read_is_opened(tmp_path: Path) -> None:
    document = tiny_plan_file() | {"plan": PLAN | {"versions": {"penstock": "0.0.9"}}}
    status, text = _typed(tmp_path, json.dumps(document))
    assert status == 200
    assert "Penstock 0.0.9 made this plan" in text


@pytest.mark.tier("quick")
def test_a_file_of_another_version_is_told_apart() -> None:
    with pytest.raises(InvalidDocument) as refused:
        PlanFile.parse(tiny_plan_file() | {"schema_version": 2})
    assert refused.value.remedy == OTHER_VERSION
    assert refused.value.faults[0].detail.startswith("another version of Penstock wrote this")
