"""Difficult texts on which tokenizers are compared."""

FIXED_TEXTS = (
    "",
    " ",
    "Hello, world!\n\n  def f(x):\n\treturn x  # ½ été 中文 한국어 हिन्दी 🐍👩‍👩‍👧 \r\n\r\n ",
    "<|endoftext|> <|fim_prefix|> I'VE they're O'Neil 'tis 1234567 ١٢٣ Ⅷ x² ǅ ª ʰ",
    " \u00a0\u3000\u2028\u0085\t\x0b\x0c\x00\x1f\ufeff "
    "a\u0301\u0327 \u200d\u200b \U0010ffff \ufffd",
    "antidisestablishmentarianism" * 9 + "=" * 99 + "/\n/" * 9 + " " * 99 + "\n" * 9 + "x" * 999,
    # combining accents, composed and decomposed; compatibility forms
    "caf\u00e9 cafe\u0301 A\u030angstro\u0308m \u212bngstr\u00f6m e\u0327\u0301 q\u0307\u0323",
    "\u1e69 s\u0323\u0307 \uac00 \u1100\u1161 \ufb01ne \u2460 \uff21\uff11 \u00bd \u2126 \ufdfa",
    # digits
    "0 7 42 123 1234 12345 123456 1234567890 3.14159 1,000,000 2024-01-31 0x1F 1e-9 ٣٤٥٦٧ ५६७८९",
    "99 bottles, 100% of 12:30:59 on 192.168.001.254 costs $1234.50 or €0,99 (5th, 2nd)",
    # leading, trailing and repeated spaces
    " leading space",
    "  two leading spaces",
    "\tleading tab\n    four\n\n\n  two \n \n",
    "trailing spaces   ",
    "trailing line end \n  ",
    "a  b   c    d\t\te \t f\r\ng\rh",
    "Hello",
    "hello world Hello World HELLO WORLD hELLO wORLD camelCase snake_case SCREAMING_CASE",
    # code
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # ½ → 0.5\n",
    '#include <stdio.h>\nint main(void){printf("%d\\n",1<<3);return 0;}\n',
    "const g = async (a) => `${await a}` ?? null; // ok?\n\t\tif(!g){}\n",
    "SELECT a.*, COUNT(*) FROM t AS a WHERE x <> 'it''s' GROUP BY 1;\n",
    'all: $(OBJ)\n\t@echo $@ $^ >> /dev/null 2>&1 || exit 1\n\n\n<p class="x">&amp;</p>',
    # contractions
    "I'm you're he's she'd we'll they've don't 'S 'T 'Re 'LL 'D \u017f '\u017f \u2019s it\u2019s",
    # Chinese, Japanese, Korean
    "今天早上下了雨，所以路面是湿的。东京タワーは高い。ﾊﾝｶｸ 한국어 문장입니다. 繁體中文「引號」",
    # other scripts
    "Москва ελληνικά العربية עברית हिन्दी ไทย ქართული አማርኛ မြန်မာ Tiếng Việt Straße İstanbul",
    # emoji
    "🙂 👍🏽 👩‍🚀 🏳️‍🌈 🇫🇷🇩🇪 1️⃣ ❤️ ☺ 😀😀😀 :-)",
    # strings of special tokens, which stay text
    "<s></s><unk><pad> [CLS] [SEP] [MASK] [PAD] [INST] <bos><eos> <|begin_of_text|><|eot_id|>",
    "a<|endoftext|>b <|im_start|>user\nhi<|im_end|> <|end_of_text|><|end|> <0x0A> ▁ ▁▁ Ġ Ċ",
    # control characters and the ends of the code space
    "\x00\x01\x02\x7f\x80\x9f\xad\u200e\u202e\ue000\ufffe\uffff\U0001f9ff\U000e0041\U0010fffd",
)
