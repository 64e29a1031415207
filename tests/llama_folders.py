"""Small Hugging Face Llama directories with the tokenizer formats of public models."""

import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

BOS, EOS, EXTRA = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENTRIES = 500


def _bpe(
    pre_tokenizer: Any, normalizer: Any = None, special: tuple[str, ...] = (EOS,), **model: Any
) -> Any:
    """A byte-level BPE trained on a few sources; special tokens after its other ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES, initial_alphabet=alphabet, show_progress=False
    )
    sources = [inspect.getsource(module) for module in (textwrap, inspect)]
    tokenizer.train_from_iterator(
        [*sources, "1234567890 " * 9, "caf\u00e9 \u00fcber " * 9], trainer
    )
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special]
    )
    return tokenizer


def llama3() -> Any:
    """Split by a regular expression, then ByteLevel; a template puts bos before a text."""
    from tokenizers import Regex, pre_tokenizers, processors

    parts = [
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    special = (BOS, EOS, EXTRA)
    tokenizer = _bpe(pre_tokenizers.Sequence(parts), special=special, ignore_merges=True)
    template = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer


def gpt_neox() -> Any:
    """NFC, then ByteLevel with its own regular expression."""
    from tokenizers import normalizers, pre_tokenizers

    return _bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC())


def qwen() -> Any:
    """NFC, then as Llama 3."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    parts = [
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return _bpe(pre_tokenizers.Sequence(parts), normalizers.NFC())


def smollm() -> Any:
    """Digits one by one, then ByteLevel with its own regular expression."""
    from tokenizers import pre_tokenizers

    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    return _bpe(pre_tokenizers.Sequence(parts))


def _sentencepiece(normalizer: Any, pre_tokenizer: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocab = {"<unk>": 0, "<s>": 1, EOS: 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,()"]
    vocab |= {letter: len(vocab) + place for place, letter in enumerate(letters)}
    vocab["▁a"] = len(vocab)
    bpe = models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer: Any = Tokenizer(bpe)
    tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", EOS)])
    return tokenizer


def llama2() -> Any:
    """SentencePiece's BPE as Llama 2 and Mistral have it: a normalizer and byte fallback."""
    from tokenizers import normalizers

    parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return _sentencepiece(normalizers.Sequence(parts), None)


def gemma() -> Any:
    """SentencePiece's BPE as Gemma has it."""
    from tokenizers import normalizers, pre_tokenizers

    return _sentencepiece(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")
    )


SHAPES: dict[str, Callable[[], Any]] = {
    shape.__name__: shape for shape in (llama3, gpt_neox, qwen, smollm, llama2, gemma)
}


def write_tokenizer(folder: Path, tokenizer: Any, **config: Any) -> Path:
    """tokenizer.json and tokenizer_config.json; `config` replaces keys of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    bos = {"bos_token": BOS} if tokenizer.token_to_id(BOS) is not None else {}
    keys = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS} | bos | config
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    return folder


def write_llama_folder(
    folder: Path, tokenizer: Any, window: int = 64, vocab_size: int | None = None, **config: Any
) -> Path:
    """A Llama directory with small random weights and this tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder, tokenizer, **config)
    torch.manual_seed(5)
    eos, bos = tokenizer.token_to_id(EOS), tokenizer.token_to_id(BOS)
    shape = LlamaConfig(
        vocab_size=vocab_size or tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=eos if bos is None else bos,
        eos_token_id=eos,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a JSON file in place."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
