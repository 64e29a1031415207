"""A few items of each of lm-eval's seven tasks, in the Hub's columns."""

import json
from pathlib import Path
from typing import Any

ITEMS: dict[str, list[dict[str, Any]]] = {
    "hellaswag_validation": [
        {
            "ind": number,
            "activity_label": "Wrapping text",
            "ctx_a": "A line is too long.",
            "ctx_b": "the wrapper",
            "endings": ["breaks it. [title] Done", "returns self.", "is a class.", "reads json."],
            "label": str(number % 4),
        }
        for number in range(3)
    ],
    "arc_easy_test": [
        {
            "question": f"Which module reads JSON, {number}?",
            "choices": {"text": ["json", "textwrap", "inspect"], "label": ["A", "B", "C"]},
            "answerKey": "A",
        }
        for number in range(3)
    ],
    "arc_challenge_test": [
        {
            "question": "What does a decoder do with text?",
            "choices": {"text": ["It parses it.", "It wraps it."], "label": ["1", "2"]},
            "answerKey": "2",
        }
    ],
    "piqa_validation": [
        {"goal": "Break a line.", "sol1": "Use wrap.", "sol2": "Use a saw.", "label": number % 2}
        for number in range(3)
    ],
    "winogrande_xl_validation": [
        {
            "sentence": "The line did not fit the page because the _ was too long.",
            "option1": "line",
            "option2": "page",
            "answer": "1",
        }
    ],
    "lambada_openai_test": [
        {"text": "The decoder reads the text and the encoder writes the text"},
        {"text": "He wrote: return self, and then he wrote: return\nself.value"},
    ],
    "wikitext_test": [
        {
            "page": " = Text = \n \n A text is a line @-@ wise thing . "
            + "It has lines , words . " * 9
        }
    ],
}
TASKS = [
    "hellaswag",
    "arc_easy",
    "arc_challenge",
    "piqa",
    "winogrande",
    "lambada_openai",
    "wikitext",
]


def write_items(folder: Path, form: str = "jsonl") -> Path:
    """One file a task, as jsonl or as parquet in the Hub's layout."""
    for name, items in ITEMS.items():
        if form == "jsonl":
            lines = "".join(json.dumps(item) + "\n" for item in items)
            (folder / f"{name}.sample.jsonl").write_text(lines)
            continue
        import pyarrow
        import pyarrow.parquet

        task, _, split = name.rpartition("_")
        place = folder / task.replace("arc_e", "ARC-E").replace("arc_c", "ARC-C")
        place.mkdir()
        table = pyarrow.Table.from_pylist(items)
        pyarrow.parquet.write_table(table, place / f"{split}-00000-of-00001.parquet")
    return folder
