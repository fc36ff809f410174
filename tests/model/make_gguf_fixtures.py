"""Writes the GGUF files of tests/data with the gguf package (pip install gguf==0.19.0), an independent implementation.

  gguf_blocks.gguf       random blocks of each quantised type, and what the package widens them to
  models/qwen3-tiny.gguf the model of that name, layer 1 in as many types as its rows allow
  models/llama3-rope-tiny-bf16.gguf  the model of that name as llama.cpp's converter lays it out: q and k
                         rows reordered, the frequency scaling as a tensor of factors
  ../../fuzz/seeds/gguf  the smallest models that are read
"""

import json
import math
import pathlib
import struct

import numpy as np
from gguf import GGUFWriter, GGMLQuantizationType as Type, GGML_QUANT_SIZES, dequantize, quantize

DATA = pathlib.Path(__file__).parents[1] / "data"
SEEDS = pathlib.Path(__file__).parents[2] / "fuzz" / "seeds"

# Where a block keeps its float16 scales, as byte offsets.
SCALES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
}


def blocks():
    rng = np.random.default_rng(20261129)
    writer = GGUFWriter(DATA / "gguf_blocks.gguf", "llama")
    for kind in [*SCALES, Type.Q8_K]:
        elements, size = GGML_QUANT_SIZES[kind]
        n = 12 if elements == 32 else 4
        raw = rng.integers(0, 256, (n, size), dtype=np.uint8)
        if kind == Type.Q8_K:  # not in the package: f32 scale, 256 signed bytes, 32 bytes of sums
            scale = rng.standard_normal(n).astype("<f4")
            raw[:, :4] = scale.view(np.uint8).reshape(n, 4)
            expected = scale[:, None] * raw[:, 4:260].view(np.int8).astype(np.float32)
        else:
            for offset in SCALES[kind]:
                scale = rng.standard_normal(n).astype("<f2")
                scale[0] = 6e-8  # the smallest subnormal
                scale[1] = -0.0
                raw[:, offset:offset + 2] = scale.view(np.uint8).reshape(n, 2)
            expected = dequantize(raw, kind).astype(np.float32)
        # Two rows, so that rows and offsets into them are told apart.
        writer.add_tensor(kind.name, raw.reshape(2, -1), raw_dtype=kind)
        writer.add_tensor(kind.name + ".widened", np.ascontiguousarray(expected.reshape(2, -1)))
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(folder):
    config = json.loads((folder / "config.json").read_text())
    data = (folder / "model.safetensors").read_bytes()
    length, = struct.unpack_from("<Q", data)
    tensors = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data[begin:end], "<f4")
        tensors[name] = values.reshape(entry["shape"])
    return config, tensors


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


def gguf_name(name):
    name = name.replace("model.layers.", "blk.")
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def model(folder, architecture, kind_of, change=lambda name, values, config: values):
    config, tensors = load(DATA / "models" / folder)
    writer = GGUFWriter(DATA / "models" / (folder + ".gguf"), architecture)
    writer.add_name(folder)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(rope, config["head_dim"]))
    for name, values in tensors.items():
        values = np.ascontiguousarray(change(name, values, config))
        kind = Type.F32 if values.ndim == 1 else kind_of(gguf_name(name))
        writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    finish(writer)


def rope_factors(rope, head_dim):
    factors = []
    for i in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (i / head_dim))
        if turns > rope["high_freq_factor"]:
            factors.append(1)
        elif turns < rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            kept = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - kept) / rope["factor"] + kept))
    return np.array(factors, dtype=np.float32)


def pair_rows(name, values, config):
    """Rows i and i + d_head/2 of each q and k head become rows 2i and 2i + 1."""
    if "q_proj" not in name and "k_proj" not in name:
        return values
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


MIXED = {
    "token_embd": Type.Q8_0, "blk.1.attn_q": Type.Q8_0, "blk.1.attn_k": Type.Q4_1, "blk.1.attn_v": Type.Q5_1,
    "blk.1.attn_output": Type.Q4_0, "blk.1.ffn_gate": Type.F16, "blk.1.ffn_up": Type.BF16, "blk.1.ffn_down": Type.Q5_0,
}

def seed(architecture, tied):
    """One layer, d_model 32 so that a row is a block, 8 tokens."""
    rng = np.random.default_rng(7)
    writer = GGUFWriter(SEEDS / "gguf" / (architecture + ".gguf"), architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count([1])
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "c", "ab", "abc", "\u0120", "\u0120a", "<|end|>"])
    writer.add_token_types([1, 1, 1, 1, 1, 1, 1, 3])
    writer.add_token_merges(["a b", "ab c", "\u0120 a"])
    writer.add_eos_token_id(7)
    shapes = {"token_embd": (8, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]:
        shapes[f"blk.0.{name}"] = (32, 32)
    if architecture == "qwen3":
        shapes |= {"blk.0.attn_q_norm": (32,), "blk.0.attn_k_norm": (32,)}
    if not tied:
        shapes["output"] = (8, 32)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        kind = Type.F32 if len(shape) == 1 else Type.Q4_0
        writer.add_tensor(name + ".weight", quantize(values, kind), raw_dtype=kind)
    finish(writer)


if __name__ == "__main__":
    seed("llama", tied=False)
    seed("qwen3", tied=True)
    blocks()
    model("qwen3-tiny", "qwen3", lambda name: MIXED.get(name.removesuffix(".weight"), Type.F32))
    model("llama3-rope-tiny-bf16", "llama", lambda name: Type.BF16, pair_rows)
