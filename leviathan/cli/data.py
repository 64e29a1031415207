"""Tokenizers, preparation, and a look into datasets."""

from pathlib import Path
from typing import Annotated, Any

import typer

from leviathan.cli.options import AsJson, Config, Overrides, lines, show
from leviathan.config.load import load_config
from leviathan.config.schema import PrepConfig
from leviathan.console import say
from leviathan.errors import ConfigError

tokenizer_app = typer.Typer(no_args_is_help=True, help="Train a tokenizer.")
data_app = typer.Typer(no_args_is_help=True, help="Look into a prepared dataset, or check it.")


@tokenizer_app.command("train")
def tokenizer_train(
    files: Annotated[list[Path], typer.Argument(help="jsonl files (plain, .zst, .gz).")],
    vocab_size: Annotated[int, typer.Option(help="Entries in the file, 256 bytes included.")],
    out: Annotated[Path, typer.Option(help="The file to write, ending in .tiktoken.")],
) -> None:
    """Trains a byte-level BPE and writes it in tiktoken's rank format.

    The end-of-text id is the one after the last entry, so a file of N entries gives a vocabulary
    of N + 1 ids. Text is split by o200k_base's pattern. A rank file contains neither, so the
    command also writes `bpe.meta.json` beside `bpe.tiktoken`: keep both files together.

    Example: `leviathan tokenizer train corpus/*.jsonl.zst --vocab-size 8192 --out bpe.tiktoken`
    """
    from leviathan.data.tokenizer import meta_file_of, train_bpe

    train_bpe(files, vocab_size, out)
    say(f"{out}: {vocab_size:,} entries; description in {meta_file_of(out)}")


def prep(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Turns a corpus into a tokenized streaming (MDS) dataset.

    Run again, it continues where it stopped, or says that the dataset is complete. With
    `executor=rank`, each of many processes (RANK and WORLD_SIZE, or a Slurm array) tokenizes its
    slice of the files, and `leviathan data merge` ends the work; with `executor=ray`, a Ray cluster
    does it all.

    Example: `leviathan prep configs/data/pile.yaml 'source.paths=pile/*.jsonl.zst' out=data/pile`
    """
    loaded = load_config(config, overrides or [], PrepConfig)
    from leviathan.data.prepare.pipeline import prepare

    show(prepare(loaded), as_json, data_table)


@data_app.command("merge")
def data_merge(
    out: Annotated[Path, typer.Argument(help="The dataset to make; may hold slices itself.")],
    others: Annotated[
        list[Path] | None, typer.Argument(help="Further folders that slices were written to.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Packs what the slices of `leviathan prep executor=rank` have left.

    The bytes are those that one machine alone would have written. A missing slice is named.

    Example: `leviathan data merge data/pile --workers 16`
    """
    from leviathan.data.prepare.merge import merge

    show(merge(out, others or [], workers), as_json, data_table)


@data_app.command("split")
def data_split(
    source: Annotated[Path, typer.Argument(help="A finished dataset.", metavar="SRC")],
    out: Annotated[Path, typer.Option(help="Folder for the datasets, one a subset.")],
    by: Annotated[str, typer.Option(help="`subset` is all there is.")] = "subset",
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Makes one complete dataset per subset from a finished one; nothing is tokenized again.

    Example: `leviathan data split data/pile --by subset --out data/pile-subsets`
    """
    if by != "subset":
        raise ConfigError("cli.invalid_option", f"--by {by}: datasets are split by subset only")
    from leviathan.data.prepare.split import split_by_subset

    show(split_by_subset(source, out, workers), as_json)


@data_app.command("verify")
def data_verify(
    directory: Path,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Checks every file of a dataset against its hashes and counts; exit 2 names what is wrong.

    Example: `leviathan data verify data/pile --workers 16`
    """
    from leviathan.data.prepare.verify import verify

    show(verify(directory, workers), as_json, data_table)


@data_app.command("info")
def data_info(directory: Path, as_json: AsJson = False) -> None:
    """Shows what a dataset holds: documents, tokens, rows and subsets, tokenizer, fingerprint."""
    from leviathan.data.format import DatasetInfo

    show(DatasetInfo.load(directory).summary(), as_json, data_table)


@data_app.command("show")
def data_show(
    directory: Path,
    split: Annotated[str, typer.Option(help="`train` or `val`.")] = "train",
    row: Annotated[int, typer.Option(help="Number of the first row, from 0.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Decodes rows: the documents in them, where they begin and end, their subsets, the padding.

    Example: `leviathan data show data/pile --row 1000 --rows 2`
    """
    from leviathan.data.show import rows_text, show_rows

    show(show_rows(directory, split, row, rows), as_json, rows_text)


def data_table(summary: dict[str, Any]) -> str:
    """A dataset's summary as tables; what a slice of one has done, a line a value."""
    if "splits" not in summary:
        return lines(summary)
    from leviathan.data.show import info_table

    verified = "\nverified: every hash and count is right" if summary.get("verified") else ""
    return info_table(summary) + verified
