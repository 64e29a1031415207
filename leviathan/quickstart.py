"""The whole journey at a small size: `make quickstart`.

Every step is a command that a user could type; it is printed before it runs, and each step
continues or says that it is complete when the quickstart is started again.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from rich.rule import Rule

from leviathan.checkpoint.layout import evaluation_dir, step_dir
from leviathan.console import console, say
from leviathan.data.tokenizer import meta_file_of
from leviathan.errors import LeviathanError
from leviathan.parallel.ports import free_port
from leviathan.train.metrics_log import METRICS, read_lines

ROOT = Path(__file__).parent.parent
with suppress(ValueError):
    ROOT = ROOT.relative_to(Path.cwd())  # so that the printed commands are short
POLL_S = 0.2

WHAT_IT_SHOWS = (
    "A run of this size shows the mechanics and the paired data, not which model is better: that "
    "takes billions of tokens (README, 'From here to a real comparison')."
)


@dataclass(frozen=True)
class Size:
    """How much the quickstart does; `TINY` is for tests."""

    vocab_size: int = 8192
    twin_steps: int = 24
    corpus: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


TINY = Size(
    vocab_size=512,
    twin_steps=6,
    corpus=("--max-bytes", "400000"),
    overrides=(
        "model.d_model=32",
        "model.n_layers=1",
        "model.n_heads=2",
        "model.vocab_size=513",
        "model.padded_vocab_size=576",
        "model.embedding.d_seed=8",
        "train.steps=12",
        "train.log_every=1",
        "train.eval_every=6",
        "optim.warmup_steps=2",
        "checkpoint.every=6",
    ),
)


class StepFailed(LeviathanError):
    """A command of the quickstart ended with an error; its own message stands above."""


def run(*command: str | Path) -> None:
    """Shows a command and runs it on this terminal.

    Raises:
        StepFailed: it did not exit with 0.
    """
    finish(start(*command), command)


def start(*command: str | Path, process_group: int | None = None) -> subprocess.Popen[bytes]:
    """Shows a command and starts it; `leviathan` and `deepspeed` are those of this Python."""
    shown = shlex.join(str(part) for part in command)
    say(f"$ {shown}", style="bold")
    program = str(command[0])
    if program in ("leviathan", "python"):
        head = [sys.executable] + (["-m", "leviathan"] if program == "leviathan" else [])
    else:
        head = [str(Path(sys.executable).parent / program)]
    environment = dict(os.environ)
    if not Path("/dev/nvidiactl").exists():
        environment.setdefault("DS_ACCELERATOR", "cpu")  # else every process warns that it is so
    return subprocess.Popen(
        [*head, *map(str, command[1:])], env=environment, process_group=process_group
    )


def finish(process: subprocess.Popen[bytes], command: Sequence[str | Path]) -> None:
    """Waits for a started command.

    Raises:
        StepFailed: it did not exit with 0.
    """
    if status := process.wait():
        raise StepFailed(
            "quickstart.step_failed",
            f"the step above ended with status {status}: {shlex.join(map(str, command))}\n"
            "Fix what it says and start the quickstart again; it continues where it stopped.",
        )


class Quickstart:
    """The steps, in order; `out` holds everything they make."""

    def __init__(self, out: Path, shards: str | None, size: Size) -> None:
        self.out, self.shards, self.size = out, shards, size
        self.corpus, self.data = out / "corpus", out / "data"
        self.tokenizer = out / "tokenizer.tiktoken"
        self.tied, self.leviathan = out / "runs" / "tied", out / "runs" / "leviathan"

    def _steps(self) -> list[tuple[str, Callable[[], None]]]:
        """Title and action of each step."""
        return [
            ("Corpus: the text", self._make_corpus),
            ("Tokenizer: byte-level BPE", self._train_tokenizer),
            ("Prepare: text to rows of tokens", self._prepare),
            ("Train the tied baseline on two ranks", self._train_tied),
            ("Train Leviathan, interrupt it, resume it", self._train_leviathan),
            ("Twins: undisturbed against interrupted and resumed", self._compare_twins),
            ("Evaluate both", self._evaluate),
            ("Export to a Llama folder and load it with transformers", self._export),
            ("Report", self._report),
        ]

    def run(self) -> None:
        """Runs every step; stops at the first that fails."""
        began = time.monotonic()
        steps = self._steps()
        for number, (title, action) in enumerate(steps, 1):
            console.print(Rule(f"[bold]{number}/{len(steps)}[/bold]  {title}", align="left"))
            action()
        say(f"\nThe report: {(self.out / 'report' / 'report.html').resolve()}", style="bold")
        say(f"{WHAT_IT_SHOWS} ({(time.monotonic() - began) / 60:.1f} minutes)")

    # ------------------------------------------------------------ text

    def _train_shards(self) -> list[str]:
        """The shards to train on: the user's, or the standard library's."""
        if not self.shards:
            return [str(path) for path in sorted(self.corpus.glob("train-*"))]
        found = sorted(path for pattern in self.shards.split() for path in glob(pattern))
        if not found:
            raise LeviathanError(
                "quickstart.no_shards",
                f"SHARDS={self.shards!r} matches no file: give paths or patterns of .jsonl, "
                ".jsonl.zst or .jsonl.gz files",
            )
        return found

    def _make_corpus(self) -> None:
        if self.shards:
            say(f"{len(self._train_shards())} shards of your own")
        script = ROOT / "data_prep" / "stdlib_corpus.py"
        run("python", script, "--out", self.corpus, *self.size.corpus)

    def _train_tokenizer(self) -> None:
        if self.tokenizer.exists() and meta_file_of(self.tokenizer).exists():
            say(f"{self.tokenizer} is there already")
            return
        size = ("--vocab-size", str(self.size.vocab_size), "--out", self.tokenizer)
        run("leviathan", "tokenizer", "train", *self._train_shards(), *size)

    def _prepare(self) -> None:
        overrides = [f"tokenizer={self.tokenizer}", f"out={self.data}"]
        if self.shards:
            # A user's shards have no held-out one beside them: a share of their documents is.
            overrides += [f"source.paths={json.dumps(self._train_shards())}", "validation.paths=[]"]
            overrides += ["validation.fraction=0.02"]
        else:
            overrides += [f"source.paths={self.corpus / 'train-*.jsonl.zst'}"]
            overrides += [f"validation.paths={self.corpus / 'heldout.jsonl.zst'}"]
        run("leviathan", "prep", ROOT / "configs" / "data" / "quickstart.yaml", *overrides)

    # ------------------------------------------------------------ training

    def _launch(self, run_dir: Path, *overrides: str, interrupt_at: int | None = None) -> None:
        """Trains on two ranks; at step `interrupt_at` the first rank is sent SIGTERM."""
        command = (
            *("deepspeed", "--num_accelerators", "2", "--master_port", str(free_port()), "-q"),
            *(ROOT / "launch" / "train.py", ROOT / "configs" / "run" / "quickstart.yaml"),
            *(f"run_dir={run_dir}", f"data.path={self.data}"),
            *self.size.overrides,
            *overrides,
        )
        # In a process group of its own: Ctrl-C is for the quickstart, which then ends the launcher;
        # its ranks notice, save and end.
        process = start(*command, process_group=0)
        try:
            if interrupt_at is not None:
                self._interrupt(process, run_dir, interrupt_at)
            finish(process, command)
        except KeyboardInterrupt:
            say("\nInterrupted: the ranks save and end.", style="yellow")
            process.terminate()
            process.wait()
            raise

    @staticmethod
    def _interrupt(process: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
        """Sends SIGTERM to one rank as soon as `step` is logged."""
        while process.poll() is None and last_step(run_dir) < step:
            time.sleep(POLL_S)
        if process.poll() is None:
            pid = json.loads((run_dir / "run.json").read_text())["pid"][0]
            say(f"Step {last_step(run_dir)}: SIGTERM to process {pid}", style="yellow")
            os.kill(pid, signal.SIGTERM)

    def _train_tied(self) -> None:
        if not is_complete(self.tied, total_steps(self.size)):
            self._launch(self.tied, "model.embedding.kind=tied")

    def _train_leviathan(self) -> None:
        half = total_steps(self.size) // 2
        if is_complete(self.leviathan, total_steps(self.size)):
            return
        if last_step(self.leviathan) < half:
            self._launch(self.leviathan, interrupt_at=half)
            say("Interrupted, saved. The same command again:")
        self._launch(self.leviathan)

    def _compare_twins(self) -> None:
        """A short run twice, once interrupted: every logged loss must be the same to the bit."""
        steps = self.size.twin_steps
        short = (f"train.steps={steps}", "train.log_every=1", "optim.warmup_steps=2")
        short = (*short, "train.eval_every=0", "checkpoint.every=0")
        whole, broken = self.out / "runs" / "twin-whole", self.out / "runs" / "twin-resumed"
        if not is_complete(whole, steps):
            self._launch(whole, *short)
        if not is_complete(broken, steps):
            if last_step(broken) < steps // 2:
                self._launch(broken, *short, interrupt_at=steps // 2)
            self._launch(broken, *short)
        losses = [logged(path, "loss") for path in (whole, broken)]
        if losses[0] != losses[1] or len(losses[0]) != steps:
            raise StepFailed(
                "quickstart.losses_differ", f"the losses of {whole} and {broken} differ: {losses}"
            )
        say(f"All {steps} losses are equal bit for bit: resuming changes nothing.", "green")

    # ------------------------------------------------------------ after training

    def _evaluate(self) -> None:
        arms = (self.tied, self.leviathan)
        for run_dir in arms:
            if not self._is_filed(run_dir, "perplexity.json"):
                run("leviathan", "perplexity", run_dir, self.data)
        for run_dir in arms:
            options = ("--tasks", "next_line", "--task-data", self.corpus)
            if not self._is_filed(run_dir, "lm_eval.json"):
                run("leviathan", "eval", run_dir, *options)
        if not all(self._is_filed(run_dir, "frequency.json") for run_dir in arms):
            run("leviathan", "frequency", *arms, "--data", self.data)

    def _is_filed(self, run_dir: Path, name: str) -> bool:
        """Whether an evaluation of the last step is there already."""
        path = evaluation_dir(run_dir, total_steps(self.size)) / name
        if path.exists():
            say(f"{path} is there already")
        return path.exists()

    def _export(self) -> None:
        if (self.out / "export" / "export.json").exists():
            say(f"{self.out / 'export'} is there already")
            return
        run("leviathan", "export", self.leviathan, self.out / "export", "--verify")

    def _report(self) -> None:
        run("leviathan", "report", self.tied, self.leviathan, "--out", self.out / "report")


def logged(run_dir: Path, key: str) -> dict[int, float]:
    """One column of metrics.jsonl by step; empty if the file does not exist yet.

    The trainer may be writing to the file: an incomplete line is skipped.
    """
    lines = read_lines(run_dir / METRICS)
    return {line["step"]: line[key] for line in lines if key in line}


def last_step(run_dir: Path) -> int:
    """The last step a run has logged, 0 before the first."""
    return max(logged(run_dir, "loss"), default=0)


def is_complete(run_dir: Path, steps: int) -> bool:
    """Whether a run has its last checkpoint, so that nothing need be launched."""
    manifest = step_dir(run_dir, steps) / "manifest.json"
    if manifest.exists():
        say(f"{run_dir}: complete after {steps:,} steps")
    return manifest.exists()


def total_steps(size: Size) -> int:
    """`train.steps` of the quickstart at this size."""
    from leviathan.config.load import load_config
    from leviathan.config.schema import RunConfig

    config = load_config(ROOT / "configs" / "run" / "quickstart.yaml", size.overrides, RunConfig)
    return config.train.steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the quickstart; 0 done, 2 a step failed or the input is wrong."""
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("quickstart"), help="folder to fill")
    parser.add_argument("--shards", help="your own jsonl shards: paths or patterns, by spaces")
    parser.add_argument("--tiny", action="store_true", help="seconds of training, for tests")
    options = parser.parse_args(arguments)
    try:
        Quickstart(options.out, options.shards, TINY if options.tiny else Size()).run()
    except LeviathanError as error:
        say(f"error: [{error.code}] {error}", style="red")
        return 2
    except KeyboardInterrupt:
        say("\nInterrupted. The same command again continues where it stopped.", style="yellow")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
