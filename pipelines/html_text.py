"""The visible text of an HTML page, in one pass over its tags.

LlamaIndex's `HTMLTagReader` returns the code inside `<script>` as text, and tree builders take time in
the square of the depth of hostile pages.
"""

from __future__ import annotations

from html.parser import HTMLParser

BLOCKS = frozenset(
    (
        "address article aside blockquote br caption dd details div dl dt fieldset figcaption figure footer "
        "form h1 h2 h3 h4 h5 h6 header hr li main ol option p pre section summary table td th tr ul body"
    ).split()
)
# Not shown to a reader.
HIDDEN = frozenset("script style template noscript svg head".split())


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.title: list[str] = []
        self.hidden = {tag: 0 for tag in HIDDEN}
        self.in_title = False
        self.menus: list[int] = []  # where open <nav> began

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in HIDDEN:
            self.hidden[tag] += 1
        elif tag == "body":
            self.hidden["head"] = 0  # whose end tag many pages leave out
        elif tag == "nav":
            self.menus.append(len(self.parts))
        if tag == "title" and not self.title and not self.hidden["svg"]:
            self.in_title = True
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self.hidden[tag] = max(0, self.hidden[tag] - 1)
        if tag == "title":
            self.in_title = False
        if tag == "nav" and self.menus:
            del self.parts[self.menus.pop() :]  # the same on every page; one that never ends is kept
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self.in_title:
            self.title.append(data)
        elif not any(self.hidden.values()):
            self.parts.append(data)


def title_and_text(page: str) -> tuple[str, str]:
    """A page's `<title>` and its visible text, a block a line, white space folded."""
    parser = _Page()
    parser.feed(page)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).splitlines())
    return " ".join("".join(parser.title).split()), "\n".join(line for line in lines if line)
