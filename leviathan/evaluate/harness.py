"""lm-eval on native checkpoints: a `TemplateLM` of ours, and the tasks that `eval/` defines.

The only module that imports lm_eval. Rules that the scores follow:

- A request's context begins with end-of-text exactly once, as a document does in training. Where
  context and continuation are longer than the model's window, the left is cut off and counted.
- A rolling request begins with it too; its later windows begin with as much of the text before
  them as fits, as rows of the training data do and as lm-eval's own models do.
"""

import difflib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import datasets.exceptions
import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.table import Table

from leviathan.console import as_text, progress_bar, say
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import ConfigError, DataError
from leviathan.evaluate.choices import check_task_files
from leviathan.evaluate.offline import dataset_cache, offline
from leviathan.evaluate.rows import Pair, RowScorer
from leviathan.evaluate.scoring import open_checkpoint
from leviathan.model.transformer import CausalLM

Request = tuple[Any, list[int], list[int]]  # (key, context ids, continuation ids)

TASKS = Path(__file__).parents[2] / "eval"  # a stage folder of the repository, not of the package
TASK_DATA = "${task_data}"  # stands for --task-data in a task's YAML
FEWSHOT_SEED = 1234
DEFAULT_NEW_TOKENS = 256


class LeviathanLM(TemplateLM):
    """A native checkpoint as lm-eval sees it.

    Attributes:
        rows: scores token ids; counts the contexts that it had to cut.
        spanning: requests in which a token spans the border of context and continuation, so that
            the two were encoded apart.
        not_finite: names of the tasks in which a log-likelihood came out as no finite number.
    """

    def __init__(self, model: CausalLM, tokenizer: Tokenizer, batch_size: int = 8) -> None:
        super().__init__()
        self.encoding = tokenizer
        self.rows = RowScorer(model, tokenizer.end_of_text, batch_size)
        self.spanning = 0
        self.not_finite: set[str] = set()

    @property
    def eot_token_id(self) -> int:
        """The end-of-text id used in training; lm-eval's prefix token as well."""
        return self.encoding.end_of_text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ordinary encoding: text never becomes a special id, and nothing is added."""
        return self.encoding.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        stripped = context.rstrip()
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        whole = context_ids + continuation_ids
        if not continuation_ids or self.encoding.encode(context + continuation) != whole:
            self.spanning += 1
            continuation_ids = self.encoding.encode(context[len(stripped) :] + continuation)
        return [self.prefix_token_id, *context_ids], continuation_ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation in nats, whether it is the greedy one) a request."""
        results = super().loglikelihood(requests, disable_tqdm=True)
        self._flag(requests, [value for value, _ in results])
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Log-likelihood of whole texts in nats; every token is scored exactly once."""
        windows = [self.rolling_windows(request.args[0]) for request in requests]
        scores = iter(self.rows.score([pair for own in windows for pair in own]))
        totals = [sum(next(scores)[0] for _ in own) for own in windows]
        self._flag(requests, totals)
        return totals

    def rolling_windows(self, text: str) -> list[Pair]:
        """(context ids, ids to score) pairs that cover the text."""
        windows = get_rolling_token_windows(
            token_list=self.encoding.encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.rows.max_length,
            context_len=1,
        )
        return [make_disjoint_window(window) for window in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = True, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self.rows.score([(context, continuation) for _, context, continuation in requests])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy continuations, cut at the first stop string.

        Raises:
            ConfigError: the task asks for sampling.
        """
        texts = []
        with progress_bar("Generating", total=len(requests)) as bar:
            for request in requests:
                context, options = request.arguments
                if options.get("do_sample") and options.get("temperature", 1):
                    raise ConfigError(
                        f"task {request.task_name} asks for sampling (do_sample); only greedy "
                        "generation is available: set do_sample: false in its YAML"
                    )
                until = options.get("until") or []
                stops = [until] if isinstance(until, str) else list(until)
                texts.append(
                    self._generate(context, stops, options.get("max_gen_toks", DEFAULT_NEW_TOKENS))
                )
                bar.advance()
        return texts

    def _generate(self, context: str, stops: Sequence[str], new_tokens: int) -> str:
        made, text = [], ""
        for token in self.rows.generate(
            [self.prefix_token_id, *self.encoding.encode(context)], new_tokens
        ):
            if token == self.eot_token_id:
                break
            made.append(token)
            text = self.encoding.decode(made)
            found = [text.index(stop) for stop in stops if stop and stop in text]
            if found:
                return text[: min(found)]
        return text

    def _flag(self, requests: Sequence[Instance], values: Sequence[float]) -> None:
        for request, value in zip(requests, values, strict=True):
            if not torch.isfinite(torch.tensor(value)):
                self.not_finite.add(request.task_name or "unnamed task")


