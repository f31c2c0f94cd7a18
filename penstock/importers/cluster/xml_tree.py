"""XML from outside as a small tree whose elements know their line and column; no entities, no external parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any
from xml.sax import SAXException, SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import InputSource

from defusedxml.common import DefusedXmlException
from defusedxml.expatreader import DefusedExpatParser

from penstock.importers.lines import Faults

MOST_LEVELS = 64


@dataclass(slots=True)
class Element:
    """One element; ``text`` is what stands directly in it, stripped. Line and column count from 1."""

    tag: str
    attributes: dict[str, str]
    line: int
    column: int
    parent: Element | None = None
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def below(self, tag: str) -> Iterator[Element]:
        """All elements of a tag below this one, in the order of the text."""
        for child in self.children:
            if child.tag == tag:
                yield child
            yield from child.below(tag)

    def find(self, path: str) -> Element | None:
        """The first element at ``a/b/c`` below this one."""
        found: Element | None = self
        for tag in path.split("/"):
            found = next((child for child in found.children if child.tag == tag), None) if found else None
        return found

    def ancestors(self) -> tuple[Element, ...]:
        """What stands around this element, outermost first."""
        around: list[Element] = []
        at = self.parent
        while at is not None:
            around.append(at)
            at = at.parent
        return tuple(reversed(around))


class _TooDeep(SAXException):
    """Carries no message of its own: the limit is known."""


class _Builder(ContentHandler):
    def __init__(self) -> None:
        super().__init__()
        self.root: Element | None = None
        self.open: list[Element] = []
        self.locator: Any = None

    def setDocumentLocator(self, locator: Any) -> None:  # noqa: N802
        self.locator = locator

    def startElement(self, name: str, attrs: Any) -> None:  # noqa: N802
        if len(self.open) >= MOST_LEVELS:
            raise _TooDeep(name)
        line, column = self.locator.getLineNumber() or 0, self.locator.getColumnNumber() or 0
        element = Element(name, dict(attrs.items()), line, column + 1, self.open[-1] if self.open else None)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def characters(self, content: str) -> None:
        self.open[-1].text += content

    def endElement(self, name: str) -> None:  # noqa: N802
        element = self.open.pop()
        element.text = element.text.strip()


def read_xml(text: str, faults: Faults, *, root: str, is_instead: dict[str, str]) -> Element:
    """The tree of a text whose outermost element is ``root``.

    ``is_instead``: what a text with another outermost element is, to be told. Raises InvalidDocument where the text is
    no XML, declares entities, or is nested deeper than MOST_LEVELS. A DOCTYPE that names a file (nvidia-smi writes one)
    is read past and the file is not opened: expat's SAX driver opens none, and entities would need a declaration.
    """
    if not text.strip():
        faults.add(None, "it is empty")
        faults.stop()
    builder = _Builder()
    parser = DefusedExpatParser(forbid_external=False)
    parser.setContentHandler(builder)
    source = InputSource()
    source.setEncoding("utf-8")
    source.setByteStream(BytesIO(text.lstrip("\ufeff \t\r\n").encode("utf-8", "replace")))
    skipped = text[: len(text) - len(text.lstrip("\ufeff \t\r\n"))].count("\n")

    def refuse(detail: str, at: Any) -> None:
        faults.add((at.getLineNumber() or 1) + skipped, detail, column=(at.getColumnNumber() or 0) + 1)

    try:
        parser.parse(source)
    except SAXParseException as error:
        refuse(f"no XML: {error.getMessage()}", error)
    except _TooDeep:
        refuse(f"it is nested deeper than {MOST_LEVELS} levels", parser)
    except DefusedXmlException:
        refuse("it declares entities, which are not read; take out the DOCTYPE with its content", parser)
    faults.stop()
    assert builder.root is not None, "a text that parses has an outermost element"
    if builder.root.tag != root:
        known = is_instead.get(builder.root.tag)
        other = f"that is {known}" if known else f"it has to be <{root}>"
        faults.add(builder.root.line + skipped, f"the outermost element is <{builder.root.tag}>: {other}", column=1)
    faults.stop()
    return builder.root
