"""An independent float64 decoder of the llama, qwen2 and qwen3 families, in numpy, for values to test against.

  decoder.py golden FOLDER                         rewrites FOLDER/golden.json from its prompts
  decoder.py golden MODEL.gguf                     writes MODEL.gguf.golden.json from the prompts of the folder MODEL
  decoder.py perplexity MODEL.gguf TEXT [WINDOW]   the figure that `ullage loss` must reproduce

Needs numpy; for GGUF files gguf, and for a text tokenizers, a byte-pair encoder that shares no code with ours.
"""

import json
import pathlib
import struct
import sys

import numpy as np


def inverse_frequencies(theta, d_head, scaling):
    """Radians a position, with Llama 3's scaling where `scaling` asks for it."""
    frequencies = theta ** (-np.arange(0, d_head, 2) / d_head)
    if not scaling or scaling.get("rope_type", "default") == "default":
        return frequencies
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - blend) * frequencies / scaling["factor"] + blend * frequencies


class Decoder:
    """shape: heads, kv_heads, d_head, layers, eps. weight(name): float64, Hugging Face's names, or None."""

    def __init__(self, shape, frequencies, weight, pairs_adjacent=False):
        self.heads, self.kv_heads, self.d_head, self.layers, self.eps = shape
        self.frequencies, self.weight, self.pairs_adjacent = frequencies, weight, pairs_adjacent

    def norm(self, x, name):
        weight = self.weight(name)
        return x if weight is None else x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def linear(self, x, name):
        out, bias = x @ self.weight(name + ".weight").T, self.weight(name + ".bias")
        return out if bias is None else out + bias

    def turn(self, x):
        """x [tokens][heads][d_head], rotated as complex numbers."""
        half = self.d_head // 2
        first, second = (x[..., 0::2], x[..., 1::2]) if self.pairs_adjacent else (x[..., :half], x[..., half:])
        z = (first + 1j * second) * np.exp(1j * np.arange(len(x))[:, None] * self.frequencies)[:, None]
        return np.stack([z.real, z.imag], -1).reshape(x.shape) if self.pairs_adjacent else np.concatenate([z.real, z.imag], -1)

    def hidden(self, tokens):
        n = len(tokens)
        x = self.weight("model.embed_tokens.weight")[tokens]
        future = np.triu(np.full((n, n), -np.inf), 1)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            y = self.norm(x, at + "input_layernorm.weight")
            q = self.linear(y, at + "self_attn.q_proj").reshape(n, self.heads, self.d_head)
            k = self.linear(y, at + "self_attn.k_proj").reshape(n, self.kv_heads, self.d_head)
            v = self.linear(y, at + "self_attn.v_proj").reshape(n, self.kv_heads, self.d_head)
            q = self.turn(self.norm(q, at + "self_attn.q_norm.weight"))
            k = self.turn(self.norm(k, at + "self_attn.k_norm.weight"))
            out = np.empty_like(q)
            for head in range(self.heads):
                group = head * self.kv_heads // self.heads
                scores = q[:, head] @ k[:, group].T / np.sqrt(self.d_head) + future
                scores = np.exp(scores - scores.max(-1, keepdims=True))
                out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, group]
            x = x + self.linear(out.reshape(n, -1), at + "self_attn.o_proj")
            y = self.norm(x, at + "post_attention_layernorm.weight")
            gate = self.linear(y, at + "mlp.gate_proj")
            x = x + self.linear(gate / (1 + np.exp(-gate)) * self.linear(y, at + "mlp.up_proj"), at + "mlp.down_proj")
        return self.norm(x, "model.norm.weight")

    def logits(self, hidden):
        head = self.weight("lm_head.weight")
        return hidden @ (self.weight("model.embed_tokens.weight") if head is None else head).T


def next_token_losses(logits, tokens):
    """[len(tokens) - 1]: the loss of each token after the first."""
    shifted = logits[:-1] - logits[:-1].max(-1, keepdims=True)
    return np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(tokens) - 1), tokens[1:]]


