"""Text generation from a checkpoint, in batches and with streaming output."""

import codecs
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leviathan.console import say
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import ConfigError, DataError
from leviathan.evaluate.scoring import open_checkpoint
from leviathan.model.kv_cache import Sampling, generate, with_materialized_embedding
from leviathan.model.transformer import CausalLM

# ---------------------------------------------------------------- truncation


@dataclass
class TruncationCounts:
    """Counts of truncation for a set of requests.

    Attributes:
        contexts: number of contexts that were truncated from the left.
        tokens: number of tokens removed from them.
        capped_generations: number of generations limited below the requested number of new tokens.
    """

    contexts: int = 0
    tokens: int = 0
    capped_generations: int = 0

    def add_context(self, dropped: int) -> None:
        """Counts a context from which `dropped` tokens (may be 0) were removed."""
        self.contexts += dropped > 0
        self.tokens += dropped

    def report(self, subject: str, window: int) -> None:
        """Prints a warning if anything was truncated or capped."""
        if self.contexts:
            say(
                f"warning: {subject}: {self.contexts:,} context(s) did not fit the model's context "
                f"of {window:,} tokens and were truncated from the left, by a total of "
                f"{self.tokens:,} tokens",
                style="yellow",
            )
        if self.capped_generations:
            say(
                f"warning: {subject}: {self.capped_generations:,} generation(s) were capped below "
                "the requested number of new tokens, because prompt and new tokens must fit the "
                f"model's context of {window:,} tokens",
                style="yellow",
            )


@dataclass(frozen=True)
class FittedPrompt:
    """A prompt and a number of new tokens that fit the context together.

    Attributes:
        ids: the prompt without its first `dropped` ids.
        new_tokens: maximum number of new tokens.
        dropped: number of ids removed from the prompt.
        capped: whether `new_tokens` is less than requested.
    """

    ids: list[int]
    new_tokens: int
    dropped: int
    capped: bool

    def count(self, counts: TruncationCounts) -> None:
        """Adds this prompt to `counts`."""
        counts.add_context(self.dropped)
        counts.capped_generations += self.capped


