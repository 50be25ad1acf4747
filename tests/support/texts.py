"""Texts that tokenizers and detokenizers get wrong."""

NASTY_TEXTS = [
    "", " ", "  ", "   lone leading blanks", "trailing  ", "\n", "\n\n\n", "\t\t x", "\r\nCRLF\r\n\r\n", "a\0b\0",
    "\x01\x1b[0m\x7f", "Hello world, it's we'll I'D", "1234567890 12 345", "  7", "\n\n7. x", "a    b" + " " * 40 + "c",
    " " * 100, "\n" * 70, "9" * 50, "😀👩‍👩‍👧‍👦🇨🇭", "日本語歪✅ď 中文，标点。",
    "שלום العربية \u200frtl", "e\u0301 é Å A\u030a ﬁ ½",
    "\u0300\u0301 lone marks", "naïve café", "\ufffd\ufffd", "\u200b\ufeff\u00a0x\u3000y\u2028z",
    "def f(x):\n    return x ** 2  # ok\n\tpass\n", "<|im_start|>user\nhi<|im_end|>\n", "x<|endoftext|>y <|im_start|>",
    "<bos> <eos><unk>[multimodal]</s>", "<0x0A> <0x41>", "mixed Русский한국어ไทย हिन्दी ελ", "▁under ▁▁ bars",
    "a▁b", "𝔘𝔫𝔦 𓀀",
    "www.http://x.y/?a=b&c=%20#", "\ud7ff\ue000\U0010ffff", "<table><tr> </tr>\n\n\n  \n", "ĠĊ Ġ",
]  # fmt: skip
