"""Layer 1: no processes. What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "odc/*.md", "bench/results/*.md")
    for path in sorted(ROOT.glob(pattern))
]
_QUOTED = re.compile(r"`([\w.]+/[\w./]+\.\w+)`")
_LINKED = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = (ROOT / document).read_text()
    folders = [ROOT, ROOT / document.parent]
    named = [*_QUOTED.findall(text), *_LINKED.findall(text)]
    outputs = ("runs/",)  # what commands write
    missing = [
        name
        for name in named
        if not name.startswith(outputs) and not any((folder / name).exists() for folder in folders)
    ]
    assert missing == []


def test_most_documents_name_files() -> None:
    counts = [len(_QUOTED.findall((ROOT / document).read_text())) for document in DOCUMENTS]
    assert sum(counts) > 80
