"""Export to the Hugging Face Llama format. The only module that imports transformers."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leviathan.checkpoint.layout import EVALUATION
from leviathan.checkpoint.store import (
    IMPORTED_KEY,
    check_finite,
    read_model,
    read_tokenizer,
    resolve_valid,
)
from leviathan.config.run import ModelConfig, OptimConfig, RunConfig
from leviathan.console import say
from leviathan.data.id_comparison import compare_ids
from leviathan.data.tokenizer import END_OF_TEXT, TOKENIZERS_PATTERNS, Tokenizer
from leviathan.errors import CheckpointError, ConfigError, DataError
from leviathan.files import atomic_directory, check_writable_dir, read_json, remove_leftovers
from leviathan.hf.llama import ImportedTokenizer, kept_tokenizer
from leviathan.hf.model_card import TokenizerNotes, model_card
from leviathan.hf.tokenizer import UNUSED, encode_original, load_original
from leviathan.model.kv_cache import with_materialized_embedding
from leviathan.model.transformer import CausalLM

# ---------------------------------------------------------------- output directory

MARKER = "export.json"  # marks a directory written by this project, which may be replaced


def check_output_dir(out: Path) -> None:
    """Checks that an export can be written to `out`.

    Raises:
        ConfigError: `out` is a file, or a directory that contains other files.
        DataError: the parent directory is not writable.
    """
    if out.exists():
        if not out.is_dir():
            raise ConfigError(
                "export.not_folder",
                f"{out}: is a file, expected a directory; choose another output path",
            )
        if any(out.iterdir()) and not (out / MARKER).is_file():
            raise ConfigError(
                "export.not_empty",
                f"{out}: not empty and not an earlier export (it has no {MARKER}); choose another "
                "output path, or delete its contents",
            )
    check_writable_dir(out.absolute().parent)


@contextmanager
def replaced_atomically(out: Path) -> Iterator[Path]:
    """Yields a temporary directory that replaces `out` when the block ends without an error.

    Raises:
        ConfigError, DataError: as `check_output_dir`.
    """
    check_output_dir(out)
    remove_leftovers(out)
    try:
        with atomic_directory(out) as draft:
            yield draft
    except OSError as error:
        raise ConfigError(
            "output.not_writable", f"{out}: not writable: {error.strerror or error}"
        ) from error


def write_marker(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes properties of the export as JSON."""
    (folder / MARKER).write_text(json.dumps(facts, indent=2) + "\n")


# ---------------------------------------------------------------- export

SHARD_SIZE = "5GB"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# fp32: kernels sum in different orders. Lower precision: the weights are rounded (2⁻⁹, 2⁻¹²), so
# the bound is relative to the largest logit, and wide enough for the sum over layers.
FP32_TOLERANCE = 1e-4
ROUNDED_TOLERANCE = {"bf16": 0.05, "fp16": 0.01}
SAMPLE = (2, 64)  # [B, T] of the batch for the comparison of logits
LINE_TOKENS = 48
# Options of transformers' tokenizers for the ids of ordinary text.
AS_TEXT = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
# Covers case, contractions, digits, whitespace, scripts and special tokens.
SAMPLE_TEXT = (
    "def f(x):\n    return x**2  # It's 1,234.5 of them, WE'LL see\r\n\n\t“Größe” — naïve façade, "
    f"Москва, 東京タワー, العربية, हिन्दी, 👩‍🚀🚀   {END_OF_TEXT} end  "
)