def run_tasks(
    checkpoint: Path,
    tasks: Sequence[str],
    task_data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Runs lm-eval tasks on a checkpoint and files `lm_eval.json` beside the run.

    Args:
        checkpoint: whatever `resolve_checkpoint` takes.
        tasks: names, of `eval/*.yaml` or of lm-eval's own tasks.
        task_data: folder with the files that tasks of `eval/` read; given, the network is not used.
        limit: samples a task; None takes all.
        batch_size: sequences at once.

    Returns:
        lm-eval's results, and under "leviathan" what it does not say: the checkpoint, how many
        contexts were cut, and tasks whose scores were not finite (their metrics are null).

    Raises:
        CheckpointError: no whole checkpoint there.
        ConfigError: no or an unknown task, one of `eval/` without `task_data`, a limit below 1.
        DataError: a file of a task is missing or damaged, or a sample does not fit the model.
    """
    if not tasks:
        raise ConfigError("no task is named: give --tasks, as in `--tasks next_line`")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: expected 1 or more samples a task")
    own = _own_tasks(tasks, task_data)
    loaded = open_checkpoint(checkpoint)
    model = LeviathanLM(loaded.model, loaded.tokenizer, batch_size)
    network = nullcontext() if task_data is None else offline()
    with TemporaryDirectory() as scratch, network:
        found = _load_tasks(list(tasks), own, Path(scratch))
        for task in found["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        results = evaluate(model, found, limit=limit, log_samples=False, bootstrap_iters=1_000)
    assert results is not None
    for task in model.not_finite:
        say(f"{task}: the model gave scores that are not finite; its metrics are void", "bold red")
    result = _plain(results)
    for task in model.not_finite & result["results"].keys():
        result["results"][task] = _voided(result["results"][task])
    result["leviathan"] = {
        **loaded.identity,
        "lm_eval": getattr(lm_eval, "__version__", None),
        "truncated_contexts": model.rows.truncated,
        "spanning_tokens": model.spanning,
        "not_finite": sorted(model.not_finite),
        "limit": limit,
        "batch_size": batch_size,
    }
    loaded.file("lm_eval.json", result)
    return result


def results_table(result: dict[str, Any]) -> str:
    """lm-eval's results as a short table: task, metric, value ± standard error, samples."""
    table = Table(title="lm-eval", title_justify="left")
    for head in ("task", "metric", "value", "± stderr", "samples"):
        table.add_column(head, justify="left" if head in ("task", "metric") else "right")
    for task, metrics in result["results"].items():
        samples = (result.get("n-samples") or {}).get(task, {}).get("effective", "")
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            shown = f"{value:.4f}" if isinstance(value, float | int) else "not a number"
            spread = f"{error:.4f}" if isinstance(error, float | int) else ""
            table.add_row(task, metric, shown, spread, str(samples))
    return as_text(table)


def _own_tasks(names: Sequence[str], task_data: Path | None) -> dict[str, str]:
    """The definitions of those tasks that `eval/` has, their files found and read through."""
    own: dict[str, str] = {}
    for name in names:
        file = TASKS / f"{name}.yaml"
        if name not in _defined():
            continue
        if task_data is None:
            raise ConfigError(
                f"task {name} reads files: give the folder they lie in with --task-data DIR"
            )
        text = file.read_text(encoding="utf-8")
        own[name] = text.replace(TASK_DATA, str(Path(task_data).resolve()))
        check_task_files(own[name])
    return own


def _defined() -> list[str]:
    return sorted(file.stem for file in TASKS.glob("*.yaml"))


def _load_tasks(names: list[str], own: dict[str, str], scratch: Path) -> Any:
    """The tasks; lm-eval's own tree is indexed (about 20 s) only for a name that is not ours."""
    for name, text in own.items():
        (scratch / f"{name}.yaml").write_text(text, encoding="utf-8")
    manager = TaskManager(include_path=scratch, include_defaults=not own.keys() >= set(names))
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, [*_defined(), *manager.all_tasks], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"no task {name!r}; {hint}eval/ defines {', '.join(_defined()) or 'none'}, and "
                "lm-eval's own are listed by `lm-eval ls tasks`"
            )
    datasets.disable_progress_bars()  # small files; their bars would only blur ours
    try:
        with dataset_cache(scratch / "cache"):
            return manager.load(names)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"cannot read the data of {', '.join(names)}: {error}") from error


def _plain(value: Any) -> Any:
    """lm-eval's results as JSON values: functions become their names, no NaN."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if torch.isfinite(torch.tensor(value)) else None
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "item"):
        return _plain(value.item())
    return getattr(value, "__name__", str(value))


def _voided(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) else value for key, value in metrics.items()}
