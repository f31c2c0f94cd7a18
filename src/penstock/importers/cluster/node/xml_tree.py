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
_CUT_OFF = ("unclosed token", "no element found", "unclosed CDATA section")
"""Messages of expat for a text that ends too early."""


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
        """Yield all elements of a tag below this one, in the order of the text."""
        for child in self.children:
            if child.tag == tag:
                yield child
            yield from child.below(tag)

    def find(self, path: str) -> Element | None:
        """Return the first element at ``a/b/c`` below this one."""
        element: Element | None = self
        for tag in path.split("/"):
            element = next((child for child in element.children if child.tag == tag), None) if element else None
        return element

    def ancestors(self) -> tuple[Element, ...]:
        """Return the elements around this element, outermost first."""
        around: list[Element] = []
        at = self.parent
        while at is not None:
            around.append(at)
            at = at.parent
        return tuple(reversed(around))


class _TooDeep(SAXException):
    """The place where nesting is too deep; the parser has gone on when the error is caught."""

    def __init__(self, line: int, column: int) -> None:
        super().__init__("too deep")
        self.line, self.column = line, column


class _Builder(ContentHandler):
    def __init__(self, lines_before: int) -> None:
        super().__init__()
        self.lines_before = lines_before
        self.root: Element | None = None
        self.open: list[Element] = []
        self.texts: list[list[str]] = []
        """Pieces of each open element's text: expat hands over each line and each ``&amp;`` alone."""
        self.locator: Any = None

    def setDocumentLocator(self, locator: Any) -> None:  # noqa: N802
        self.locator = locator

    def startElement(self, name: str, attrs: Any) -> None:  # noqa: N802
        line, column = _position(self.locator, self.lines_before)
        if len(self.open) >= MOST_LEVELS:
            raise _TooDeep(line, column)
        element = Element(name, dict(attrs.items()), line, column, self.open[-1] if self.open else None)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)
        self.texts.append([])

    def characters(self, content: str) -> None:
        self.texts[-1].append(content)

    def endElement(self, name: str) -> None:  # noqa: N802
        element = self.open.pop()
        element.text = "".join(self.texts.pop()).strip()


def read_xml(text: str, faults: Faults, *, root: str, is_instead: dict[str, str]) -> Element:
    """Return the tree of a text whose outermost element is ``root``.

    ``is_instead``: the meaning of other outermost elements, for the message. Raises InvalidDocument where the text is
    not XML, declares entities, or is nested deeper than MOST_LEVELS. A DOCTYPE that names a file (nvidia-smi writes
    one) is read past and the file is not opened: expat's SAX driver opens no file, and entities would need a
    declaration.
    """
    begun = text.lstrip("\ufeff \t\r\n")
    if not begun:
        faults.add(None, "it is empty")
        faults.stop()
    lines_before = text[: len(text) - len(begun)].count("\n")
    builder = _Builder(lines_before)
    parser = DefusedExpatParser(forbid_external=False)
    parser.setContentHandler(builder)
    source = InputSource()
    source.setEncoding("utf-8")
    source.setByteStream(BytesIO(begun.encode("utf-8", "replace")))

    def refuse(detail: str, at: Any) -> None:
        line, column = _position(at, lines_before)
        faults.add(line, detail, column=column)

    try:
        parser.parse(source)
    except SAXParseException as error:
        cut = " (is the text cut off?)" if error.getMessage() in _CUT_OFF else ""
        refuse(f"no XML: {error.getMessage()}{cut}", error)
    except _TooDeep as error:
        faults.add(error.line, f"it is nested deeper than {MOST_LEVELS} levels", column=error.column)
    except DefusedXmlException:
        refuse("it declares entities, which are not read; take out the DOCTYPE with its content", parser)
    faults.stop()
    assert builder.root is not None, "a text that parses has an outermost element"
    if builder.root.tag != root:
        meaning = is_instead.get(builder.root.tag)
        other = f"that is {meaning}" if meaning else f"it has to be <{root}>"
        faults.add(builder.root.line, f"the outermost element is <{builder.root.tag}>: {other}", column=1)
    faults.stop()
    return builder.root


def _position(locator: Any, lines_before: int) -> tuple[int, int]:
    """Return line and column from 1; SAX counts columns from 0 and does not count the stripped lines."""
    return (locator.getLineNumber() or 1) + lines_before, (locator.getColumnNumber() or 0) + 1