def export(
    checkpoint: Path,
    out: Path,
    dtype: str = "fp32",
    verify: bool = False,
    add_bos: bool = False,
    shard_size: str = SHARD_SIZE,
) -> dict[str, Any]:
    """Exports a checkpoint as a Hugging Face Llama directory with tokenizer and model card.

    The tokenizer files of an imported checkpoint are written unchanged.

    Args:
        checkpoint: path accepted by `resolve_checkpoint`.
        out: output directory; an earlier export is replaced.
        dtype: "fp32", "bf16" or "fp16".
        verify: load the export with transformers before it is moved to `out`, compare its logits
            and token ids with the native ones, and generate one line.
        add_bos: make the tokenizer prepend end-of-text to a text, as Llama tokenizers do.
        shard_size: maximum size of a safetensors file, such as "5GB".

    Returns:
        Properties of the export; with `verify` also `max_abs_difference`, `tolerance`
        and `generated`.

    Raises:
        CheckpointError: the checkpoint is missing or corrupt, or its tokenizer does not match its
            model or cannot be exported with the same ids.
        ConfigError: unknown dtype, `out` cannot be used, or `add_bos` for an imported checkpoint.
        RuntimeError: the exported model differs from the native one; nothing is written.
    """
    directory = resolve_valid(checkpoint)
    _check_request(Path(out), dtype, shard_size)
    model, run, state = read_model(directory)
    tokenizer = read_tokenizer(directory, run)
    imported = kept_tokenizer(directory, state)
    if imported is not None and add_bos:
        raise ConfigError(
            "export.imported_tokenizer",
            f"--add-bos: {directory} was imported, and its tokenizer files are exported unchanged; "
            "export without --add-bos and edit the exported tokenizer.json if needed",
        )
    facts = run_facts(directory, run, state, tokenizer)
    return export_model(
        model,
        run.model,
        tokenizer,
        facts,
        out,
        dtype=dtype,
        verify=verify,
        add_bos=add_bos,
        shard_size=shard_size,
        imported=imported,
    )


def export_model(
    model: CausalLM,
    config: ModelConfig,
    tokenizer: Tokenizer,
    facts: Mapping[str, Any],
    out: Path,
    *,
    dtype: str = "fp32",
    verify: bool = False,
    add_bos: bool = False,
    shard_size: str = SHARD_SIZE,
    imported: ImportedTokenizer | None = None,
) -> dict[str, Any]:
    """Like `export`, for a model in memory; `facts` are listed in the model card in their order.

    With `imported`, its tokenizer files are written instead of files created from `tokenizer`.
    """
    _check_request(Path(out), dtype, shard_size)
    # The vocabulary of an imported model may be larger than that of its tokenizer.
    own_size = imported is None and tokenizer.vocab_size != config.vocab_size
    if own_size or tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            "export.tokenizer_mismatch",
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} ids, the model's "
            f"vocab_size is {config.vocab_size:,}: use the tokenizer of this model",
        )
    out = Path(out)
    with replaced_atomically(out) as draft:
        ids = special_ids(tokenizer, imported)
        exported = write_weights(model, config, ids, draft, DTYPES[dtype], shard_size)
        end = tokenizer.end_of_text
        if imported is not None:
            imported.copy_to(draft)
            notes = imported.notes(tokenizer)
        else:
            write_tokenizer(tokenizer, config, draft, add_bos)
            notes = TokenizerNotes(end, end, adds_prefix=add_bos)
        _compare_written(tokenizer, draft)
        card = model_card(config, notes, dtype, exported, facts)
        (draft / "README.md").write_text(card)
        result: dict[str, Any] = {
            "out": str(out),
            "kind": config.embedding.kind,
            "dtype": dtype,
            "vocab_size": config.vocab_size,
            "parameters": exported,
        }
        marker = {"tokenizer": tokenizer.name, "facts": dict(facts)}
        if imported is None:
            marker["end_of_text"] = end
        write_marker(draft, result | marker)
        if verify:
            result |= compare(model, config, tokenizer, draft, dtype)
    return result | {"files": len(list(out.iterdir()))}


