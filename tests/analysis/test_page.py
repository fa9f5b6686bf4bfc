"""One page that needs nothing else."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

from attnres_compile.analysis.page import write_page


class Found(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_pictures_are_inside(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG picture")
    write_page(tmp_path / "index.html", "A <title>", {picture: 'what "it" is'}, "first & last")
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    found = Found()
    found.feed(text)
    (image,) = [attributes for tag, attributes in found.tags if tag == "img"]
    kind, data = str(image["src"]).split(",")
    assert kind == "data:image/png;base64" and base64.b64decode(data) == picture.read_bytes()
    assert image["alt"] == 'what "it" is'
    assert "<h1>A &lt;title&gt;</h1>" in text and "first &amp; last" in text
    # neither scripts, nor other files, nor the network
    assert not {tag for tag, _ in found.tags} & {"script", "link", "iframe"}
    assert not re.search(r"https?:|//|@import|url\(", text.replace(data, ""))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.png", "index.html"]
