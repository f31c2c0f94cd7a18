"""Megatron-Core's flags in a script, a manifest, a configuration or a log, in any spelling, read and checked.

Flags stand as ``--name value`` or ``--name=value``. In configurations (NeMo, Megatron's YAML) they are ``name: value``
or ``name=value``, and in a Python module (Megatron-Bridge's recipes) they are the settings of one of its
configurations. Of several values the last one counts, as in Megatron. ``names.py`` has the flags that are read,
``other_flags.py`` flags that change an answer and are not modelled, ``irrelevant_flags.py`` the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from types import MappingProxyType

from penstock.importers.lines import Faults
from penstock.layouts.files.configurations import is_python
from penstock.layouts.files.positions import place
from penstock.layouts.files.shell import EXPANDED, QUOTED, Unsaid, Value, Variables
from penstock.layouts.megatron.forks import DEEPSPEED, INSTEAD, switches_by_value
from penstock.layouts.megatron.irrelevant_flags import IRRELEVANT
from penstock.layouts.megatron.names import (
    MODEL_SWITCHES,
    MODEL_WORDS,
    MODULES,
    NUMBERS,
    OTHER_STACKS,
    OTHERWISE,
    READ,
    SIZES,
    STARTED_BY,
    SWITCHES,
    WIDTHS,
    WORDS,
)
from penstock.layouts.megatron.other_flags import CHANGING, FLAGS_ONLY, HARMLESS
from penstock.layouts.megatron.printed import as_flags
from penstock.layouts.megatron.recipe import settings_of
from penstock.schemas.bounded.budget import Budget
from penstock.schemas.bounded.yaml_text import load_yaml
from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest


def _either(names: Iterable[str]) -> str:
    return "|".join(sorted((name.replace("-", "[-_]") for name in names), key=len, reverse=True))


_OF_PIPELINES = tuple(
    name
    for name in (*NUMBERS, *WORDS, *SWITCHES, *OTHERWISE)
    if OTHERWISE.get(name, name) not in (*SIZES, *WIDTHS, *MODEL_WORDS, *MODEL_SWITCHES)
)
"""Names for which misspellings are looked for."""
_NAMES_OF_FLAGS = READ | CHANGING.keys()
_NAMES = _either(_NAMES_OF_FLAGS)
_BETWEEN = r"[\"']?(?:[ \t]*[=:,][ \t]*|[ \t]+)(?:\\?\r?\n[ \t]*(?:-[ \t]+)?)?|[\"']?\r?\n[ \t]*-[ \t]+"
_FLAG = re.compile(rf"--({_NAMES})(?![\w-])(?:(?:{_BETWEEN})(?!--|\"--|'--)({QUOTED}|(?:{EXPANDED}|[^\s'\"])+))?")
_SETTING = re.compile(
    rf"(?<![\w$-])({_either(_NAMES_OF_FLAGS - FLAGS_ONLY)})[\"']?[ \t]*[:=][ \t]*({QUOTED}|(?:{EXPANDED}|[^\s'\"])*)"
)
_MODULES = re.compile(rf"--{MODULES}[\"']?[=:]?((?:[ \t\\\r\n]+(?:-[ \t]+)?[\[\"',]*[a-z_]+[\]\"',]*)+)")
_ANY_FLAG = re.compile(r"--([a-z][a-z0-9_-]{5,60})(?![\w-])")
_OF_FORKS = re.compile(rf"--({_either(INSTEAD)})(?![\w-])(?:[= \t]+(?!--)[\"']?([^\s\"']+))?")
_TABLES = """
    trainer exp-manager data dataset tokenizer validation checkpoint logger env-vars hydra run sched nsys-profile
"""
_OTHER_TABLES = frozenset(_TABLES.split())
"""Tables of a configuration whose settings are not the model's."""
_NOT_OF_LAYOUTS = frozenset(("activation", "bias", "name", "lr", "betas", "defaults"))
"""Settings that are read by their values, or that change no layout."""
_COMMENT = re.compile(r"(?m)(^|(?<=\s))#.*$")
_NOTHING = ("", "null", "none", "~")
_OFF = ("false", "no", "off", "0", "0.0", *_NOTHING)
_ALIKE = 0.92
_LONGEST = 50_000
"""The longest configuration whose unknown settings are listed, in characters; NeMo's have a tenth of it."""
_MOST_COMPARED = 1000
"""The number of unknown flags that are compared with names; a script has fewer."""
NO_GIVEN: Mapping[str, str] = MappingProxyType({})