def _check_request(out: Path, dtype: str, shard_size: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(
            "cli.invalid_option", f"--dtype {dtype!r}: expected one of {', '.join(DTYPES)}"
        )
    if not re.fullmatch(r"[1-9]\d*[KMGT]I?B", shard_size.upper()):
        raise ConfigError(
            "cli.invalid_option",
            f"--shard-size {shard_size!r}: expected a size such as 5GB or 500MB",
        )
    check_output_dir(out)


def quiet_transformers() -> Any:
    """Imports transformers without progress bars, advice and DeepSpeed's log line."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


# ---------------------------------------------------------------- writing


def llama_state(model: CausalLM, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights under Llama's names, with a materialized input table and without vocabulary padding.

    Raises:
        CheckpointError: a weight is not finite, or not finite in `dtype`.
    """
    state = dict(with_materialized_embedding(model).state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state:
            state[name] = state[name][: config.vocab_size]
    check_finite(state, "the model to export")
    rounded = {name: value.to("cpu", dtype).contiguous() for name, value in state.items()}
    if dtype == torch.float16:
        check_finite(rounded, "the model to export, in fp16 (at most 65,504: choose bf16 or fp32)")
    return rounded


def special_ids(tokenizer: Tokenizer, imported: ImportedTokenizer | None) -> dict[str, Any]:
    """Special ids for config.json; those of an imported model are unchanged."""
    if imported is not None:
        return dict.fromkeys(("bos_token_id", "eos_token_id")) | dict(imported.special_ids)
    return dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.end_of_text)


def write_weights(
    model: CausalLM,
    config: ModelConfig,
    ids: Mapping[str, Any],
    folder: Path,
    dtype: torch.dtype,
    shard_size: str = SHARD_SIZE,
) -> int:
    """Writes config.json, generation_config.json and safetensors; returns the parameters.

    `ids` are the special ids by their keys in config.json.
    """
    hf = quiet_transformers()
    tied = model.lm_head.tied
    llama_config = hf.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.d_model // config.n_heads,
        max_position_embeddings=config.seq_len,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        tie_word_embeddings=tied,
        dtype=dtype,
        **ids,
    )
    with torch.device("meta"):
        llama = hf.LlamaForCausalLM(llama_config)
    state = llama_state(model, config, dtype)
    exported = sum(value.numel() for value in state.values())
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    llama.load_state_dict(state, assign=True)
    llama.tie_weights()
    end = ids["eos_token_id"]
    padding = {"pad_token_id": end[0] if isinstance(end, list) else end}
    llama.generation_config = hf.GenerationConfig(**padding | dict(ids))
    llama.save_pretrained(folder, max_shard_size=shard_size)
    readable = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(readable)  # safetensors creates files that only their owner can read
    return exported


def write_tokenizer(
    tokenizer: Tokenizer, config: ModelConfig, folder: Path, add_bos: bool = False
) -> None:
    """Writes a fast tokenizer with the ids of tiktoken, including special strings in a text.

    With `add_bos`, it prepends end-of-text, unless `add_special_tokens=False`.

    Ids that tiktoken leaves unused (o200k_base has nineteen) get names, because a fast tokenizer
    numbers its special tokens without gaps.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as FastTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks, characters = tokenizer.ranks, bytes_to_unicode()
    if max(ranks.values()) != len(ranks) - 1:
        raise CheckpointError(
            "export.unsupported_tokenizer",
            f"the tokenizer {tokenizer.name} cannot be exported: {max(ranks.values()) + 1:,} ids "
            f"but {len(ranks):,} ranks; the ids of a fast tokenizer must not have gaps",
        )
    names = {token: "".join(characters[byte] for byte in token) for token in ranks}
    ordered = sorted(ranks, key=ranks.__getitem__)
    merges = []
    for token in ordered:
        # all pairs of tokens that merge into the token, the earliest learned first
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(names[left], names[right]) for left, right in known]

    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    fast: Any = FastTokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    pattern = TOKENIZERS_PATTERNS.get(tokenizer.pattern, tokenizer.pattern)
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    special = {id: name for name, id in tokenizer.special_tokens.items()}
    fast.add_special_tokens(
        [
            AddedToken(special.get(id, UNUSED.format(id)), special=True, normalized=False)
            for id in range(len(ranks), tokenizer.vocab_size)
        ]
    )
    # An ordinary id may end the documents of a foreign dataset; then no special string names it.
    end = special.get(tokenizer.end_of_text, END_OF_TEXT)
    if add_bos:
        fast.post_processor = processors.TemplateProcessing(
            single=f"{end} $A",
            pair=f"{end} $A {end}:1 $B:1",
            special_tokens=[(end, tokenizer.end_of_text)],
        )
    quiet_transformers().PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        model_max_length=config.seq_len,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        add_bos_token=add_bos,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)


def _compare_written(tokenizer: Tokenizer, folder: Path) -> None:
    """Compares the ids of an exported tokenizer with those of the native tokenizer.

    Raises:
        CheckpointError: they differ.
    """
    written = load_original(folder)
    try:
        compare_ids(tokenizer, lambda texts: encode_original(written, texts), "the export")
    except DataError as error:
        raise CheckpointError(
            "export.unsupported_tokenizer",
            f"the tokenizer {tokenizer.name} cannot be exported: {error}",
        ) from None


def run_facts(
    directory: Path, run: RunConfig, state: Mapping[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Properties of a run for the model card, by displayed name."""
    facts: dict[str, Any] = {
        "Tokenizer": f"{tokenizer.name} (fingerprint {tokenizer.fingerprint[:16]})",
        "Context in tokens": run.model.seq_len,
    }
    if IMPORTED_KEY in state:  # its training is unknown
        return facts | {"Imported from": state[IMPORTED_KEY]}
    facts |= {
        "Training steps": state.get("step"),
        "Training tokens": state.get("tokens"),
        "Sequences a step": run.train.global_batch_size,
        "Optimizer": f"AdamW, β {run.optim.betas}, weight decay {run.optim.weight_decay:g}",
        "Parameter groups": _own_groups(run.optim),
        "Learning rate": f"{run.optim.lr:g} peak, {run.optim.schedule}",
        "Precision": run.engine.precision,
        "Seed": str(run.seed),
        "Dataset fingerprint": state.get("data_fingerprint"),
    }
    measured = directory.parent.parent / EVALUATION / directory.name / "perplexity.json"
    if measured.is_file():
        values = read_json(measured, "run.result_corrupt", "Delete it and evaluate again.")
        facts["Validation loss, nats per token"] = values.get("nats_per_token")
        facts["Validation perplexity"] = values.get("perplexity")
    return {key: value for key, value in facts.items() if value is not None}


