"""Export: transformers computes the same results as the native model."""

import json
import math
import socket
from pathlib import Path

import pytest
import torch
from errors import raises_error

from leviathan.config.embeddings import KINDS
from leviathan.config.run import ModelConfig
from leviathan.data.tokenizer import CL100K_PATTERN, END_OF_TEXT, Tokenizer, load_tokenizer
from leviathan.hf.export import MARKER, SAMPLE_TEXT, export_model, replaced_atomically
from leviathan.hf.tokenizer import read_llama_tokenizer
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM

TEXTS = [
    SAMPLE_TEXT,
    "",
    " ",
    "\n\n\n  \t x",
    "class Füße(dict):\r\n\tdef __init__(self): pass  # 12345678 \x00\x7f",
    f"{END_OF_TEXT}{END_OF_TEXT} a literal {END_OF_TEXT}",
    "ÀÉÎ ﬁne 한국어 ไทย ქართული עברית فارسی မြန်မာ አማርኛ ελληνικά 简体 繁體 🇫🇷🏳️‍🌈",
    "I'll we've THEY'RE don'T 'sup",
    "a" * 300 + " " * 300,
]
LANGUAGES = {  # one plain sentence each, made up for this test
    "Arabic": "ذهب الأطفال إلى المدرسة في الصباح الباكر.",
    "Bengali": "আজ সকালে বৃষ্টি হয়েছিল, তাই রাস্তা ভেজা।",
    "Chinese": "今天早上下了雨，所以路面是湿的。",
    "Czech": "Dnes ráno pršelo, a proto je silnice mokrá.",
    "English": "It rained this morning, so the road isn't dry.",
    "Finnish": "Tänä aamuna satoi, joten tie on märkä.",
    "French": "Il a plu ce matin ; c'est pourquoi la route n'est pas sèche.",
    "German": "Heute früh hat es geregnet, darum ist die Straße naß.",
    "Greek": "Σήμερα το πρωί έβρεξε, γι' αυτό ο δρόμος είναι βρεγμένος.",
    "Hebrew": "הבוקר ירד גשם, ולכן הכביש רטוב.",
    "Hindi": "आज सुबह बारिश हुई, इसलिए सड़क गीली है।",
    "Indonesian": "Pagi ini hujan, jadi jalanan basah.",
    "Japanese": "今朝は雨が降ったので、道がぬれています。",
    "Korean": "오늘 아침에 비가 와서 길이 젖었습니다.",
    "Polish": "Dziś rano padało, więc droga jest mokra.",
    "Portuguese": "Choveu hoje de manhã, por isso a estrada não está seca.",
    "Russian": "Сегодня утром шёл дождь, поэтому дорога мокрая.",
    "Spanish": "¿Llovió esta mañana? Sí; por eso la carretera está mojada.",
    "Thai": "เช้านี้ฝนตก ถนนจึงเปียก",
    "Turkish": "Bu sabah yağmur yağdı, bu yüzden yol ıslak.",
    "Ukrainian": "Сьогодні вранці йшов дощ, тож дорога мокра.",
    "Vietnamese": "Sáng nay trời mưa nên đường ướt.",
}
CODE = [
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # ½ → 0.5\n",
    '#include <stdio.h>\nint main(void){printf("%d\\n",1<<3);return 0;}\n',
    "const g = async (a) => `${await a}` ?? null; // ok?\n\t\tif(!g){}\n",
    "SELECT a.*, COUNT(*) FROM t AS a WHERE x <> 'it''s' GROUP BY 1;\n",
    'fn main() { let v: Vec<&\'static str> = vec![]; println!("{:?}", v); }\n',
    "all: $(OBJ)\n\t@echo $@ $^ >> /dev/null 2>&1 || exit 1\n",
]
SMALL = {  # other kinds need no fields
    "leviathan": {"d_seed": 8, "heads": 2, "knots": 5, "rank": 4},
    "leviathan_v1": {"d_seed": 8, "modes": 2, "knots": 5, "rank": 4},
    "albert": {"width": 5},
    "flat_mlp": {"width": 3, "hidden": 20},
    "factored_mlp": {"d_seed": 8, "hidden": 20},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """256 bytes and a few merges, in tiktoken's rank format."""
    import base64

    merges = [b" t", b"he", b" the", b"in", b"er", b"def", b"self", b"  ", b"    ", "é".encode()]
    merges += [b"de", b"se", b"lf", b"12", b"123", "東".encode()[:2], "東".encode()]
    tokens = [bytes([byte]) for byte in range(256)] + sorted(merges, key=len)
    path = tmp_path_factory.mktemp("tokenizer") / "small.tiktoken"
    path.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens))
    )
    meta = {"name": "small", "pattern": "o200k_base", "special_tokens": {END_OF_TEXT: len(tokens)}}
    path.with_suffix(".meta.json").write_text(json.dumps(meta))
    return load_tokenizer(path)


