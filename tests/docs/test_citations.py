"""References of code, scripts and pages exist in the repository: sections of the theory, decisions, pages, files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cited import FOLDERS, THEORY, Citation, anchors, citations, files, prose, python, sections
from pages import ROOT

LEAST = {"algorithms.md": 150, "bounds.md": 45, "solvers.md": 11, "executor.md": 14, "judge.md": 10}
"""Least number of citations of each page."""
OF_READERS = {
    *("solvers/planners/equal.py", "solvers/schedules/two_more.py", "schemas/api/legal.py"),
    *("src/penstock/planning/legal.py", "mytrain.py", "pretrain_gpt.py"),
}
"""Files that pages ask their readers to write, or that readers have."""
OTHER_TRAINERS = ("src/penstock/layouts/", "tests/layouts/")
"""These cite files of Megatron-LM, torchtitan, DeepSpeed and PyTorch."""
ABSENT = re.compile(r"\b(DESIGN|SERVICE|HOUSE|STYLE|DEGREES)\b")
_PATH = re.compile(
    rf"(?<![\w/.<{{}}*~$-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w"
    r"\.(?:py|md|json|ya?ml|toml|sh|svg|service))\b(#[\w-]+)?"
)
_NAME = re.compile(r"(`+)([\w./-]*\w\.(?:py|md))\1")
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(#[^)\s]+)?\)")
_DECISIONS = re.compile(r"\b[Dd]ecisions?\s+(\d+)((?:,? and |, )\d+)*")


@pytest.fixture(scope="module", autouse=True)
def _read() -> None:
    prose()


@pytest.mark.parametrize("page", LEAST)
def test_every_cited_section_is_in_the_theory(page: str) -> None:
    places = [(one, cited) for one in prose() for cited in citations(one.text) if cited.page == page]
    assert len(places) >= LEAST[page]
    assert (THEORY / page).exists(), f"{len(places)} citations are of docs/theory/{page}, which is not there"
    there = sections((THEORY / page).read_text(encoding="utf-8"))
    missing = {f"{one.file}:{one.line}: {cited.section}" for one, cited in places if not _has(there, cited.section)}
    assert not missing, f"{page} lacks\n" + "\n".join(sorted(missing))


def _has(there: set[str], section: str) -> bool:
    """Return whether a section exists; a chapter exists as well if sections of it do."""
    return not section or section in there or any(each.startswith(f"{section}.") for each in there)


def test_no_paper_is_cited_that_is_not_in_the_repository() -> None:
    assert ABSENT.search("as in DESIGN 6")
    assert not {f"{one.file}:{one.line}: {each[0]}" for one in prose() for each in ABSENT.finditer(one.text)}


def test_every_decision_that_is_named_is_recorded() -> None:
    recorded = {int(path.name[:4]) for path in (ROOT / "docs/decisions").glob("0*.md")}
    named = [(one, int(n)) for one in prose() for each in _DECISIONS.finditer(one.text) for n in _numbers(each[0])]
    assert len(named) > 12
    assert not {f"{one.file}:{one.line}: decision {number}" for one, number in named if number not in recorded}


def _numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def test_every_path_that_is_named_is_there() -> None:
    seen, missing = 0, set()
    for one in prose():
        for path, anchor in _PATH.findall(one.text) if one.explains else ():
            seen += 1
            target = next((p for p in (ROOT / path, (ROOT / one.file).parent / path) if p.exists()), None)
            if target is None and path not in OF_READERS:
                missing.add(f"{one.file}:{one.line}: {path}")
            elif target is not None and anchor and anchor[1:] not in anchors(target.read_text(encoding="utf-8")):
                missing.add(f"{one.file}:{one.line}: {path}{anchor}")
    assert seen > 200
    assert not missing, "\n".join(sorted(missing))


def test_every_file_that_is_named_in_backticks_is_there() -> None:
    """Also by its last names alone: ``cli/main.py``, ``verify.py``."""
    there = {path.relative_to(ROOT).as_posix() for path in files()}
    ends = {name[at:] for name in there for at in (0, *(m.end() for m in re.finditer("/", name)))}
    seen, missing = 0, set()
    for one in prose():
        for _, name in _NAME.findall(one.text) if one.explains and not one.file.startswith(OTHER_TRAINERS) else ():
            seen += 1
            if name not in ends and name not in OF_READERS and not ((ROOT / one.file).parent / name).exists():
                missing.add(f"{one.file}:{one.line}: {name}")
    assert seen > 100
    assert not missing, "\n".join(sorted(missing))


def test_every_link_of_a_page_leads_somewhere() -> None:
    seen, missing = 0, set()
    for path in (path for path in files() if path.suffix == ".md"):
        text = re.sub(r"^```.*?^```|`[^`\n]+`", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target, anchor in _LINK.findall(text):
            seen += 1
            linked = (path.parent / target) if target else path
            if not linked.exists() or (anchor and linked.suffix == ".md" and anchor[1:] not in _anchors(linked)):
                missing.add(f"{path.relative_to(ROOT)}: {target}{anchor}")
    assert seen > 150
    assert not missing, "\n".join(sorted(missing))


def _anchors(path: Path) -> set[str]:
    return anchors(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("as (ALGORITHMS 1.4–1.7, by hand)", "algorithms 1.4 1.5 1.6 1.7"),
        ("ALGORITHMS 2.6-2.8).", "algorithms 2.6 2.7 2.8"),
        ("EXECUTOR A.1–A.3", "executor A.1 A.2 A.3"),
        ("ALGORITHMS R-8–R-10, 5–7", "algorithms R-8 R-9 R-10 5 6 7"),
        ("ALGORITHMS 1.4 (stage time), 1.5 (transfers) and R-4: 3 of", "algorithms 1.4 1.5 R-4"),
        ("ALGORITHMS 8, M2 to M7)", "algorithms 8"),
        ("ALGORITHMS 7.4 or R-35.", "algorithms 7.4 R-35"),
        ("ALGORITHMS 2.6, S = 3", "algorithms 2.6"),
        ("BOUNDS P7 and section 3)", "bounds P7 3"),
        ("ALGORITHMS'\nappendix C: p = 4", "algorithms C"),
        ("ALGORITHMS 5.5, [R-27]: x", "algorithms 5.5 R-27"),
        ("the ALGORITHMS: up to", "algorithms "),
        ("SOLVERS.md A). Where", "solvers A"),
        ("(BOUNDS Part II, 1.5 and 1.6.", "bounds II II.1.5 II.1.6"),
        ("BOUNDS section 2 and Part II):", "bounds 2 II"),
        ("BOUNDS II, section 3", "bounds II II.3"),
        ("BOUNDS sections 2 and 3", "bounds 2 3"),
        ("BOUNDS part I)", "bounds I"),
        ("``docs/theory/judge.md``, sections 5 and 6.", "judge 5 6"),
        ("docs/theory/judge.md alone", "judge "),
    ],
)
def test_how_citations_are_read(text: str, expected: str) -> None:
    page, *numbers = expected.split(" ")
    assert list(citations(text)) == [Citation(f"{page}.md", number) for number in numbers]


def test_several_pages_in_one_text() -> None:
    assert [f"{one.page} {one.section}" for one in citations("(ALGORITHMS 7.8, SOLVERS C)")] == [
        "algorithms.md 7.8",
        "solvers.md C",
    ]


def test_how_sections_are_read() -> None:
    page = "# Page\n## 2 Two\n### 2.1 One\n# Part II: more\n## 1 First\n### 1.5. Fifth\n## Appendix C: x\n- **R-4** y\n"
    assert sections(page) == {"Page", "2", "2.1", "II", "II.1", "II.1.5", "C", "R-4"}
    assert sections("## I All\n## 1 One\n### P2 Two\n## II.1 Three\n") == {"I", "1", "I.1", "P2", "II.1"}


def test_what_of_a_module_is_prose() -> None:
    module = '"""See BOUNDS\n2."""\n\nX = f("A"\n"B", {1: "C"})\n# why\n# and so on\nY = 3\n"""Of Y."""\n'
    texts = [(one.text, one.explains) for one in python("m.py", module)]
    assert texts == [("See BOUNDS\n2.", True), ("A\nB", False), ("C", False), ("why\nand so on", True), ("Of Y.", True)]


def test_anchors_are_those_of_the_site() -> None:
    assert anchors("# One, two: `x`\n## 3.1 A [b](c.md) – d\n## Same\n## Same\n") == {
        "one-two-x",
        "31-a-b-d",
        "same",
        "same_1",
    }