def _own_groups(optim: OptimConfig) -> str | None:
    """`optim.groups` as JSON, or None if empty."""
    groups = [group.model_dump(mode="json", exclude_none=True) for group in optim.groups]
    return json.dumps(groups) if groups else None


# ---------------------------------------------------------------- verification


@torch.no_grad()
def compare(
    model: CausalLM, config: ModelConfig, tokenizer: Tokenizer, folder: Path, dtype: str
) -> dict[str, Any]:
    """Loads an export with transformers in fp32 and compares it with the native model.

    Raises:
        RuntimeError: logits or token ids differ.
    """
    hf = quiet_transformers()
    fast = hf.AutoTokenizer.from_pretrained(folder)
    ids = fast(SAMPLE_TEXT, **AS_TEXT).input_ids
    expected = tokenizer.encode(SAMPLE_TEXT)
    text = fast.decode(ids, clean_up_tokenization_spaces=False)
    if ids != expected or text != SAMPLE_TEXT or len(fast) > config.vocab_size:
        raise RuntimeError(f"the exported tokenizer differs from {tokenizer.name}: {ids}")

    llama = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows, length = SAMPLE[0], min(SAMPLE[1], config.seq_len)
    sample = torch.linspace(0, config.vocab_size - 1, rows * length).long().view(length, rows).T
    native = model.logits(sample)[..., : config.vocab_size].float()
    difference = float((native - llama(sample).logits).abs().max())
    tolerance = FP32_TOLERANCE
    if dtype != "fp32":
        tolerance = ROUNDED_TOLERANCE[dtype] * float(native.abs().max())
    if not difference <= tolerance:
        raise RuntimeError(
            f"the exported model's logits differ from the native ones by {difference:.3g}, "
            f"more than {tolerance:.3g}; nothing was written"
        )
    say(
        f"Logits differ from those of transformers by at most {difference:.2g} "
        f"(tolerance {tolerance:.2g})"
    )
    return {
        "max_abs_difference": difference,
        "tolerance": tolerance,
        "generated": one_line(llama, fast, tokenizer.prefix_token),
    }


def one_line(llama: Any, fast: Any, prefix_token: int) -> str:
    """The first non-blank line that the model generates at the beginning of a document.

    Sampled with a fixed seed, because the greedy text of a small model repeats itself.
    """
    start = torch.tensor([[prefix_token]])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        written = llama.generate(
            start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=min(LINE_TOKENS, llama.config.max_position_embeddings - 1),
            do_sample=True,
            temperature=0.8,
            top_k=50,
        )
    text = fast.decode(written[0], skip_special_tokens=True)
    return next((line.rstrip() for line in text.splitlines() if line.strip()), "")
