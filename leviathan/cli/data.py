"""`leviathan tokenizer`, `prep` and `data`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from leviathan.cli.options import AsJson, Config, Overrides, lines, show
from leviathan.config.data import PrepConfig
from leviathan.config.load import load_config
from leviathan.console import say
from leviathan.errors import ConfigError

tokenizer_app = typer.Typer(no_args_is_help=True, help="Train a tokenizer.")
data_app = typer.Typer(no_args_is_help=True, help="Show, verify, merge and split datasets.")


@tokenizer_app.command("train")
def tokenizer_train(
    files: Annotated[
        list[Path],
        typer.Argument(help="Corpus files: JSONL, Parquet or text, also compressed (.zst, .gz)."),
    ],
    vocab_size: Annotated[int, typer.Option(help="Number of entries, including the 256 bytes.")],
    out: Annotated[Path, typer.Option(help="Output file, ending in .tiktoken.")],
) -> None:
    """Trains a byte-level BPE tokenizer and writes it in tiktoken's format.

    The end-of-text id follows the last entry: N entries give a vocabulary of N + 1 ids. Text is
    split with the pattern of o200k_base. Pattern and end-of-text id are stored in `bpe.meta.json`
    next to `bpe.tiktoken`; keep both files in one directory.

    Example: `leviathan tokenizer train corpus/*.jsonl.zst --vocab-size 8192 --out bpe.tiktoken`
    """
    from leviathan.data.tokenizer import meta_file_of, train_bpe

    train_bpe(files, vocab_size, out)
    say(f"{out}: {vocab_size:,} entries; description in {meta_file_of(out)}")


def prep(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Tokenizes a corpus into a streaming (MDS) dataset.

    The same command resumes an interrupted preparation. With `executor=rank`, each process of a job
    array (RANK and WORLD_SIZE, or Slurm) tokenizes its slice of the files, and `leviathan data
    merge` builds the dataset; with `executor=ray`, a Ray cluster does both.

    Example: `leviathan prep configs/data/pile.yaml 'source.paths=pile/*.jsonl.zst' out=data/pile`
    """
    loaded = load_config(config, overrides or [], PrepConfig)
    from leviathan.data.prepare.pipeline import prepare

    show(prepare(loaded), as_json, data_table)


@data_app.command("merge")
def data_merge(
    out: Annotated[Path, typer.Argument(help="Output directory; may contain slices.")],
    others: Annotated[
        list[Path] | None, typer.Argument(help="Other directories with slices.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Builds the dataset from the slices of `leviathan prep executor=rank`.

    The output is identical to that of a preparation on one machine. Missing slices are reported.

    Example: `leviathan data merge data/pile --workers 16`
    """
    from leviathan.data.prepare.merge import merge

    show(merge(out, others or [], workers), as_json, data_table)


@data_app.command("split")
def data_split(
    source: Annotated[Path, typer.Argument(help="Dataset to split.", metavar="SRC")],
    out: Annotated[Path, typer.Option(help="Output directory, with one dataset per subset.")],
    by: Annotated[str, typer.Option(help="Criterion; only `subset` is supported.")] = "subset",
    workers: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Splits a dataset into one dataset per subset, without tokenizing again.

    Example: `leviathan data split data/pile --by subset --out data/pile-subsets`
    """
    if by != "subset":
        raise ConfigError("cli.invalid_option", f"--by {by}: expected subset")
    from leviathan.data.prepare.split import split_by_subset

    show(split_by_subset(source, out, workers), as_json)


@data_app.command("verify")
def data_verify(
    directory: Path,
    workers: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Verifies all hashes and counts of a dataset. Exits with status 2 and names the first error.

    Example: `leviathan data verify data/pile --workers 16`
    """
    from leviathan.data.prepare.verify import verify

    show(verify(directory, workers), as_json, data_table)


@data_app.command("info")
def data_info(directory: Path, as_json: AsJson = False) -> None:
    """Shows the documents, tokens, samples, subsets, tokenizer and fingerprint of a dataset."""
    from leviathan.data.format import DatasetInfo

    show(DatasetInfo.load(directory).summary(), as_json, data_table)


@data_app.command("show")
def data_show(
    directory: Path,
    split: Annotated[str, typer.Option(help="Split: `train` or `val`.")] = "train",
    row: Annotated[int, typer.Option(help="First sample, counted from 0.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Number of samples.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Decodes samples: their documents with boundaries and subsets, and the padding.

    Example: `leviathan data show data/pile --row 1000 --rows 2`
    """
    from leviathan.data.show import samples_text, show_samples

    show(show_samples(directory, split, row, rows), as_json, samples_text)


def data_table(summary: dict[str, Any]) -> str:
    """Formats the summary of a dataset, or of a slice."""
    if "splits" not in summary:
        return lines(summary)
    from leviathan.data.show import info_table

    verified = "\nverified: all hashes and counts match" if summary.get("verified") else ""
    return info_table(summary) + verified
