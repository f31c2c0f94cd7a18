"""Short texts that stand for much more are refused after a bounded number of steps, in every reader of layouts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from penstock.layouts.against import differences
from penstock.layouts.files.configurations import configuration
from penstock.layouts.files.shell import Unsaid, Value, Variables
from penstock.layouts.megatron.flags import Flags
from penstock.layouts.torchtitan.models import without_kernels
from penstock.schemas.bounded.budget import MOST_CHARACTERS, MOST_STEPS, Budget
from penstock.schemas.errors import InvalidDocument

PP = "--pipeline-model-parallel-size"
NUMBER = 30


def lines(first: str, each: str, count: int = NUMBER) -> str:
    """Write ``first``, then a line for each number, in which ``{i}`` is the number and ``{j}`` the one before."""
    return "\n".join([first, *(each.format(i=i, j=i - 1) for i in range(1, count))])


SCRIPTS = {
    "doubled": lines("A0=x", "A{i}=$A{j}$A{j}"),
    "four-times": lines("A0=x", "A{i}=$A{j}$A{j}$A{j}$A{j}"),
    "braces": lines("A0=x", "A{i}=${{A{j}}}${{A{j}}}"),
    "quoted": lines("A0=x", 'A{i}="$A{j} $A{j}"'),
    "exported": lines("A0=x", "export A{i}=$A{j}$A{j}"),
    "empty": lines("A0=", "A{i}=$A{j}$A{j}"),
    "arithmetic": lines("A0=1", "A{i}=$(( A{j} - A{j} + A{j} - A{j} ))", 13) + "\nA29=$A12",
    "arithmetic-of-dollars": lines("A0=1", "A{i}=$(( $A{j} - $A{j} + $A{j} - $A{j} ))", 13) + "\nA29=$A12",
    "defaults": lines("A0=", "A{i}=${{A{j}:-$A{j}$A{j}}}$A{j}$A{j}", 14) + "\nA29=$A13",
    "assigned-defaults": lines("A0=x", ": ${{A{i}:=$A{j}$A{j}}}"),
    "wide": f"A0={'x' * 1000}\nA1={'${A0}' * 1000}\nA29={'${A1}' * 1000}",
    "branch": lines("A0=x", "A{i}=$A{j}$A{j}", 29) + '\nif [ "$A28" = y ]; then\nA29=1\nelse\nA29=2\nfi',
    "case": lines("A0=x", "A{i}=$A{j}$A{j}", 29) + "\ncase $A28 in\ny) A29=1 ;;\n*) A29=2 ;;\nesac",
    "many-values": "A29=1\n" * 30_000 + 'if [ "$A29" = 1 ]; then\nB=1\nfi\n' * 50,
    "many-arms": 'if [ "$B" = 1 ]; then\nA29=1\nfi\n' * 1_900 + "A29=1\n" * 5_000,
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_refused_when_its_variables_stand_for_too_much(name: str) -> None:
    budget = Budget("train.sh")
    with pytest.raises(InvalidDocument, match=r"reading .*train\.sh takes more than the allowed [0-9,]+ ") as refused:
        Variables(SCRIPTS[name], budget).value(Value("$A29", 10**9))
    assert refused.value.remedy is not None
    assert budget.steps < 1.2 * MOST_STEPS
    assert budget.characters < 1.6 * MOST_CHARACTERS


@pytest.mark.tier("nightly")
def test_flags_and_comparisons_of_a_script_draw_on_a_budget() -> None:
    script = f"{SCRIPTS['doubled']}\ntorchrun pretrain_gpt.py {PP} $A29 --global-batch-size 8"
    with pytest.raises(InvalidDocument, match="takes more than"):
        Flags(script, "train.sh").number(PP.removeprefix("--"))
    with pytest.raises(InvalidDocument, match="takes more than"):
        differences("", "megatron", script, "train.sh")


def test_a_long_chain_of_variables_is_read() -> None:
    budget = Budget("train.sh")
    text = lines("A0=4", "A{i}=$A{j}", 29)
    assert Variables(text, budget).value(Value("$A28", 10**9)).text == "4"
    assert budget.steps < 100


def thing(body: str) -> str:
    return f"import trainer\ndef made():\n{body}\n    c = trainer.Config()\n    c.size = a\n    return c\n"


def body(*parts: str) -> str:
    return "\n".join(f"    {line}" for part in parts for line in part.split("\n"))


PYTHON = {
    "calls": "import x\ndef f0():\n    return 1\n"
    + "\n".join(f"def f{i}():\n    return f{i - 1}() + f{i - 1}()" for i in range(1, 28))
    + "\nc = x.C()\nc.size = f27()\n",
    "loops": thing(body("a = 0", "for i in range(1000):\n    for j in range(1000):\n        a = a + 1")),
    "comprehensions": thing(body("a = [i for i in range(1000)]", "a = [[j for j in a] for i in a]")),
    "defaults": "import x\ndef f(a=["
    + "1," * 2_000
    + "]):\n    return 1\nc = x.C()\nc.size = [f() for i in range(1000)]\n",
    "repetitions": thing(body("a = 1", "for i in range(1000):\n    a = [0] * 100000")),
    "ranges": thing(body("a = 1", "for i in range(1000):\n    a = list(range(100000))")),
    "extended": thing(body("a = [1]", "for i in range(40):\n    a.extend(a)")),
    "starred": thing(body("a = [1]", "def g(*x):\n    return x", "for i in range(40):\n    a = trainer.f(*a, *a, *a)"))
    .replace("def made", "def g(*x):\n    return x\ndef made")
    .replace("trainer.f(", "g("),
    "paths": thing(
        body(
            "t0 = trainer.C()",
            *(
                line
                for i in range(1, 9)
                for line in (f"t{i} = trainer.C()", *(f"t{i}.a{k} = t{i - 1}" for k in range(10)))
            ),
            "a = t8",
        )
    ),
    "attributes": thing(body("a = trainer", "for i in range(20000):\n    a = a.name")),
    "functions": "import x\n" + "a = 1\n" * 500 + "".join(f"def f{i}():\n    return 1\n" for i in range(500)),
    "texts": thing(body("a = trainer", "for i in range(1000):\n    a = lambda: (" + "1, " * 1000 + ")")),
    "branches": thing(body("a = 1", "for i in range(1000):\n    if trainer.x:\n        b = (" + "1, " * 1000 + ")")),
    "tables": thing(body("a = {i: 1 for i in range(9)}", "b = dict([(i, i) for i in range(9000)])")).replace(
        "{i: 1 for i in range(9)}", "1"
    )
    + "\ndef other():\n    a = 1\n    b = dict([(i, i) for i in range(9000)])\n    for i in range(1000):\n"
    + "        a = {**b}\n",
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", PYTHON)
def test_a_configuration_is_refused_when_it_takes_too_many_steps(name: str) -> None:
    with pytest.raises(InvalidDocument, match=r"reading .*recipe\.py takes more than the allowed [0-9,]+ "):
        configuration(PYTHON[name], "recipe.py", None, {}, lambda _path, _setting: True)


UNKNOWN = {
    "sum": "a = [1]\nfor i in range(40):\n    a = a + a",
    "text": "a = 'x'\nfor i in range(40):\n    a = a + a",
    "compared": "a = [1]\nb = [1]\nfor i in range(40):\n    a = [a, a]\n    b = [b, b]\na = a == b",
    "printed": "a = [1]\nfor i in range(40):\n    a = [a, a]\na = str(a)",
    "formatted": "a = '%999999999d' % 1",
    "joined": "a = ('x' * 90000).join(['y'] * 40)",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_value_that_would_be_too_large_is_not_made(name: str) -> None:
    one = configuration(thing(body(UNKNOWN[name])), "recipe.py", None, {}, lambda _path, _setting: True)
    assert str(one.settings["size"].value).startswith(("Unknown", "str()"))


LINES: dict[str, Callable[[], object]] = {
    "openings": lambda: Variables("A=" + "${" * 200_000, Budget("x")),
    "commands": lambda: Variables("A=" + "$(" * 200_000, Budget("x")),
    "defaulted": lambda: Variables("${a=" * 100_000, Budget("x")),
    "conditions": lambda: Variables(f"if (( {'= ' * 140} )); then\nA=1\nfi\n" * 500, Budget("x")).condition(300),
    "kernels": lambda: without_kernels("_flex" * 100_000 + "x"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_long_line_is_matched_in_linear_time(name: str) -> None:
    with suppress(Unsaid):
        LINES[name]()
