"""Prints the modules between the two ends of three journeys: `python tests/journeys.py`.

- A token id, from its shard to the loss.
- A configuration value, from YAML to its effect: `optim.grad_clip`.
- A checkpoint, from saving to export.

Counted are the modules of the package whose functions run, without `errors` and `console`.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOT_COUNTED = {"leviathan", "leviathan.errors", "leviathan.console"}
SETTING = "grad_clip"
RUN = """
run_dir: run
data: {path: data}
model: {d_model: 16, n_layers: 1, n_heads: 2, seq_len: 32, vocab_size: 301, embedding: {kind: tied}}
train: {steps: 2, global_batch_size: 4, micro_batch_size: 4, eval_every: 0}
optim: {warmup_steps: 0, grad_clip: 0.5}
engine: {kind: fsdp2}
"""


class Journey:
    """The modules whose functions run in the blocks of one journey, in order."""

    def __init__(self, last: tuple[str, str] | None = None) -> None:
        self.modules: dict[str, None] = {}
        self._last = last  # module and function at the end of the journey

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Collects modules in the block, in all threads that it starts."""
        sys.setprofile(self._call)
        threading.setprofile(self._call)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _call(self, frame: Any, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("leviathan.") and name not in NOT_COUNTED:
            self.modules[name] = None
        if event == "return" and (name, frame.f_code.co_name) == self._last:
            sys.setprofile(None)

    def wrap(self, owner: Any, name: str) -> None:
        """Traces the calls of a function or method."""
        original: Callable[..., Any] = getattr(owner, name)

        def traced(*args: Any, **kwargs: Any) -> Any:
            with self.traced():
                return original(*args, **kwargs)

        setattr(owner, name, traced)


def modules_that_read(setting: str) -> list[str]:
    """The modules that access an attribute of this name."""
    found = []
    for file in sorted((ROOT / "leviathan").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(n, ast.Attribute) and n.attr == setting for n in ast.walk(tree)):
            found.append(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return found


def prepare_corpus() -> None:
    """Writes a tokenizer and a small dataset to the working directory."""
    texts = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md"))]
    Path("corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("prep.yaml").write_text(
        "source: {paths: [corpus.jsonl]}\ntokenizer: bpe.tiktoken\nseq_len: 32\nout: data\n"
    )
    train = ["tokenizer", "train", "corpus.jsonl", "--vocab-size", "300", "--out", "bpe.tiktoken"]
    for command in (train, ["prep", "prep.yaml"]):
        subprocess.run([sys.executable, "-m", "leviathan", *command], check=True, stderr=-1)


def main() -> None:
    """Prints the three journeys."""
    os.chdir(tempfile.mkdtemp())
    prepare_corpus()
    Path("run.yaml").write_text(RUN)
    from leviathan.config.load import load_config
    from leviathan.config.run import RunConfig
    from leviathan.data.loader import TrainLoader
    from leviathan.engine.fsdp2 import Fsdp2Engine
    from leviathan.hf.export import export
    from leviathan.train.checkpoint_manager import CheckpointManager
    from leviathan.train.loop import train

    token = Journey(last=("leviathan.model.head", "forward"))
    value, checkpoint = Journey(), Journey()
    with value.traced():
        config = load_config(Path("run.yaml"), [], RunConfig)
    token.wrap(TrainLoader, "microbatches")
    token.wrap(Fsdp2Engine, "train_step")
    checkpoint.wrap(CheckpointManager, "save")
    train(config)
    with checkpoint.traced():
        export("run", Path("exported"))
    value.modules |= dict.fromkeys(modules_that_read(SETTING))
    for title, journey in (
        ("token id, shard to loss", token),
        (f"optim.{SETTING}, YAML to effect", value),
        ("checkpoint, saving to export", checkpoint),
    ):
        print(f"{title}: {len(journey.modules)}", *journey.modules, sep="\n  ")


if __name__ == "__main__":
    main()
