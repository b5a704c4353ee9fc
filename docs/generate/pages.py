"""Pages of the site that are made when it is built: the sheet with its proofs run, the API, the benchmarks.

A hook of MkDocs. `extra.proofs` in mkdocs.yml says which chapters are proven and drawn: "all", or a list.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.generate import benchmarks, reference, sheet  # noqa: E402  the folder above is not a package on the path

SECTIONS = {"The sheet": sheet.contents, "API": reference.contents}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The sections whose pages are made here get them as their list."""
    for item in config.nav or []:
        for title in item:
            if title in SECTIONS:
                item[title] = SECTIONS[title]()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    anchors = reference.anchors()
    made = reference.pages() | sheet.pages(config.extra["proofs"], anchors)
    made |= benchmarks.pages(ROOT / "benchmarks")
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files
