"""Text that every Python brings along: its library's sources and its documentation, split into train and held-out."""

import hashlib
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = {"code": 20, "prose": 5}  # one document in so many


@dataclass(frozen=True)
class Text:
    """Bytes as tensors of ``uint8``; no document is in two of them."""

    train: Tensor
    code: Tensor
    prose: Tensor

    def batch(self, windows: int, length: int, generator: torch.Generator) -> Tensor:
        """Windows ``[windows, length + 1]`` of the training text."""
        starts = torch.randint(len(self.train) - length - 1, (windows,), generator=generator)
        return torch.stack([self.train[start : start + length + 1] for start in starts.tolist()]).long()

    def held_out(self, name: str, windows: int, length: int) -> Tensor:
        """Windows ``[windows, length + 1]`` spread over a held-out text, the same in every call."""
        text: Tensor = getattr(self, name)
        starts = torch.linspace(0, len(text) - length - 1, windows).long().tolist()
        return torch.stack([text[start : start + length + 1] for start in starts]).long()


def load() -> Text:
    """Sources by file and documentation by topic; what a document's name hashes to decides where it goes."""
    parts: dict[str, list[bytes]] = {"train": [], "code": [], "prose": []}
    for kind, name, content in sorted(documents()):
        held_out = hashlib.sha256(name.encode()).digest()[0] % HELD_OUT[kind] == 0
        parts[kind if held_out else "train"].append(content)
    return Text(
        **{name: torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for name, part in parts.items()}
    )


def documents() -> Iterator[tuple[str, str, bytes]]:
    """Kind, name and content of every document."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in root.rglob("*.py"):
        name = file.relative_to(root).as_posix()
        # The documentation's own file holds the held-out topics, too.
        if not {"site-packages", "test", "tests", "idlelib", "pydoc_data"} & set(name.split("/")[:-1]):
            yield "code", name, file.read_bytes()
    for name, content in pydoc_data.topics.topics.items():
        yield "prose", f"topic {name}", content.encode()
