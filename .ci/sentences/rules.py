"""The rules, and the places in a file that break them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from sentences import words
from sentences.dotted import Modules
from sentences.page_text import page_blocks
from sentences.prose import CODE, Block, Sentence, blocks, count_semicolons, count_words, sentences, without_code
from sentences.python_text import Docstring, bound_names, comments, docstrings, help_texts, rough_comments

DOCSTRING_WORDS = 25
PAGE_WORDS = 40
MEAN_WORDS = 20
LEAST_SENTENCES = 5
"""Sentences of a page from which its mean length is judged; a shorter page has too few for a mean."""
HELP_CHARACTERS = 100

REMEDIES = {
    "first-word": "begin a function's docstring with an imperative verb (VERBS in .ci/sentences/words.py), any other "
    "with an article or a noun",
    "length": f"split it: {DOCSTRING_WORDS} words for the first sentence of a docstring, {PAGE_WORDS} on a page",
    "mean": f"shorten the page's sentences: {MEAN_WORDS} words on average at most",
    "semicolons": "write sentences or a list: a semicolon joins two clauses",
    "construction": "repeat the noun, or say it with a main clause",
    "word": "use the word of the field (docs/glossary.md)",
    "name": "name the thing that it holds, by a noun",
    "reference": "name a module, class, function or attribute that exists",
    "help": f"say what the option does in {HELP_CHARACTERS} characters; move the rest to the page",
}
"""The rules, each with what to do about a fault."""

_DOTTED = re.compile(r"(?<!`)(`{1,2})((?:penstock|schemas|solvers|executor|service)(?:\.\w+)+)(?:\(\))?\1(?!`)")
_FIRST = re.compile(r"[\"'“‘(*\[]*([^\W\d_]+(?:[-'’][^\W\d_]+)*)")
_NAMES = re.compile(rf"\b_*(?:{'|'.join((*words.NAMES, *words.PARAMETERS))})\b", re.IGNORECASE)
_SHOWN = 90


class Fault(NamedTuple):
    """A place that breaks a rule."""

    file: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


def faults(file: str, text: str, modules: Modules) -> Iterator[Fault]:
    """Yield the faults of a page or a Python file."""
    yield from _page(file, text, modules) if file.endswith(".md") else _module(file, text, modules)


def _page(file: str, text: str, modules: Modules) -> Iterator[Fault]:
    lengths = []
    for block in page_blocks(text):
        yield from _phrases(file, block)
        for sentence in () if block.heading else sentences(block):
            lengths.append(length := count_words(sentence.text))
            if length > PAGE_WORDS:
                yield Fault(file, sentence.line, "length", f"{length} words: {_shown(sentence.text)}")
            yield from _semicolons(file, sentence)
    if len(lengths) >= LEAST_SENTENCES and (mean := sum(lengths) / len(lengths)) > MEAN_WORDS:
        yield Fault(file, 1, "mean", f"{mean:.1f} words a sentence")
    yield from _references(file, 1, text, modules)


def _module(file: str, text: str, modules: Modules) -> Iterator[Fault]:
    tree = ast.parse(text)
    for docstring in docstrings(tree, tests=file.startswith("tests/")):
        yield from _docstring(file, docstring)
        joined = "\n".join(line for _, line in docstring.lines)
        yield from _references(file, docstring.lines[0][0], joined, modules)
    rough = without_code(rough_comments(text))
    if words.CONSTRUCTIONS.search(rough) or words.WORDS.search(rough):
        for line, comment in comments(text):
            yield from _phrases(file, Block(line, without_code(comment)))
    if _NAMES.search(text):
        yield from _names(file, tree)
    if "help=" in text:
        for line, shown in help_texts(tree):
            if len(shown) > HELP_CHARACTERS:
                yield Fault(file, line, "help", f"{len(shown)} characters: {_shown(shown)}")


def _docstring(file: str, docstring: Docstring) -> Iterator[Fault]:
    for number, block in enumerate(blocks(docstring.lines)):
        yield from _phrases(file, block)
        for index, sentence in enumerate(sentences(block)):
            if number == index == 0:
                if word := _wrong_opening(docstring.kind, sentence.text):
                    yield Fault(file, sentence.line, "first-word", f"{word!r}: {_shown(sentence.text)}")
                if (length := count_words(sentence.text)) > DOCSTRING_WORDS:
                    yield Fault(file, sentence.line, "length", f"{length} words: {_shown(sentence.text)}")
            yield from _semicolons(file, sentence)


def _wrong_opening(kind: str, sentence: str) -> str:
    """Return the first word where the kind of docstring may not begin with it, otherwise ""."""
    match = _FIRST.match(sentence)
    first = match[1] if match else (sentence.split() or [""])[0]
    verb = first in words.VERBS and not (set(sentence.split()[1:2]) & words.NOUN_AFTER)
    if kind == "test" or verb:
        return ""
    if kind == "function":
        return first or sentence[:1]
    if kind == "bool" and first == "Whether":
        return ""
    return first if first != CODE and first.lower() in words.NO_OPENINGS else ""


def _phrases(file: str, block: Block) -> Iterator[Fault]:
    for rule, pattern in (("construction", words.CONSTRUCTIONS), ("word", words.WORDS)):
        for match in pattern.finditer(block.text):
            line = block.line + block.text.count("\n", 0, match.start())
            around = " ".join(block.text[max(0, match.start() - _SHOWN // 2) : match.end() + _SHOWN // 2].split())
            yield Fault(file, line, rule, f"{' '.join(match[0].split())!r}: … {around} …")


def _semicolons(file: str, sentence: Sentence) -> Iterator[Fault]:
    if (number := count_semicolons(sentence.text)) > 1:
        yield Fault(file, sentence.line, "semicolons", f"{number} semicolons: {_shown(sentence.text)}")


def _names(file: str, tree: ast.Module) -> Iterator[Fault]:
    for name in bound_names(tree):
        if name.name.strip("_").lower() in words.NAMES:
            yield Fault(file, name.line, "name", f"`{name.name}`")
        elif name.public and name.name in words.PARAMETERS:
            yield Fault(file, name.line, "name", f"`{name.name}`: {words.PARAMETERS[name.name]}")


def _references(file: str, first: int, text: str, modules: Modules) -> Iterator[Fault]:
    for match in _DOTTED.finditer(text):
        if not modules.resolves(match[2]):
            yield Fault(file, first + text.count("\n", 0, match.start()), "reference", f"`{match[2]}`")


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
