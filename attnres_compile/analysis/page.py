"""Pictures on one page of HTML that needs nothing else: no network, no scripts, no other files."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Mapping
from pathlib import Path

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:1200px;margin:2rem auto;padding:0 1rem;color:#222}"
    "img{max-width:100%;height:auto}figure{margin:2rem 0}figcaption{color:#444}"
)


def write_page(path: str | os.PathLike[str], title: str, pictures: Mapping[Path, str], introduction: str = "") -> None:
    """Write a page, whole or not at all.

    Args:
        path: of the page.
        title: its heading.
        pictures: PNG files, and what is under each of them.
        introduction: a paragraph before the first.
    """
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(introduction)}</p>" if introduction else "",
    ]
    for file, caption in pictures.items():
        data, text = base64.b64encode(file.read_bytes()).decode(), html.escape(caption)
        parts.append(
            f'<figure><img src="data:image/png;base64,{data}" alt="{text}"><figcaption>{text}</figcaption></figure>'
        )
    parts.append("</body></html>\n")
    partly = Path(f"{os.fspath(path)}.part")
    partly.write_text("\n".join(filter(None, parts)), encoding="utf-8")
    partly.replace(path)