def fit_prompt(ids: Sequence[int], new_tokens: int, window: int) -> FittedPrompt:
    """Fits a prompt and its continuation into the window, without truncating it if possible.

    A prompt shorter than the window keeps all its ids, and the number of new tokens is limited to
    the rest of the window. A prompt that fills the window is truncated from the left, like the
    contexts of log-likelihood requests, to make room for the requested tokens, at most half of the
    window. (vLLM refuses such a prompt. lm-eval's `hf` model truncates it, but also truncates
    prompts that fit.)
    """
    room = window - len(ids)
    if room > 0:
        return FittedPrompt(list(ids), min(new_tokens, room), 0, new_tokens > room)
    allowed = min(new_tokens, max(1, window // 2))
    kept = max(1, window - allowed)
    return FittedPrompt(list(ids[-kept:]), allowed, len(ids) - kept, allowed < new_tokens)


def sum_counts(counts: Mapping[str, TruncationCounts]) -> TruncationCounts:
    """The sum over tasks."""
    return TruncationCounts(
        sum(one.contexts for one in counts.values()),
        sum(one.tokens for one in counts.values()),
        sum(one.capped_generations for one in counts.values()),
    )


# ---------------------------------------------------------------- streaming


class TextStream:
    """The continuation of one prompt.

    Attributes:
        text: the final part of the text so far.
        stopped: whether a stop string ended it.
        tokens: number of added ids.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.text, self.stopped, self.tokens = "", False, 0
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def add(self, token: int) -> str:
        """Adds an id; returns the text that has become final."""
        assert not self.stopped
        self.tokens += 1
        return self._settle(self._bytes.decode(self._tokenizer.decode_bytes(token)))

    def end(self) -> str:
        """Ends the stream; returns the remaining text."""
        if self.stopped:
            return ""
        new = self._settle(self._bytes.decode(b"", final=True)) + self._held
        self.text, self._held = self.text + self._held, ""
        return new

    def _settle(self, new: str) -> str:
        """Returns the text that cannot be part of a stop string."""
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held, certain = True, "", text[: min(found)]
        else:
            held = max((_overlap(text, stop) for stop in self._stops), default=0)
            certain, self._held = text[: len(text) - held], text[len(text) - held :]
        self.text += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


# ---------------------------------------------------------------- generation

OnText = Callable[[int, str], None]  # (index of the prompt, new text)


def generate_texts(
    checkpoint: Path,
    prompts: Sequence[str],
    max_new_tokens: int = 100,
    sampling: Sampling | None = None,
    stops: Sequence[str] = (),
    batch_size: int = 8,
    on_text: OnText | None = None,
) -> dict[str, Any]:
    """Generates continuations of prompts with a checkpoint.

    Args:
        checkpoint: path accepted by `resolve_checkpoint`, or a Hugging Face Llama directory.
        prompts: texts; an empty prompt generates from the beginning of a document.
        max_new_tokens: maximum new tokens per prompt; limited, with a warning, to the context that
            remains after the prompt.
        sampling: sampling options; greedy by default. The random numbers of a prompt depend only
            on the seed and the index of the prompt.
        stops: strings that end a continuation; they are excluded from it.
        batch_size: prompts per batch.
        on_text: receives each piece of text as soon as it is final.

    Returns:
        `completions`, one per prompt: `prompt`, `text`, `tokens`, `finish` (`end`, `stop`,
        `length`), `max_new_tokens` after limiting, and `truncated_prompt_tokens`, the number of
        tokens removed from the beginning of a prompt that fills the context; `truncation`: totals.

    Raises:
        CheckpointError: no valid checkpoint was found.
        ConfigError: an invalid sampling option, or no prompt.
    """
    how = sampling or Sampling()
    if not prompts:
        raise ConfigError("generate.no_prompt", "no prompt: use --prompt TEXT or --file FILE")
    if how.temperature < 0 or not 0 < how.top_p <= 1:
        raise ConfigError(
            "cli.invalid_option",
            f"--temperature {how.temperature:g}, --top-p {how.top_p:g}: expected a temperature of "
            "at least 0 and a top-p above 0 and at most 1",
        )
    loaded = open_checkpoint(checkpoint)
    model = with_materialized_embedding(loaded.model)
    completions: list[dict[str, Any]] = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        completions += _one_batch(
            model, loaded.tokenizer, batch, first, max_new_tokens, how, stops, on_text
        )
    identity = {"checkpoint": str(loaded.directory), "step": loaded.step}
    counts = TruncationCounts()
    for completion in completions:
        counts.add_context(completion["truncated_prompt_tokens"])
        counts.capped_generations += completion["max_new_tokens"] < max_new_tokens
    counts.report("generate", loaded.model_config.seq_len)
    truncation = {"truncation": asdict(counts)}
    return {"completions": completions, "seed": how.seed, **truncation, **identity}


def _one_batch(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    first: int,
    new_tokens: int,
    how: Sampling,
    stops: Sequence[str],
    on_text: OnText | None,
) -> list[dict[str, Any]]:
    streams = [TextStream(tokenizer, stops) for _ in prompts]
    window = model.config.seq_len
    fitted = [
        fit_prompt([tokenizer.prefix_token, *tokenizer.encode(prompt)], new_tokens, window)
        for prompt in prompts
    ]

    def tell(row: int, text: str) -> None:
        if on_text is not None and text:
            on_text(first + row, text)

    def on_token(row: int, token: int) -> bool:
        tell(row, streams[row].add(token))
        return not streams[row].stopped and streams[row].tokens < fitted[row].new_tokens

    rows, longest = [one.ids for one in fitted], max(one.new_tokens for one in fitted)
    generate(model, rows, longest, tokenizer.end_of_text, on_token, how, first)
    for row, stream in enumerate(streams):
        tell(row, stream.end())
    return [
        {
            "prompt": prompt,
            "text": stream.text,
            "tokens": stream.tokens,
            "finish": _finish(stream, one.new_tokens),
            "max_new_tokens": one.new_tokens,
            "truncated_prompt_tokens": one.dropped,
        }
        for prompt, stream, one in zip(prompts, streams, fitted, strict=True)
    ]


def _finish(stream: TextStream, new_tokens: int) -> str:
    if stream.stopped:
        return "stop"
    return "length" if stream.tokens >= new_tokens else "end"


def read_prompts(file: Path) -> list[str]:
    """Reads one prompt per line: text, or JSON strings or objects with `prompt` in a .jsonl file.

    Raises:
        DataError: the file cannot be read, or a line is not a prompt.
    """
    try:
        # Not splitlines(): a form feed or U+2028 belongs to the prompt.
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("prompts.unreadable", f"{file}: cannot be read ({error})") from None
    if file.suffix != ".jsonl":
        return [line for line in lines if line]
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            item = json.loads(line)
        except ValueError as error:
            raise DataError("prompts.invalid", f"{file}:{number}: not JSON ({error})") from None
        prompt = item.get("prompt") if isinstance(item, dict) else item
        if not isinstance(prompt, str):
            raise DataError(
                "prompts.invalid",
                f"{file}:{number}: expected a string or an object with the key `prompt`",
            )
        prompts.append(prompt)
    return prompts


def show_stream(prompt: str) -> OnText:
    """Writes a prompt, then streams its continuation to standard output."""
    sys.stdout.write(prompt)
    sys.stdout.flush()

    def show(number: int, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return show


def as_text(result: dict[str, Any]) -> str:
    """Prompts with their continuations, separated by `---` lines."""
    return "\n---\n".join(one["prompt"] + one["text"] for one in result["completions"])
