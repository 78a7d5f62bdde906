#!/usr/bin/env python3
"""Writes schemas/*.schema.json from the models in dcr_s3/format/; with --check only compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dcr_s3.format.ack import Ack
from dcr_s3.format.document import Document
from dcr_s3.format.fold import Fold
from dcr_s3.format.manifest import Manifest
from dcr_s3.format.owner import OwnerList
from dcr_s3.format.release import Release
from dcr_s3.format.run import Run
from dcr_s3.format.snapshot import Snapshot

SCHEMAS = Path(__file__).resolve().parent.parent / "schemas"
DOCUMENTS: tuple[type[Document], ...] = (Run, Manifest, Ack, Release, Snapshot, Fold, OwnerList)


def render(document: type[Document]) -> str:
    """The JSON Schema of one document, as it is stored."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **document.model_json_schema(mode="validation"),
    }
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for document in DOCUMENTS:
        path = SCHEMAS / f"{document.__name__.lower()}.schema.json"
        if path.exists() and path.read_text() == render(document):
            continue
        stale.append(path.name)
        if not check:
            path.write_text(render(document))
    if stale:
        print(("out of date, run scripts/export_schemas.py: " if check else "written: ") + ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