@pytest.fixture
def make(tokenizer):
    """A model on the small tokenizer, with rows of padding."""

    def build(kind: str = "leviathan", **fields) -> tuple[CausalLM, ModelConfig]:
        config = ModelConfig.model_validate(
            {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "seq_len": 24}
            | {"vocab_size": tokenizer.vocab_size, "padded_vocab_size": 320}
            | {"embedding": {"kind": kind} | SMALL.get(kind, {}), "init_std": 0.2}
            | fields
        )
        model = CausalLM(config)
        init_weights(model, config, seed=3)
        return model, config

    return build


@pytest.mark.parametrize("kind", KINDS)
def test_verified_export(make, tokenizer, tmp_path, kind):
    from safetensors.torch import load_file

    model, config = make(kind, rope_theta=5000.0, norm_eps=1e-4)
    facts = {"Training steps": 12_345, "Dataset fingerprint": "abc"}
    result = export_model(model, config, tokenizer, facts, tmp_path / "out", verify=True)
    assert result["max_abs_difference"] <= 1e-4
    assert isinstance(result["generated"], str)
    json.dumps(result)

    out = tmp_path / "out"
    state = load_file(out / "model.safetensors")
    assert state["model.embed_tokens.weight"].shape == (tokenizer.vocab_size, 32)
    assert ("lm_head.weight" in state) == (kind != "tied")
    assert sum(value.numel() for value in state.values()) == result["parameters"]
    settings = json.loads((out / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert settings["tie_word_embeddings"] == (kind == "tied")
    assert settings["vocab_size"] == tokenizer.vocab_size
    assert settings["rope_theta"] == 5000.0
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.end_of_text
    card = (out / "README.md").read_text()
    assert "| Training steps | 12,345 |" in card
    assert f"-{kind}\n" in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1


def test_generation_and_loss_by_transformers(make, tokenizer, tmp_path):
    """Auto classes alone; greedy continuation and loss as the native model has them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, config = make()
    export_model(model, config, tokenizer, {}, tmp_path / "out")
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    fast = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = fast("def the self", return_tensors="pt").input_ids
    native = ids
    for _ in range(8):
        native = torch.cat([native, model.logits(native)[:, -1:].argmax(-1)], dim=1)
    written = llama.generate(ids, max_new_tokens=8, do_sample=False)
    assert written.tolist() == native[:, : written.shape[1]].tolist()
    with torch.no_grad():
        theirs = llama(native, labels=native).loss * (native.shape[1] - 1)
    torch.testing.assert_close(model(native[:, :-1], native[:, 1:]), theirs)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(make, tokenizer, tmp_path, dtype):
    from safetensors.torch import load_file

    model, config = make()
    result = export_model(model, config, tokenizer, {}, tmp_path, dtype=dtype, verify=True)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    state = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in state.values()} == {wanted}
    table = model.model.embed_tokens.materialize()[: tokenizer.vocab_size]
    assert state["model.embed_tokens.weight"].equal(table.to(wanted))
    assert result["max_abs_difference"] > 1e-4


def assert_same_ids(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(folder)
    assert fast.is_fast
    assert len(fast) == tokenizer.vocab_size
    assert fast.eos_token_id == fast.convert_tokens_to_ids(END_OF_TEXT) == tokenizer.end_of_text
    for text in [*TEXTS, *LANGUAGES.values(), *CODE]:
        ids = tokenizer.encode(text)
        assert fast(text).input_ids == ids
        assert fast.decode(ids) == text
    assert fast(TEXTS).input_ids == [tokenizer.encode(text) for text in TEXTS]
    special = fast(f"a{END_OF_TEXT}", split_special_tokens=False).input_ids
    assert special == [*tokenizer.encode("a"), tokenizer.end_of_text]


def test_fast_tokenizer_equals_tiktoken(make, tokenizer, tmp_path):
    model, config = make()
    export_model(model, config, tokenizer, {}, tmp_path)
    assert_same_ids(tmp_path, tokenizer)


def test_patterns_that_the_tokenizers_library_reads_otherwise(make, tokenizer, tmp_path):
    """cl100k's `{1,3}+` repeats there: an export would not split long numbers."""
    import tiktoken

    ranks = tokenizer.ranks | {b"34": 273, b"1234": 274}
    encoding = tiktoken.Encoding(
        "cl100k",
        pat_str=CL100K_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )
    own = Tokenizer(encoding)
    assert len(own.encode("1234")) == 2
    model, config = make("tied", vocab_size=own.vocab_size)
    export_model(model, config, own, {}, tmp_path / "out")
    assert_same_ids(tmp_path / "out", own)
    assert read_llama_tokenizer(tmp_path / "out").fingerprint == own.fingerprint

    lines = tiktoken.Encoding(
        "lines",
        pat_str=r"[^\r\n]+$|" + own.pattern,  # of the last line, or of every line
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )
    with raises_error("export.unsupported_tokenizer"):
        export_model(model, config, Tokenizer(lines), {}, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_vocabulary_with_gaps_is_refused(make, tokenizer, tmp_path):
    import tiktoken

    ranks = tokenizer.ranks | {b"34": 280}
    encoding = tiktoken.Encoding(
        "gaps",
        pat_str=CL100K_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: 279},
    )
    model, config = make("tied", vocab_size=281)
    with raises_error("export.unsupported_tokenizer", "281", "274"):
        export_model(model, config, Tokenizer(encoding), {}, tmp_path / "out")


def test_fast_tokenizer_of_o200k(make, shared, tmp_path, monkeypatch):
    """Real ranks, with gaps among the special ids; ids of the shared corpus too."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data" / "tiktoken_cache"))
    tokenizer = load_tokenizer("o200k_base")
    model, config = make("tied", vocab_size=200_019, padded_vocab_size=200_376, d_model=8)
    export_model(model, config, tokenizer, {}, tmp_path / "out", verify=True)
    assert_same_ids(tmp_path / "out", tokenizer)


@pytest.mark.heavy
def test_fast_tokenizer_on_the_corpus(make, shared, tmp_path, monkeypatch):
    """A thousand real documents: code, prose, mathematics and the languages of a parliament."""
    import io
    from itertools import chain, islice

    import zstandard
    from transformers import AutoTokenizer

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data" / "tiktoken_cache"))
    tokenizer = load_tokenizer("o200k_base")
    model, config = make("tied", vocab_size=200_019, padded_vocab_size=200_376, d_model=8)
    export_model(model, config, tokenizer, {}, tmp_path / "out")
    fast = AutoTokenizer.from_pretrained(tmp_path / "out")

    def lines(shard: Path):
        with shard.open("rb") as file:
            stream = zstandard.ZstdDecompressor().stream_reader(file)
            yield from io.TextIOWrapper(stream, "utf-8")

    corpus = shared / "data" / "corpus"
    shards = [corpus / "val.jsonl.zst", *sorted((corpus / "train").iterdir())]
    compared = 0
    for line in islice(chain.from_iterable(map(lines, shards)), 1000):
        text = json.loads(line)["text"]
        ids = tokenizer.encode(text)
        assert fast(text, verbose=False).input_ids == ids
        assert fast.decode(ids) == text
        compared += 1
    assert compared == 1000


def test_prefix_by_the_tokenizer(make, tokenizer, tmp_path):
    """With add_bos, end-of-text stands before every text once; without special tokens, not."""
    from transformers import AutoTokenizer

    model, config = make("tied")
    export_model(model, config, tokenizer, {}, tmp_path, verify=True, add_bos=True)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert fast(text).input_ids == [tokenizer.end_of_text, *ids]
        assert fast(text, add_special_tokens=False).input_ids == ids
        assert fast.decode(fast(text).input_ids, skip_special_tokens=True) == text
    assert "The tokenizer adds it" in (tmp_path / "README.md").read_text()


def test_weights_are_split_by_size(make, tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM

    model, config = make("leviathan")
    result = export_model(model, config, tokenizer, {}, tmp_path, verify=True, shard_size="40KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    llama = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(value.numel() for value in llama.parameters()) == result["parameters"]
    with raises_error("cli.invalid_option", "--shard-size", "5GB"):
        export_model(model, config, tokenizer, {}, tmp_path, shard_size="big")


def test_card_explains_the_counts(make, tokenizer, tmp_path):
    for kind in ("tied", "leviathan"):
        model, config = make(kind)
        result = export_model(model, config, tokenizer, {}, tmp_path / kind)
        card = (tmp_path / kind / "README.md").read_text()
        trained = sum(value.numel() for value in model.parameters())
        assert f"The trained model has {trained:,} parameters" in card
        assert f"contains {result['parameters']:,}" in card
        rows = config.vocab_size
        assert f"without the {320 - rows} vectors of the vocabulary padding" in card
        written = f"is stored as a table of {rows} × 32 = {rows * 32:,} parameters"
        assert (written in card) == (kind == "leviathan")


def test_nothing_is_left_after_a_failure(make, tokenizer, tmp_path, monkeypatch):
    model, config = make()
    right = model.logits

    monkeypatch.setattr(model, "logits", lambda ids: right(ids) + 1e-3)
    with pytest.raises(RuntimeError, match="differ"):
        export_model(model, config, tokenizer, {}, tmp_path / "out", verify=True)
    assert not list(tmp_path.iterdir())


def test_an_earlier_export_is_replaced_and_nothing_else(make, tokenizer, tmp_path):
    model, config = make("tied")
    out = tmp_path / "out"
    export_model(model, config, tokenizer, {}, out)
    (out / "stale").write_text("from the first export")
    # no process has this number
    killed = tmp_path / f".out.{socket.gethostname()[:64]}-999999999-1.tmp"
    killed.mkdir()
    export_model(model, config, tokenizer, {}, out)
    assert not (out / "stale").exists()
    assert not killed.exists()

    (out / MARKER).unlink()
    before = sorted(out.iterdir())
    with raises_error("export.not_empty", out, MARKER):
        export_model(model, config, tokenizer, {}, out)
    assert sorted(out.iterdir()) == before
    with raises_error("export.not_folder", out / "README.md"):
        export_model(model, config, tokenizer, {}, out / "README.md")


def test_wrong_arguments(make, tokenizer, tmp_path):
    model, config = make("tied")
    with raises_error("cli.invalid_option", "'float8'", "fp32, bf16, fp16"):
        export_model(model, config, tokenizer, {}, tmp_path / "out", dtype="float8")
    model, config = make("tied", vocab_size=tokenizer.vocab_size + 1)
    with raises_error("export.tokenizer_mismatch", tokenizer.vocab_size, tokenizer.vocab_size + 1):
        export_model(model, config, tokenizer, {}, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_replacing_keeps_the_old_folder_when_the_new_one_fails(tmp_path):
    out = tmp_path / "out"
    with replaced_atomically(out) as draft:
        (draft / MARKER).write_text("first")

    def fail():
        with replaced_atomically(out) as draft:
            (draft / MARKER).write_text("second")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (out / MARKER).read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("kind", ["tied", "leviathan"])
def test_a_model_that_is_not_finite_is_not_exported(make, tokenizer, tmp_path, kind):
    model, config = make(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    with raises_error("checkpoint.not_finite"):
        export_model(model, config, tokenizer, {}, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_one_bad_weight_is_named(make, tokenizer, tmp_path):
    model, config = make("untied")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.inf
    with raises_error("checkpoint.not_finite", "model.layers.1.mlp.up_proj.weight"):
        export_model(model, config, tokenizer, {}, tmp_path / "out")


def test_a_generated_table_that_is_not_finite_is_named(make, tokenizer, tmp_path):
    """Every parameter is finite; their product is not."""
    model, config = make("leviathan")
    with torch.no_grad():
        model.model.embed_tokens.spline_delta.fill_(1e8)
    with raises_error("checkpoint.not_finite", "model.embed_tokens.weight"):
        export_model(model, config, tokenizer, {}, tmp_path / "out")


def test_what_fp16_cannot_hold_is_refused(make, tokenizer, tmp_path):
    model, config = make("untied")
    with torch.no_grad():
        model.model.norm.weight[3] = 70_000.0
    with raises_error("checkpoint.not_finite", "fp16", "model.norm.weight", "32"):
        export_model(model, config, tokenizer, {}, tmp_path / "out", dtype="fp16")
    export_model(model, config, tokenizer, {}, tmp_path / "out", dtype="bf16")
