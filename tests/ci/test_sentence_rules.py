"""Sentences, names and help texts that the rules refuse, and plain ones that they accept."""

from __future__ import annotations

import pytest
from sentences.dotted import Modules
from sentences.rules import REMEDIES, Fault, faults

SOURCES = {
    "solvers/tables.py": "LIMIT = 1\nclass Table:\n    rows: int\n    def total(self): self.sum = 1\n"
    "class Kind(str): pass\ndef solve(): pass\n",
    "src/penstock/cli/__init__.py": "def __getattr__(name): pass\n",
}

FORMS = {
    "function": 'def f():\n    """{}"""\n',
    "test": 'def test_f():\n    """{}"""\n',
    "bool-property": 'class C:\n    @property\n    def f(self) -> bool:\n        """{}"""\n',
    "property": 'class C:\n    @property\n    def f(self):\n        """{}"""\n',
    "fixture": '@pytest.fixture(scope="module")\ndef f():\n    """{}"""\n',
    "class": 'class C:\n    """{}"""\n',
    "module": '"""{}"""\n',
    "constant": 'LIMIT = 3\n"""{}"""\n',
    "bool": 'class C:\n    ready: bool\n    """{}"""\n',
    "comment": "# {}\nx = 1\n",
    "name": "{}\n",
    "page": "{}\n",
}


def broken(form: str, text: str) -> set[str]:
    """Return the rules that a text breaks in a form."""
    return {fault.rule for fault in places(form, text)}


def places(form: str, text: str) -> list[Fault]:
    """Return the faults of a text in a form."""
    file = "docs/page.md" if form == "page" else "tests/page.py"
    return list(faults(file, FORMS[form].format(text), Modules(SOURCES, SOURCES.__getitem__)))


@pytest.mark.parametrize(
    ("form", "unclear", "plain"),
    [
        (
            "function",
            "W of every number of stages, as far as it is at most ``limit_ns`` and what the best plan is ``worth``.",
            "Return the smallest W for each stage count. "
            "Stage counts whose W exceeds `limit_ns` or `worth` are omitted.",
        ),
        (
            "function",
            "Return the answer; of a planner that asks others with those that it did not ask.",
            "Build the result. For `auto`, include the planners that were skipped and why.",
        ),
        (
            "function",
            "Who asks, if he had to say so.",
            "Return the authenticated principal, or None if anonymous.",
        ),
        (
            "constant",
            "From a database that is away to the next try.",
            "Delay before retrying an unreachable database, in seconds.",
        ),
        (
            "constant",
            "What stands for no time and for no limit: the two infinities of the solvers, both int64.",
            "Sentinel values for unreachable times and unlimited quantities (int64).",
        ),
        (
            "class",
            "Where the climb is. ``rung`` is the program of the next iteration; once ``settled`` it stays.",
            "State of the search over δ: `rung` indexes the next program; `settled` means the search is over.",
        ),
    ],
)
def test_the_unclear_sentence_is_refused_and_its_plain_version_accepted(form: str, unclear: str, plain: str) -> None:
    assert broken(form, unclear)
    assert not broken(form, plain)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("function", "The ranks of a stage."),
        ("function", "Whether a plan fits."),
        ("function", "Count of stages."),
        ("function", "Lower bound on the period."),
        ("function", "(samples, width) to (samples, 1)."),
        ("property", "Of the whole stage."),
        ("property", "Whether devices are alike."),
        ("bool-property", "Where devices are alike."),
        ("fixture", "With two agents."),
        ("class", "Everything that a rank has."),
        ("module", "How the kernels are compiled."),
        ("module", "Tells the service of plans."),
        ("constant", "By rank."),
        ("constant", "Whether it is ready."),
    ],
)
def test_first_words_that_fail(form: str, text: str) -> None:
    assert broken(form, text) == {"first-word"}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("function", "Lower a plan to one program per rank."),
        ("function", "Check that every rank has a program."),
        ("function", "Back-propagate the gradients."),
        ("test", "Without packages, pytest imports files by their names."),
        ("property", "Number of devices."),
        ("bool-property", "Whether devices are alike."),
        ("property", "Return the number of devices."),
        ("fixture", "A service with two agents."),
        ("class", "``rows`` of a table."),
        ("class", "In-place updates of parameters."),
        ("module", "Megatron's flags."),
        ("constant", "1F1B and its variants."),
        ("bool", "Whether the program is ready."),
        ("bool", "True once the program is ready."),
    ],
)
def test_first_words_that_pass(form: str, text: str) -> None:
    assert not broken(form, text)