def open_folder(folder):
    config = json.loads((folder / "config.json").read_text())
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if entry["dtype"] == "BF16":
                values = (np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(data[begin:end], {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
            weights[name] = values.astype(np.float64).reshape(entry["shape"])
    heads = config["num_attention_heads"]
    d_head = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    shape = heads, config["num_key_value_heads"], d_head, config["num_hidden_layers"], config["rms_norm_eps"]
    return Decoder(shape, inverse_frequencies(rope["rope_theta"], d_head, rope), weights.get)


def open_gguf(path):
    """The decoder and a reader of the file's metadata."""
    import gguf

    reader = gguf.GGUFReader(path)
    field = lambda name: reader.get_field(name).contents()
    arch = field("general.architecture")
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm"}
    names |= {"ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    names |= {f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    weights = {}
    for tensor in reader.tensors:
        *layer, name, suffix = tensor.name.split(".")
        name = ".".join([*(["model.layers", layer[1]] if layer else []), names[name], suffix])
        weights[name] = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
    heads, kv_heads = field(f"{arch}.attention.head_count"), field(f"{arch}.attention.head_count_kv")
    d_head = len(weights["model.layers.0.self_attn.q_proj.weight"]) // heads
    shape = heads, kv_heads, d_head, field(f"{arch}.block_count"), float(field(f"{arch}.attention.layer_norm_rms_epsilon"))
    frequencies = inverse_frequencies(field(f"{arch}.rope.freq_base"), d_head, None)
    return Decoder(shape, frequencies, weights.get, pairs_adjacent=arch == "llama"), field


def golden(model):
    if model.suffix == ".gguf":
        prompts, path = model.with_suffix("") / "golden.json", model.with_suffix(".gguf.golden.json")
        decoder, _ = open_gguf(model)
    else:
        prompts = path = model / "golden.json"
        decoder = open_folder(model)
    document = json.loads(prompts.read_text())
    for run in document["runs"]:
        tokens, steps, margins = list(run["prompt"]), [], []
        hidden = decoder.hidden(np.array(tokens))
        logits = decoder.logits(hidden)
        run["final_hidden_last"] = hidden[-1].tolist()
        run["last_prompt_logits"] = logits[-1].tolist()
        if len(tokens) > 1:
            run["mean_next_token_loss"] = next_token_losses(logits, tokens).mean()
        for _ in run["greedy"]:
            last = decoder.logits(decoder.hidden(np.array(tokens))[-1])
            tokens.append(int(last.argmax()))
            second, first = np.sort(last)[-2:]
            steps.append(first)
            margins.append(first - second)
        run["greedy"], run["step_top1_logit"] = tokens[len(run["prompt"]) :], steps
        run["smallest_top1_margin"] = min(margins)
    document["note"] = "float64 forward of the stored weights, rotary frequencies in float64 (tests/oracle/decoder.py)"
    path.write_text(json.dumps(document))


def perplexity(model, text, window):
    import tokenizers

    decoder, field = open_gguf(model)
    assert field("tokenizer.ggml.pre") == "smollm"
    vocabulary = {token: i for i, token in enumerate(field("tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokens = np.array(encoder.encode(text.read_text()).ids)
    losses = []
    for first in range(0, len(tokens), window):
        part = tokens[first : first + window]
        losses.extend(next_token_losses(decoder.logits(decoder.hidden(part)), part))
        print(f"{first + len(part)} of {len(tokens)} tokens, mean loss {np.mean(losses):.6f}", file=sys.stderr)
    print(f"{len(tokens)} tokens, {len(losses)} scored, mean loss {np.mean(losses):.9f}, perplexity {np.exp(np.mean(losses)):.6f}")


if __name__ == "__main__":
    if sys.argv[1] == "golden":
        golden(pathlib.Path(sys.argv[2]))
    else:
        perplexity(sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 512)
