"""Writes the quickstart's corpus, the running Python's own library, to a folder.

python data_prep/stdlib_corpus.py --out runs/quickstart/corpus
"""

import argparse
import json
from pathlib import Path

from leviathan.data.prepare.stdlib_corpus import write_stdlib_corpus


def main() -> None:
    """Parses the arguments, writes the corpus and prints its manifest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--shards", type=int, default=4, help="training shards (default: 4)")
    parser.add_argument(
        "--max-bytes", type=int, default=10_000_000, help="of text (default: 10,000,000)"
    )
    arguments = parser.parse_args()
    print(json.dumps(write_stdlib_corpus(arguments.out, arguments.shards, arguments.max_bytes)))


if __name__ == "__main__":
    main()
