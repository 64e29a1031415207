"""lm-eval on native checkpoints: a `TemplateLM`, and the tasks that `eval/` defines.

The only module that imports lm_eval. Rules for the scores:

- The context of a request begins with the prefix token exactly once: end-of-text, as in training,
  or the beginning-of-sequence token of an imported model. If both do not fit the model's
  context, the context is truncated from the left and counted.
- A prompt keeps all its tokens; the number of new tokens is limited by the remaining context, and
  limited requests are counted.
- A rolling request also begins with the prefix token; its later windows begin with as much of the
  preceding text as fits, as in the training data and in the models of lm-eval.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from itertools import chain
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
from torch import Tensor

from leviathan.config.explain import did_you_mean
from leviathan.console import as_text, progress_bar, say
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import ConfigError, DataError
from leviathan.evaluate.generate import (
    FittedPrompt,
    TextStream,
    TruncationCounts,
    fit_prompt,
    sum_counts,
)
from leviathan.evaluate.harness.tasks import dataset_cache, defined, definitions, offline
from leviathan.evaluate.intervals import no_standard_error
from leviathan.evaluate.scoring import (
    LoadedCheckpoint,
    Ranks,
    join_ranks,
    open_checkpoint,
    write_json,
)
from leviathan.files import check_writable_dir, write_atomic
from leviathan.model.head import IGNORE, TokenScores
from leviathan.model.kv_cache import OnToken, generate, with_materialized_embedding
from leviathan.model.transformer import CausalLM

# ---------------------------------------------------------------- sequences

Pair = tuple[list[int], list[int]]  # (context ids, ids to score)


class SequenceScorer:
    """Scores (context, continuation) pairs in batches of `batch_size` sequences.

    Sequences are padded on the right, so with a causal model no score depends on the batch. If they
    do not fit the context, they are truncated from the left and counted in `truncated`. Ranks share
    the batches.
    """

    def __init__(
        self, model: CausalLM, padding: int, batch_size: int, ranks: Ranks | None = None
    ) -> None:
        self.model = with_materialized_embedding(model.eval())  # one lookup per token
        self.padding = padding
        self.batch_size = batch_size
        self.ranks = ranks or Ranks()
        self.max_length = model.config.seq_len
        self.device = next(model.parameters()).device
        self.truncated = 0

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation in nats, whether it is the greedy one), in order.

        Raises:
            DataError: a continuation is longer than the model's context.
        """
        rows = [self._row(*pair) for pair in pairs]
        # Long sequences first, so that a batch that exceeds the memory fails immediately. Sequences
        # of similar length share a batch, which reduces padding.
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
        size = self.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        with progress_bar("Log-likelihoods", total=len(rows)) as bar:

            def score_batch(batch: list[int]) -> list[tuple[float, bool]]:
                scores = list(self._score_batch([rows[index] for index in batch]))
                bar.advance(len(batch) * self.ranks.world_size)
                return scores

            scored = self.ranks.map(score_batch, batches)
        results = dict(zip(order, chain.from_iterable(scored), strict=True))
        return [results[index] for index in range(len(rows))]

    def overflow(self, context: Sequence[int], continuation: Sequence[int]) -> int:
        """Number of ids to remove from a context so that it fits together with its continuation."""
        return max(0, len(context) + len(continuation) - (self.max_length + 1))

    def generate(
        self, contexts: Sequence[list[int]], new_tokens: int, end: int, on_token: OnToken
    ) -> None:
        """Greedy continuations, one batch; see `leviathan.model.kv_cache.generate`."""
        generate(self.model, contexts, new_tokens, end, on_token)

    def _row(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """Ids of one sequence, and the number of scored ids at its end."""
        if len(continuation) > self.max_length:
            raise DataError(
                "tasks.too_long",
                f"a continuation of {len(continuation):,} tokens does not fit the model's context "
                f"of {self.max_length:,}; this task needs a model with a longer context",
            )
        ids = context + continuation
        self.truncated += self.overflow(context, continuation) > 0
        return ids[-(self.max_length + 1) :], len(continuation)

    def _score_batch(self, rows: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        length = max(len(ids) for ids, _ in rows) - 1
        inputs = torch.full((len(rows), length), self.padding)  # [B, T]
        targets = torch.full((len(rows), length), IGNORE)
        for number, (ids, scored) in enumerate(rows):
            row, end = torch.tensor(ids), len(ids) - 1
            inputs[number, :end] = row[:-1]
            targets[number, end - scored : end] = row[len(ids) - scored :]
        scores = self._scores(inputs.to(self.device), targets.to(self.device))
        total = -scores.nll.double().sum(1)  # [B]
        greedy = scores.is_greedy.sum(1).cpu() == (targets != IGNORE).sum(1)
        return zip(total.tolist(), greedy.tolist(), strict=True)

    @torch.no_grad()
    def _scores(self, inputs: Tensor, targets: Tensor) -> TokenScores:
        """Like `score` of the model, but computes logits only for scored positions."""
        counts = targets != IGNORE
        hidden = self.model.hidden(inputs)[counts].unsqueeze(0)  # [1, N, D]
        found = self.model.lm_head(hidden, targets[counts].unsqueeze(0), "scores")
        nll = torch.zeros(targets.shape, dtype=found.nll.dtype, device=targets.device)
        greedy = torch.zeros_like(counts)
        nll[counts], greedy[counts] = found.nll[0], found.is_greedy[0]
        return TokenScores(nll, greedy)


# ---------------------------------------------------------------- results


def without_nan(value: Any) -> Any:
    """lm-eval's results as JSON values: functions become their names, no NaN."""
    if isinstance(value, dict):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [without_nan(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "item"):
        return without_nan(value.item())
    return getattr(value, "__name__", str(value))


def without_unsupported_errors(metrics: dict[str, Any]) -> dict[str, Any]:
    """Sets the metrics of a task whose scores were not finite to None."""
    return {key: None if isinstance(value, float) else value for key, value in metrics.items()}


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
            spread = ""
            if isinstance(error, float | int):
                spread = no_standard_error(samples, error) or f"{error:.4f}"
            table.add_row(task, metric, _shown(value), spread, str(samples))
    for task, figures in result["leviathan"].get("rolling", {}).items():
        table.add_row(task, "token perplexity", _shown(figures["perplexity"]), "", "")
    return as_text(table)


def _shown(value: Any) -> str:
    if not isinstance(value, float | int):
        return "not a number"
    return f"{value:.4f}" if abs(value) < 1e7 else f"{value:.4g}"


# ---------------------------------------------------------------- lm-eval


Request = tuple[Any, list[int], list[int]]  # (key, context ids, continuation ids)

RESULTS, SAMPLES = "lm_eval.json", "lm_eval_{}.jsonl"
BUILTIN = Path(lm_eval.__file__).parent / "tasks"
FEWSHOT_SEED = 1234
DEFAULT_NEW_TOKENS = 256
# Keys of generation_kwargs for the number of new tokens, in the priority of lm-eval.
NEW_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Keys that greedy generation supports or may ignore.
GENERATION_KEYS = {"until", "do_sample", "temperature", "top_p", "top_k", *NEW_TOKENS_KEYS}
NEUTRAL_OPTIONS = {"num_beams": 1, "repetition_penalty": 1}
UNNAMED = "unnamed task"


class LeviathanLM(TemplateLM):
    """A native checkpoint as a model of lm-eval.

    Ranks share the batches below lm-eval: each rank has all requests and all scores, so metrics and
    files are the same as with one rank.

    Attributes:
        rows: scores token ids; counts the truncated contexts.
        spanning: requests in which a token spans the boundary between context and continuation.
        not_finite: names of the tasks with a log-likelihood that is not finite.
        rolled: summed log-likelihood and number of tokens of full texts, by task.
        truncation: contexts and generations that did not fit the model's context, by task.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        batch_size: int = 8,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.encoding = tokenizer
        self.rows = SequenceScorer(model, tokenizer.end_of_text, batch_size, ranks)
        self.spanning = 0
        self.not_finite: set[str] = set()
        self.rolled: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self.truncation: dict[str, TruncationCounts] = defaultdict(TruncationCounts)
        self._task_names: list[str] = []  # tasks of the current requests

    @property
    def eot_token_id(self) -> int:
        """The end-of-text id used in training."""
        return self.encoding.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """The id before every text; see `Tokenizer.prefix_token`."""
        return self.encoding.prefix_token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ordinary encoding: text never becomes a special id, and nothing is added."""
        return self.encoding.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Splits context and continuation like the models of lm-eval.

        The continuation consists of the ids of the joined text after those of the context. If a
        token spans the boundary, these ids cover only part of the continuation; if none are left,
        the two strings are encoded separately.
        """
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        joined = context_ids + continuation_ids
        if not continuation_ids or self.encoding.encode(context + continuation) != joined:
            self.spanning += 1
        if not continuation_ids:
            blanks = context[len(context.rstrip()) :]
            continuation_ids = self.encoding.encode(blanks + continuation)
        return [self.prefix_token_id, *context_ids], continuation_ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of the continuation in nats, and whether it is greedy, per request."""
        self._task_names = [request.task_name or UNNAMED for request in requests]
        results = super().loglikelihood(requests, disable_tqdm=True)
        self._flag(requests, [value for value, _ in results])
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Log-likelihood of full texts in nats; every token is scored exactly once."""
        windows = [self.rolling_windows(request.args[0]) for request in requests]
        scores = iter(self.rows.score([pair for own in windows for pair in own]))
        totals = [sum(next(scores)[0] for _ in own) for own in windows]
        for request, total, own in zip(requests, totals, windows, strict=True):
            sums = self.rolled[request.task_name or UNNAMED]
            sums[0] += total
            sums[1] += sum(len(scored) for _, scored in own)
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
        pairs = [(context, continuation) for _, context, continuation in requests]
        for task, pair in zip(self._task_names, pairs, strict=True):
            self.truncation[task].add_context(self.rows.overflow(*pair))
        return self.rows.score(pairs)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy continuations, cut at the first stop string.

        Raises:
            ConfigError: the task requires sampling or an unsupported option.
        """
        prompts, stops, lengths = [], [], []
        for request in requests:
            context, options = request.arguments
            _check_options(request.task_name or UNNAMED, options)
            until = options.get("until") or []
            stops.append([until] if isinstance(until, str) else until)
            lengths.append(_new_tokens(options))
            ids = [self.prefix_token_id, *self.encoding.encode(context)]
            prompts.append(fit_prompt(ids, lengths[-1], self.rows.max_length))
            prompts[-1].count(self.truncation[request.task_name or UNNAMED])
        batches = list(self._alike(prompts, lengths))
        with progress_bar("Generating", total=len(requests)) as bar:

            def texts(batch: list[int]) -> list[str]:
                streams = [TextStream(self.encoding, stops[i]) for i in batch]
                self._generate([prompts[i] for i in batch], streams)
                bar.advance(len(batch) * self.rows.ranks.world_size)
                return [stream.text for stream in streams]

            made = self.rows.ranks.map(texts, batches)
        found = {
            place: text
            for batch, texts_ in zip(batches, made, strict=True)
            for place, text in zip(batch, texts_, strict=True)
        }
        return [found[place] for place in range(len(requests))]

    def _alike(self, prompts: Sequence[FittedPrompt], lengths: list[int]) -> Iterator[list[int]]:
        """Batches of requests with the same number of new tokens and prompts of similar length."""
        order = sorted(range(len(prompts)), key=lambda i: (lengths[i], -len(prompts[i].ids)))
        while order:
            same = [i for i in order[: self.rows.batch_size] if lengths[i] == lengths[order[0]]]
            yield same
            del order[: len(same)]

    def _generate(self, prompts: Sequence[FittedPrompt], streams: Sequence[TextStream]) -> None:
        def on_token(row: int, token: int) -> bool:
            streams[row].add(token)
            return not streams[row].stopped and streams[row].tokens < prompts[row].new_tokens

        longest = max(prompt.new_tokens for prompt in prompts)
        ids = [prompt.ids for prompt in prompts]
        self.rows.generate(ids, longest, self.eot_token_id, on_token)
        for stream in streams:
            stream.end()

    def _flag(self, requests: Sequence[Instance], values: Sequence[float]) -> None:
        for request, value in zip(requests, values, strict=True):
            if not torch.isfinite(torch.tensor(value)):
                self.not_finite.add(request.task_name or UNNAMED)


def run_tasks(
    checkpoint: Path,
    tasks: Sequence[str],
    task_data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    out: Path | None = None,
) -> dict[str, Any]:
    """Runs lm-eval tasks on a checkpoint and writes `lm_eval.json` into the run directory.

    Under a launcher, the ranks share the batches; the result is the same as with one rank.

    Args:
        checkpoint: path accepted by `resolve_checkpoint`, or a Hugging Face Llama directory.
        tasks: names of tasks in `eval/*.yaml` or of lm-eval.
        task_data: directory with the files of the tasks; if given, the network is not used.
        limit: maximum number of samples per task; None for all.
        batch_size: sequences per batch.
        out: directory for `lm_eval.json` and the samples of each task, one JSON object per line.

    Returns:
        The results of lm-eval, and under "leviathan": the checkpoint, the number of truncated
        contexts, loss per token of full texts, and tasks whose scores were not finite
        (their metrics are null).

    Raises:
        CheckpointError: no valid checkpoint was found.
        ConfigError: no or an unknown task, one of `eval/` without `task_data`, a limit below 1.
        DataError: a file of a task is missing or corrupt, or a continuation is longer than the
            context.
    """
    if not tasks:
        raise ConfigError(
            "tasks.none_named", "no task given: use --tasks, for example `--tasks next_line`"
        )
    if limit is not None and limit < 1:
        raise ConfigError(
            "cli.invalid_option", f"--limit {limit}: expected 1 or more samples per task"
        )
    ranks = join_ranks()
    if out is not None:
        ranks.on_rank_zero(lambda: check_writable_dir(out))
    ranks.on_each_rank(
        lambda: definitions(tasks, task_data, BUILTIN)
    )  # before the weights are read
    loaded = open_checkpoint(checkpoint, ranks)
    result, samples = score_tasks(loaded, tasks, task_data, limit, batch_size)
    if out is not None and ranks.rank == 0:
        write_json(out / RESULTS, result)
        for task, lines in samples.items():
            text = "".join(
                json.dumps(without_nan(line), ensure_ascii=False) + "\n" for line in lines
            )
            write_atomic(out / SAMPLES.format(task), text.encode())
    return result


def check_tasks(tasks: Sequence[str], task_data: Path | None) -> None:
    """Checks without a model that the tasks can be run; for tasks of lm-eval, only the names.

    Raises:
        ConfigError: an unknown task, or one of `eval/` without `task_data`.
        DataError: a file of a task is missing or corrupt.
    """
    own = definitions(tasks, task_data, BUILTIN)
    with TemporaryDirectory() as scratch:
        _manager(tasks, own, Path(scratch))


def score_tasks(
    loaded: LoadedCheckpoint,
    tasks: Sequence[str],
    task_data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Runs lm-eval tasks on a model and writes `lm_eval.json` into its run directory.

    Args:
        loaded: the model, on every rank of a launch.
        tasks: names of tasks.
        task_data: directory with the files of the tasks.
        limit: maximum number of samples per task; None for all.
        batch_size: sequences per batch.

    Returns:
        What `run_tasks` returns, and each task's samples.

    Raises:
        ConfigError, DataError: as `run_tasks`.
    """
    ranks = loaded.ranks
    own = ranks.on_each_rank(lambda: definitions(tasks, task_data, BUILTIN))
    model = LeviathanLM(loaded.model, loaded.tokenizer, batch_size, ranks)
    result, samples = evaluate_model(model, tasks, own, task_data is not None, limit)
    for task in sorted(model.not_finite):
        say(
            f"{task}: the model returned scores that are not finite; the metrics are set to null",
            "bold red",
        )
    for task, counts in sorted(model.truncation.items()):
        counts.report(task, model.rows.max_length)
    cut = sum_counts(model.truncation)
    for task in model.not_finite & result["results"].keys():
        result["results"][task] = without_unsupported_errors(result["results"][task])
    result["leviathan"] = {
        **loaded.identity,
        "lm_eval": getattr(lm_eval, "__version__", None),
        "truncated_contexts": cut.contexts,
        "truncated_tokens": cut.tokens,
        "capped_generations": cut.capped_generations,
        "truncation": {
            task: asdict(counts)
            for task, counts in model.truncation.items()
            if any(vars(counts).values())
        },
        "spanning_tokens": model.spanning,
        "rolling": {task: _per_token(*sums) for task, sums in model.rolled.items()},
        "not_finite": sorted(model.not_finite),
        "limit": limit,
        "batch_size": batch_size,
    }
    loaded.file(RESULTS, result)
    return result, samples


def evaluate_model(
    model: Any, tasks: Sequence[str], own: dict[str, str], local: bool, limit: int | None = None
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Runs tasks on any model that lm-eval accepts.

    Args:
        model: a `LeviathanLM`, or a model of lm-eval for comparison.
        tasks: names of tasks.
        own: return value of `definitions`.
        local: do not use the network.
        limit: maximum number of samples per task; None for all.

    Returns:
        lm-eval's results as JSON values, and by task its samples with every log-likelihood.
    """
    with TemporaryDirectory() as scratch, offline() if local else nullcontext():
        found = _load_tasks(list(tasks), own, Path(scratch))
        for task in found["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        with redirect_stdout(sys.stderr):  # lm-eval prints progress to stdout
            results = evaluate(model, found, limit=limit, log_samples=True, bootstrap_iters=1_000)
    assert results is not None
    samples: Any = results.pop("samples", {})
    return without_nan(results), samples


def _check_options(task: str, options: dict[str, Any]) -> None:
    """Refuses generation_kwargs that would be ignored.

    Raises:
        ConfigError: sampling, or a key that greedy generation does not support.
    """
    if options.get("do_sample") and options.get("temperature", 1):
        raise ConfigError(
            "tasks.unsupported",
            f"task {task} requests sampling (do_sample); only greedy "
            "generation is available: set do_sample: false in its YAML",
        )
    for key, value in options.items():
        if key not in GENERATION_KEYS and NEUTRAL_OPTIONS.get(key, ...) != value:
            raise ConfigError(
                "tasks.unsupported",
                f"task {task}: generation_kwargs.{key} is {value!r}, which is not supported; "
                f"expected {', '.join(sorted(GENERATION_KEYS))}: change it in the task's YAML",
            )


def _new_tokens(options: dict[str, Any]) -> int:
    """The number of new tokens that a task requests."""
    requested = (options[key] for key in NEW_TOKENS_KEYS if options.get(key) is not None)
    return int(next(requested, DEFAULT_NEW_TOKENS))


def _per_token(loglikelihood: float, tokens: float) -> dict[str, Any]:
    """Loss per token of full texts; comparable between models with the same tokenizer."""
    nats = -loglikelihood / max(1, tokens)
    perplexity = math.exp(nats) if nats < 700 else None
    return without_nan({"tokens": int(tokens), "nats_per_token": nats, "perplexity": perplexity})


def _manager(names: Sequence[str], own: dict[str, str], scratch: Path) -> TaskManager:
    """Returns a manager of all tasks; indexes those of lm-eval (about 20 s) only if needed.

    Raises:
        ConfigError: a task is unknown.
    """
    for name, text in own.items():
        (scratch / f"{name}.yaml").write_text(text, encoding="utf-8")
    manager = TaskManager(include_path=scratch, include_defaults=not own.keys() >= set(names))
    for name in names:
        if name not in manager.task_index:
            hint = did_you_mean(name, [*defined(), *manager.all_tasks])
            raise ConfigError(
                "tasks.unknown",
                f"task {name!r} is unknown; {hint} eval/ defines "
                f"{', '.join(defined()) or 'none'}, and `lm-eval ls tasks` lists those of lm-eval",
            )
    return manager


def _load_tasks(names: list[str], own: dict[str, str], scratch: Path) -> Any:
    manager = _manager(names, own, scratch)
    datasets.disable_progress_bars()  # they would interfere with our progress bars
    try:
        with dataset_cache(scratch / "cache"):
            return manager.load(names)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            "tasks.no_data",
            f"cannot read the data of {', '.join(names)}: {error}; without a network, give the "
            "tasks' files with --task-data DIR (see eval/README.md for their format)",
        ) from error