class Flags:
    """The flags of a text that a pipeline depends on. Methods that return a value raise InvalidDocument for wrong ones.

    Parameters
    ----------
    text, source
        The text, and its name in messages.
    overrides
        Values of variables and of flags that the text leaves open.
    config
        The name of one of a Python file's configurations.

    Attributes
    ----------
    words
        All values of each flag, in their order, as in the text.
    configured
        Whether the text is a Python file of configurations.
    unknown
        Flags that Megatron does not have.
    unread
        Flags that were left out, with their reasons.
    """

    def __init__(
        self, text: str, source: str, overrides: Mapping[str, str] = NO_GIVEN, config: str | None = None
    ) -> None:
        is_printed = (flags := as_flags(text)) != text
        self.text = text = flags
        self.source = source
        self.words: dict[str, list[Value]] = {}
        self.unknown: tuple[str, ...] = ()
        self.unread: list[str] = []
        self._remarks = ["read from the arguments that Megatron printed, its defaults among them"] if is_printed else []
        self._open: Mapping[str, str] = NO_GIVEN
        plain = _COMMENT.sub(lambda match: " " * len(match[0]), text)
        budget = Budget(source)
        self._variables = Variables(plain, budget, overrides)
        self.configured = is_python(text)
        if self.configured:
            recipe = settings_of(text, source, overrides, config)
            self.words, self._remarks, self._open = recipe.words, list(recipe.remarks), recipe.open
            self._variables = Variables("", budget, overrides)
        else:
            if config is not None:
                raise InvalidDocument(f"{source} has no named configurations", remedy="leave --config out")
            self._scan(plain)
        self._refuse_slips(plain)
        self._take(overrides, plain)
        self._refuse_forks(plain)

    def _scan(self, plain: str) -> None:
        every = [*_FLAG.finditer(plain), *_SETTING.finditer(plain)]
        matches = [match for match in every if self._variables.condition(match.start()).runs is not False]
        for match in sorted(matches, key=re.Match.start):
            name = match[1].replace("_", "-")
            name = OTHERWISE.get(name, name)
            text = match[2] or ("true" if match.re is _FLAG and name in (*OTHER_STACKS, *CHANGING) else "")
            if match.re is _FLAG and name in SWITCHES and text.lower() not in ("true", "false"):
                text = "true"
            word = Value(text, match.start(2) if text == match[2] else match.start())
            self.words.setdefault(name, []).append(word)
        for name, at in switches_by_value(plain):
            if self._variables.condition(at).runs is not False:
                self.words.setdefault(name, []).append(Value("true", at))
        for match in _MODULES.finditer(plain):
            if self._variables.condition(match.start()).runs is False:
                continue
            words = " ".join(re.findall(r"[a-z_]+", match[1]))
            self.words[MODULES] = [Value(words, match.start(1))]

    def _take(self, overrides: Mapping[str, str], plain: str) -> None:
        """Add the overrides of flags. Raises InvalidDocument for a name that is neither a flag nor a variable."""
        for name, value in overrides.items():
            flag = name.lstrip("-").replace("_", "-")
            flag = OTHERWISE.get(flag, flag)
            if flag in READ:
                self.words.setdefault(flag, []).append(Value(value, len(self.text)))
            elif re.search(rf"\$\{{?{re.escape(name)}\b|\b{re.escape(name)}\b", plain) is None:
                raise InvalidDocument(f"{self.source} has no variable or flag {name!r} to set to {value!r}")

    def _refuse_slips(self, plain: str) -> None:
        """Refuse misspelt flags: each once, and of very many the first ones, since comparing two names takes long."""
        faults = Faults(self.source)
        first: dict[str, re.Match[str]] = {}
        for match in _ANY_FLAG.finditer(plain):
            name = match[1].replace("_", "-")
            if name not in _NAMES_OF_FLAGS and _without_no(name) not in IRRELEVANT | STARTED_BY | _NAMES_OF_FLAGS:
                first.setdefault(name, match)
        for name, match in islice(first.items(), _MOST_COMPARED):
            alike = [
                name_of_flag
                for name_of_flag in _OF_PIPELINES
                if abs(len(name_of_flag) - len(name)) <= 0.1 * len(name_of_flag)
            ]
            if near := get_close_matches(name, alike, n=1, cutoff=_ALIKE):
                line, column = place(self.text, match.start())
                detail = f"--{match[1]} is no flag of Megatron's; did you mean --{near[0]}?"
                faults.add(line, detail, column=column, code="layout")
        faults.stop()
        self.unknown = tuple(f"--{name}" for name in first) or tuple(self._unknown_settings(plain))

    def _unknown_settings(self, plain: str) -> list[str]:
        """Return the settings of a configuration in YAML that Megatron does not have; a text with flags is another."""
        try:
            has_other_form = self.configured or len(plain) > _LONGEST or _ANY_FLAG.search(plain)
            data = None if has_other_form else load_yaml(plain, self.source)
        except InvalidDocument:
            return []
        names: dict[str, None] = {}
        left = [data] if isinstance(data, dict) else []
        entered = set(map(id, left))  # an alias may lead back
        while left:
            for key, value in left.pop(0).items():
                name = str(key).replace("_", "-")
                if isinstance(value, dict):
                    left += [value] if name not in _OTHER_TABLES and id(value) not in entered else []
                    entered.add(id(value))
                elif (
                    name not in _NAMES_OF_FLAGS
                    and _without_no(name) not in IRRELEVANT | _NAMES_OF_FLAGS | _NOT_OF_LAYOUTS
                ):
                    names[str(key)] = None
        return list(names)

    def _refuse_forks(self, plain: str) -> None:
        """Raise UnsupportedRequest for flags by which another trainer decides what Megatron-LM's flags leave out."""
        places: list[Fault] = []
        instead: list[str] = []
        for match in _OF_FORKS.finditer(plain):
            name, value = match[1].replace("_", "-"), self._of_fork(match)
            if INSTEAD[name] not in self.words and value not in (None, "0", "1"):
                places.append(Fault(self._place(match.start()), f"--{name} {value}".rstrip(), "layout"))
                instead.append(f"--given {INSTEAD[name]}=…")
        if places:
            raise UnsupportedRequest(
                f"{self.source} is a {DEEPSPEED} script, and Penstock does not read that trainer's own layout flags",
                faults=tuple(places),
                remedy=f"give Megatron-LM's flags instead: {' '.join(dict.fromkeys(instead))}",
            )

    def _of_fork(self, match: re.Match[str]) -> str | None:
        """Return the value of another trainer's flag, looked up where that is possible; None where it does not run."""
        if self._variables.condition(match.start()).runs is False:
            return None
        try:
            return self._variables.value(Value(match[2] or "", match.start())).text
        except Unsaid:
            return match[2] or ""

    def wrong(self, name: str, detail: str, remedy: str | None = None) -> InvalidDocument:
        """Return an error that points to the flag's value."""
        return self._wrong(self._looked_up(name).at, detail, remedy)

    def place(self, name: str) -> str:
        """Return line and column of a flag's value."""
        return self._place(self._looked_up(name).at)

    def _place(self, at: int) -> str:
        line, column = place(self.text, at)
        return f"line {line}, column {column}"

    def _resolved(self, name: str) -> Value:
        """Return the last value of a flag with its variables looked up. Raises Unsaid."""
        word = self.words[name][-1]
        if name in self._open and word.at < len(self.text):
            raise Unsaid(self._open[name])
        under = self._variables.condition(word.at)
        if under.runs is None and len({each.text for each in self.words[name]}) > 1:
            others = dict.fromkeys(f"{each.text} (line {place(self.text, each.at)[0]})" for each in self.words[name])
            raise Unsaid(f"it is {' or '.join(others)}, chosen {under.test}", under.variable)
        return self._variables.value(word)

    def _looked_up(self, name: str) -> Value:
        word = self.words[name][-1]
        try:
            return self._resolved(name)
        except Unsaid as unsaid:
            why, variable = str(unsaid), unsaid.variable
        raise self._wrong(word.at, _no_value(name, word, why), _remedy([variable or name]))

    def ask(self, names: Iterable[str]) -> None:
        """Raise InvalidDocument that names at once all of these flags whose values cannot be read."""
        faults, missing = [], []
        for name, word, unsaid in self._unread(names):
            faults.append(Fault(self._place(word.at), _no_value(name, word, str(unsaid)), "layout"))
            missing.append(unsaid.variable or name)
        if faults:
            many = f"{len(faults)} fault{'' if len(faults) == 1 else 's'}"
            raise InvalidDocument(
                f"{self.source} has {many}", faults=tuple(faults), remedy=_remedy(list(dict.fromkeys(missing)))
            )

    def drop_unread(self, names: Iterable[str]) -> None:
        """Remove the flags of ``names`` whose values cannot be read; ``unread`` says which, where and why."""
        for name, word, unsaid in self._unread(names):
            line, _column = place(self.text, word.at)
            self.unread.append(f"--{name} {word.text}, line {line} ({unsaid})")
            del self.words[name]

    def _unread(self, names: Iterable[str]) -> Iterator[tuple[str, Value, Unsaid]]:
        """Yield the flags of ``names`` whose values cannot be read, with their words and the reason."""
        for name in names:
            if name in self.words:
                try:
                    self._resolved(name)
                except Unsaid as unsaid:
                    yield name, self.words[name][-1], unsaid

    def _wrong(self, at: int, detail: str, remedy: str | None = None) -> InvalidDocument:
        fault = Fault(self._place(at), detail, "layout")
        return InvalidDocument(f"{self.source} has 1 fault", faults=(fault,), remedy=remedy)

    def value(self, name: str) -> Value | None:
        """Return the value of a flag, and its place; None where it is absent."""
        if name not in self.words:
            return None
        word = self._looked_up(name)
        return None if word.text.lower() in _NOTHING else word

    def text_of(self, name: str) -> str | None:
        """Return the value of a flag in small letters; None where it is absent."""
        word = self.value(name)
        return None if word is None else word.text.lower().rstrip(",)}")

    def number(self, name: str, least: int = 1) -> int | None:
        """Return the number of a flag; None where it is absent."""
        word = self.value(name)
        if word is None:
            return None
        digits = re.fullmatch(r"([0-9]{1,9})[),;\]}\\]*", word.text)
        if digits is None or int(digits[1]) < least or digits[1] != str(int(digits[1])):
            raise self._wrong(word.at, f"--{name} is {word.text[:60]!r}, not a whole number of at least {least}")
        return int(digits[1])

    def number_if_readable(self, name: str) -> int | None:
        """Return the number of a flag that is not needed; None where it cannot be read."""
        try:
            word = self._resolved(name).text if name in self.words else ""
        except Unsaid:
            return None
        return int(word) if re.fullmatch(r"[1-9][0-9]{0,5}", word) else None

    def on(self, name: str) -> bool:
        """Return whether a switch is there, and not off."""
        return name in self.words and self._looked_up(name).text.lower().rstrip(",") not in _OFF

    def mentioned(self, name: str) -> bool:
        """Return whether a flag is there and not visibly off."""
        try:
            return self.on(name)
        except InvalidDocument:
            return True

    def changing(self) -> list[str]:
        """Return the flags that change the answer and are not modelled, without values that a plan is judged with."""
        named = [name for name in CHANGING if self.mentioned(name)]
        return [name for name in named if self._as_seen(name) not in HARMLESS.get(name, ())]

    def _as_seen(self, name: str) -> str:
        try:
            return self._resolved(name).text.lower().rstrip(",)")
        except Unsaid:
            return ""

    def remarks(self) -> list[str]:
        """Return sentences on flags with several values, on unread flags, and on values that a recipe leaves open."""
        sentences, supposed = list(self._remarks), dict[str, list[str]]()
        for name, words in self.words.items():
            under = self._variables.condition(words[-1].at)
            if under.runs is None:
                supposed.setdefault(under.test, []).append(f"--{name}")
            if len({word.text for word in words}) > 1:
                line, _column = place(self.text, words[-1].at)
                where = "as given" if words[-1].at >= len(self.text) else f"line {line}"
                sentences.append(f"--{name} is given {len(words)} times; the last one counts, {where}")
        for test, names in supposed.items():
            sentences.append(f"judged as if a condition held that is not known, {test}: {', '.join(names)}")
        if self.unread:
            sentences.append(f"not read, and judged as if absent: {'; '.join(self.unread)}")
        return sentences


def _without_no(name: str) -> str:
    """Return a flag's name without the part that switches it off."""
    return re.sub(r"^(?:no|disable)-", "", name)


def _no_value(name: str, word: Value, why: str) -> str:
    return f"--{name} is {word.text!r}, whose value is unknown: {why}"


def _remedy(missing: list[str]) -> str:
    options = " ".join(f"--given {name}=…" for name in missing)
    return f"give the value: {options}; or write it in the file, or set the variable in a line above (PP=4)"
