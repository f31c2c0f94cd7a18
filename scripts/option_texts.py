"""Texts that ``scripts/make-client`` writes from the options of requests: tables of pages, a docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent, wrap

from penstock.schemas.options.option import Option

TABLE = re.compile(r"^\| option \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
"""The table of options of a page."""
PARAMETERS = re.compile(r"(?<=    Parameters\n    ----------\n).*?(?=\n\n    \S)", re.DOTALL)
"""The entries of a docstring's parameters, in the layout of numpy."""
OPTIONS = "PlanOptions"
"""The class whose fields are the keywords of the function."""
ENTRY = re.compile(r"^    (\w.*)\n((?:        .*(?:\n|$))+)", re.MULTILINE)


def with_options(page: Path, options: Mapping[str, Option]) -> str:
    """Return a page of the documentation with the table of its options as they are now."""
    rows = ["| option | meaning | without it |", "|---|---|---|"]
    for option in options.values():
        if option.flag:
            shown = f"{option.flag} {option.shown_values}".strip().replace("|", "\\|")
            again = "; repeatable" if option.is_repeatable else ""
            more = f" ([more]({option.page.removeprefix(page.name)}))" if option.page else ""
            rows.append(f"| `{shown}` | {option.help}{again}{more} | {option.default} |")
    return TABLE.sub(lambda _: "\n".join(rows), page.read_text(encoding="utf-8"))


def with_parameters(source: str, function: str, options: Mapping[str, Option]) -> str:
    """Return a module whose function explains each parameter that an option gives in the option's words."""
    tree = ast.parse(source)
    definition = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == function)
    docstring = ast.get_docstring(definition, clean=False)
    section = docstring and PARAMETERS.search(docstring)
    if not section:
        raise ValueError(f"{function} has no docstring with parameters")
    words = {names.split(", ")[0]: f"    {names}\n{text.rstrip()}" for names, text in ENTRY.findall(section[0])}
    keywords = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == OPTIONS)
    fields = [each.target.id for each in keywords.body if isinstance(each, ast.AnnAssign)]  # type: ignore[union-attr]
    order = [*(each.arg for each in definition.args.args), *fields, *(each.arg for each in definition.args.kwonlyargs)]
    for name, option in options.items():
        if option.is_argument:
            text = "\n".join(wrap(option.hint.replace("Empty:", "Left out:"), 112))
            words[name] = f"    {name}\n{indent(text, ' ' * 8)}"
    entries = "\n".join(words[name] for name in order if name in words)
    return source.replace(section[0], entries)
