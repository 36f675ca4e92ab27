"""Makes the tables of documents whose figures are recorded rows, as those of `in_turns.py`.

    python tests/bench/zoo_tables.py README.md docs/performance.md

A table belongs to the file of results that its section links to: `in_turns_h200.json` has the rows
of workloads and of the zoo, `frameworks_....json` those of `frameworks.py`, of which the latest of
a method counts. A line is found by its first cell, the workload, and filled by the heads of its
columns: a new line needs no more than `| its workload |`. Other tables stay as they are.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"
TURNS: Final = {
    "GPT, width 4096, 8 layers, 8,192 tokens": 65,
    "GPT, width 4096, 4 layers, 32,768 tokens": 69,
    "Llama 8B, 8 layers, 8,192 tokens": 68,
    "Llama 8B, 8 layers, LoRA": 66,
    "Llama, 12 small layers": 87,
    "Llama, width 2048, 10 layers": 70,
    "Llama, width 2048, LoRA of rank 16": 56,
    "Llama with Liger kernels": 73,
    "Llama with torchao float8": 33,
    "Llama, 6 layers, float32 with bfloat16 autocast": 77,
    "Llama, 6 layers, float32 with float16 autocast": 29,
    "Qwen3-MoE, width 1024, 8 layers": 97,
    "GPT-2, width 1024, 16 layers, dropout": 40,
    "BERT, width 1024, 16 layers": 99,
    "T5, width 1024, 12 layers each way, dropout": 39,
    "wav2vec2, width 768, 12 layers": 34,
    "ViT-L, 128 images": 71,
    "Swin-B, 96 images": 38,
    "ConvNeXt-B, 96 images": 24,
    "EfficientNet-B4, 96 images": 54,
}
"""Workloads of in_turns_h200.json, and the latest of its runs that is theirs."""

FRAMEWORKS: Final = {
    "transformers' Trainer": "trainer",
    "TRL's SFTTrainer": "trl",
    "Lightning": "lightning",
    "Accelerate": "accelerate",
    "torchtitan, Llama 8B": "torchtitan",
    "A loop of one's own": "loop",
    "PEFT, LoRA of rank 16": "peft",
    "Liger's kernels": "liger",
    "torchao, float8": "torchao",
    "bitsandbytes, LoRA and 8-bit AdamW": "bitsandbytes",
    "Qwen2-VL, width 2048, 10 layers": "vision-language",
    "Whisper, width 1280, 12 layers each way": "whisper",
    "diffusers' UNet, 16 latents": "diffusion",
}
"""Workloads of frameworks_....json, and what it calls them."""

Rows = list[dict[str, Any]]

_HEAD: Final = "| Workload | ms without | ms checkpointed |"
_RESULTS: Final = re.compile(r"tests/bench/results/(in_turns_h200\.json|frameworks_\w+\.json)")
_SECTION: Final = re.compile(r"^(?=#+ )", re.MULTILINE)


def _mean(method: str, key: str, digits: int) -> Callable[[Rows], str]:
    def text(rows: Rows) -> str:
        found = [row for row in rows if row["method"] == method and key in row]
        counted = [row[key] for row in found if row.get("budget", "least") == "least"]
        return f"{mean(counted):.{digits}f}" if counted else ""

    return text


def _ratio(other: str) -> Callable[[Rows], str]:
    def text(rows: Rows) -> str:
        ours, theirs = (
            mean(row["ms"] for row in rows if row["method"] == method and "ms" in row)
            for method in ("storm", other)
        )
        return f"{ours / theirs:.2f}"

    return text


def _bits(rows: Rows) -> str:
    found = [row["same_bits"] for row in rows if row["method"] == "storm" and "same_bits" in row]
    return ("yes" if all(found) else "no") if found else ""


_COLUMNS: Final = {
    "ms without": _mean("none", "ms", 0),
    "ms checkpointed": _mean("checkpoint", "ms", 0),
    "ms selective": _mean("selective", "ms", 0),
    "ms TRL": _mean("trl", "ms", 0),
    "ms own offload": _mean("own", "ms", 0),
    "ms stormd": _mean("storm", "ms", 0),
    "GiB without": _mean("none", "peak_gib", 1),
    "GiB checkpointed": _mean("checkpoint", "peak_gib", 1),
    "GiB selective": _mean("selective", "peak_gib", 1),
    "GiB TRL": _mean("trl", "peak_gib", 1),
    "GiB own offload": _mean("own", "peak_gib", 1),
    "GiB stormd": _mean("storm", "peak_gib", 1),
    "stormd's by none's": _ratio("none"),
    "stormd's by checkpointing's": _ratio("checkpoint"),
    "Same bits": _bits,
}
"""What is below a head: the mean of turns, of stormd with the least memory."""


def filled(text: str, results: Path = RESULTS) -> str:
    """Return a document with the tables that are made of results, from the files in a folder.

    Raises:
        ValueError: a section with such a table links to two files, or its file has no row of a
            workload, or nothing is known of a column.
    """
    return "".join(_filled(section, results) for section in _SECTION.split(text))


def _filled(section: str, results: Path) -> str:
    names = set(_RESULTS.findall(section))
    if _HEAD not in section or not names:
        return section
    before, head, behind = section.partition(_HEAD)
    table, end, rest = behind.partition("\n\n")
    lines = (head + table).splitlines()
    rows = _rows(names, results)
    heads = _cells(lines[0])
    if unknown := set(heads[1:]) - _COLUMNS.keys():
        raise ValueError(f"columns {sorted(unknown)} are none of {', '.join(_COLUMNS)}")
    filled_lines = [_line(heads, _cells(line)[0], rows) for line in lines[2:]]
    return before + "\n".join([*lines[:2], *filled_lines]) + end + rest


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


def _line(heads: list[str], workload: str, rows: dict[str, Rows]) -> str:
    if workload not in rows:
        raise ValueError(f"no rows of {workload!r}; there are {', '.join(rows)}")
    made = [workload, *(_COLUMNS[head](rows[workload]) for head in heads[1:])]
    return f"| {' | '.join(made)} |"


def _rows(names: set[str], results: Path) -> dict[str, Rows]:
    """Return the rows of each workload, from the file that a section links to."""
    if len(names) > 1:
        raise ValueError(f"a table can be made of one file, not of {sorted(names)}")
    (name,) = names
    recorded = json.loads((results / name).read_text())
    read = _frameworks if name.startswith("frameworks") else _in_turns
    return dict(read(recorded))


def _in_turns(recorded: dict[str, Any]) -> Iterator[tuple[str, Rows]]:
    for workload, run in TURNS.items():
        yield workload, recorded["runs"][run]["rows"]


def _frameworks(recorded: dict[str, Any]) -> Iterator[tuple[str, Rows]]:
    every = [row for run in recorded["runs"] for row in run["rows"]]
    latest = {(row["framework"], row["method"]): row for row in every}
    for workload, framework in FRAMEWORKS.items():
        rows = [row for (name, _), row in latest.items() if name == framework]
        if rows:
            yield workload, rows


def main() -> None:
    """Fill the tables of the documents that are named."""
    for name in sys.argv[1:]:
        document = Path(name)
        document.write_text(filled(document.read_text()))


if __name__ == "__main__":
    main()