@pytest.mark.parametrize(
    ("form", "text", "rule"),
    [
        ("comment", "Plans that there are for it.", "construction"),
        ("comment", "The times are those of the whole run.", "construction"),
        ("comment", "None where there is none.", "construction"),
        ("comment", "The model that IS TO BE trained.", "construction"),
        ("page", "A rank has a process\nof its own.", "construction"),
        ("page", "## Those that fail", "construction"),
        ("comment", "The service is told.", "word"),
        ("page", "The planner is asked anew.", "word"),
        ("module", f"A {'long ' * 24}sentence.", "length"),
        ("page", f"A {'long ' * 39}sentence.", "length"),
        ("page", " ".join([f"A {'long ' * 19}sentence."] * 5), "mean"),
        ("page", "A rank waits; a peer sends; both continue.", "semicolons"),
        ("module", "A rule.\n\nThe rank waits; a peer sends; both continue.", "semicolons"),
        ("module", "A user of ``penstock.solvers.table``.", "reference"),
        ("module", "A user of ``solvers.tables.Tables``.", "reference"),
        ("page", "It calls `penstock.solvers.tables.Table.rank`.", "reference"),
        ("name", f"option(help='{'x' * 101}')", "help"),
        ("name", f"option(help=f'{{default}} {'x' * 101}')", "help"),
        ("name", "found = 1", "name"),
        ("name", "def f(*, given): pass", "name"),
        ("name", "class Found: pass", "name"),
        ("name", "self._held = 1", "name"),
        ("name", "for said in words: pass", "name"),
        ("name", "x += sum(own for own in y)", "name"),
        ("name", "import module as known", "name"),
        ("name", "match x:\n    case [made, *_]: pass", "name"),
        ("name", "def solve(closely=True): pass", "name"),
    ],
)
def test_each_rule_refuses(form: str, text: str, rule: str) -> None:
    assert broken(form, text) == {rule}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("comment", "The rule says that there, on the device, no copy is made."),
        ("comment", "The error says that there is no plan."),
        ("comment", "No plan of the request is none-optimal, and none is lost."),
        ("comment", "The code `as far as` is no prose."),
        ("comment", "noqa: those that"),
        ("name", 'text = "# those that"'),
        ("page", "| those that | those of |\n|---|---|\n| a | b; c; d; e |"),
        ("page", "```\nthose that\n~~~\nthose of\n```"),
        ("page", 'A [page](those-of.md "those that") and `those of` <!-- those of -->.'),
        ("page", f"A sentence, e.g. {'long ' * 20}one. A second sentence of {'long ' * 20}words."),
        ("page", "* a rank waits;\n* a peer sends;\n* both continue."),
        ("page", "A formula is `a; b; c` (x; y; z)."),
        ("module", "A table.\n\n    >>> those that\n\nExample::\n\n    those of\n\nText."),
        (
            "module",
            "See ``solvers.tables.Table.rows``, ``solvers.tables.Table.sum``, ``penstock.solvers.tables.solve()``.",
        ),
        (
            "module",
            "Users of ``solvers.tables.Kind.upper``, ``penstock.cli.any``, ``penstock.service``, ``service.url``.",
        ),
        ("name", "from hypothesis import given"),
        ("name", "found_ns = known_hosts = 1"),
        ("name", "f(given=1)"),
        ("name", "def _solve(closely=True): longest_ns = 3"),
        ("name", f"option(help='{'x' * 100}')"),
    ],
)
def test_what_reads_well_passes(form: str, text: str) -> None:
    assert not places(form, text)


def test_a_fault_names_its_line() -> None:
    text = "Plain words.\n\n* one item\n* another item, for\n  those that read"
    assert [(fault.line, fault.rule) for fault in places("page", text)] == [(5, "construction")]
    assert [fault.line for fault in places("module", "A rule.\n\nA second line.\nThose that read.")] == [4]


def test_every_rule_has_a_remedy() -> None:
    assert {"first-word", "length", "mean", "semicolons", "construction", "word", "name", "reference", "help"} == {
        *REMEDIES
    }
