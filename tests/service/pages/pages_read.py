"""A page as a program reads it: its tags, links, ids, and what its forms would send."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

NAMES = ("plan", "fits", "questions", "jobs", "sweeps", "runs", "agents", "cluster", "health", "docs")
PAGES = ("/", "/plans", "/questions?name=explain", *(f"/{name}" for name in NAMES))
"""Pages that are about nothing in particular; the navigation leads to the named ones."""


@dataclass
class Form:
    """One form: where it leads, and its fields as a browser would send them."""

    action: str
    method: str
    fields: list[tuple[str, str]] = field(default_factory=list)


class Page(HTMLParser):
    """The tags, links and forms of a page, and whatever its policy would not let run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.ids: list[str] = []
        self.inline: list[str] = []
        self.unnamed: list[str] = []
        self.forms: list[Form] = []
        self.text: list[str] = []
        self._labels: set[str] = set()
        self._named: list[tuple[str, dict[str, str]]] = []
        self._select: tuple[str, str | None] | None = None
        self._textarea: str | None = None
        self._depth_of_label = 0
        self.feed(text)
        for tag, about in self._named:
            if about.get("id") not in self._labels and "aria-label" not in about:
                self.unnamed.append(f"{tag} {about}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.ids += [about["id"]] if "id" in about else []
        self.inline += [f"{tag} {name}" for name in about if name == "style" or name.startswith("on")]
        if (tag == "script" and "src" not in about) or tag == "style":
            self.inline.append(tag)
        if tag == "a" and "href" in about:
            self.links.append(about["href"])
        if tag in ("script", "img") and "src" in about:
            self.sources.append(about["src"])
        if tag == "link":
            self.sources.append(about["href"])
        self._handle_field(tag, about)

    def _handle_field(self, tag: str, about: dict[str, str]) -> None:
        if tag == "form":
            self.forms.append(Form(about.get("action", ""), about.get("method", "get").lower()))
        if tag == "label":
            self._depth_of_label += 1
            self._labels.add(about.get("for", ""))
        if tag in ("input", "select", "textarea") and about.get("type") != "hidden" and not self._depth_of_label:
            self._named.append((tag, about))
        if not self.forms:
            return
        fields = self.forms[-1].fields
        if tag == "input" and "name" in about:
            if about.get("type") not in ("checkbox", "radio") or "checked" in about:
                fields.append((about["name"], about.get("value", "")))
        elif tag == "select" and "name" in about:
            self._select = about["name"], None
        elif tag == "option" and self._select is not None:
            name, chosen = self._select
            if "selected" in about or chosen is None:
                self._select = name, about.get("value", "")
        elif tag == "textarea":
            self._textarea = about["name"]
            fields.append((about["name"], ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "select" and self._select is not None:
            self.forms[-1].fields.append((self._select[0], self._select[1] or ""))
            self._select = None
        if tag == "textarea":
            self._textarea = None
        if tag == "label":
            self._depth_of_label -= 1

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._textarea is not None:
            name, value = self.forms[-1].fields[-1]
            self.forms[-1].fields[-1] = name, value + data
