#!/usr/bin/env python3
"""Makes the golden files of golden_test.cc: loss, last logits and gradients of small models by PyTorch.

Needs torch, transformers and numpy; run it in this folder. Everything is computed in double precision with
transformers' own LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM and GPT2LMHeadModel. Weights are not stored:
both sides compute them from the tensor's name and the element's index (see `weights`), exactly, so a file holds
gradients alone. NAME.json describes NAME.bin: fp32, little endian, tensors one after the other in our shapes
(GPT-2's Conv1D weights transposed to (output, input)), then the logits of each sequence's last position.
"""

import json

import numpy as np
import torch
import transformers

B, T = 2, 24
IGNORED = -1


def hash32(name):
    """FNV-1a of the name's bytes."""
    h = 0x811C9DC5
    for byte in name.encode():
        h = ((h ^ byte) * 0x01000193) & 0xFFFFFFFF
    return h


def uniform(name, count):
    """Multiples of 2^-23 in [-1, 1): a mix of the name's hash and the element's index."""
    with np.errstate(over="ignore"):
        x = np.uint32(hash32(name)) + np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
        x ^= x >> np.uint32(16)
    return ((x >> np.uint32(8)).astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(2.0**-23)


def weights(name, shape):
    """Matrices in [-1/4, 1/4), biases too, the scales of norms in [3/4, 5/4)."""
    x = uniform(name, int(np.prod(shape))).reshape(shape) * np.float32(0.25)
    return x + np.float32(1) if len(shape) == 1 and name.endswith("weight") else x


def ids(name, count, vocab):
    return ((uniform(name, count).astype(np.float64) + 1) / 2 * vocab).astype(np.int64)


def make(name, model, config):
    model = model.double().eval()
    vocab = config["vocab_size"]
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    named = list(model.named_parameters())  # a tied table once
    with torch.no_grad():
        for key, p in named:
            flip = key.endswith(transposed)
            w = weights(key, tuple(reversed(p.shape)) if flip else tuple(p.shape))
            p.copy_(torch.from_numpy(w.T.copy() if flip else w).double())
    inputs = ids(name + ".inputs", B * T, vocab).reshape(B, T)
    targets = ids(name + ".targets", B * T, vocab).reshape(B, T)
    targets[:, 5] = IGNORED
    logits = model(torch.from_numpy(inputs)).logits
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, vocab), torch.from_numpy(targets).reshape(-1), ignore_index=IGNORED, reduction="sum")
    loss.backward()
    tensors, chunks = [], []
    for key, p in named:
        g = p.grad.numpy()
        g = g.T if key.endswith(transposed) else g
        tensors.append({"name": key, "shape": list(g.shape)})
        chunks.append(np.ascontiguousarray(g, dtype="<f4").tobytes())
    chunks.append(np.ascontiguousarray(logits[:, -1].detach().numpy(), dtype="<f4").tobytes())
    with open(name + ".bin", "wb") as f:
        f.write(b"".join(chunks))
    with open(name + ".json", "w") as f:
        json.dump({"model": config, "B": B, "T": T, "loss": loss.item(), "num_tokens": int((targets >= 0).sum()),
                   "parameters": int(sum(p.numel() for _, p in named)), "tensors": tensors,
                   "made_by": f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"}, f, indent=1)
        f.write("\n")


def llama_like(kind, **ours):
    """Our configuration, and the same in transformers' words."""
    c = dict(family="llama", num_layers=2, dim=24, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=36, vocab_size=61,
             max_seq_len=T, norm_eps=1e-5, rope_theta=10000.0, tied_embedding=False, qkv_bias=False, qk_norm=False)
    c.update(ours)
    theirs = dict(vocab_size=c["vocab_size"], hidden_size=c["dim"], intermediate_size=c["ffn_dim"],
                  num_hidden_layers=c["num_layers"], num_attention_heads=c["num_heads"],
                  num_key_value_heads=c["num_kv_heads"], head_dim=c["head_dim"], rms_norm_eps=c["norm_eps"],
                  rope_theta=c["rope_theta"], max_position_embeddings=T, tie_word_embeddings=c["tied_embedding"],
                  attn_implementation="eager")
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)}[kind]
    return model_class(config_class(**theirs)), c


def gpt2_like():
    c = dict(family="gpt2", num_layers=2, dim=24, num_heads=3, num_kv_heads=0, head_dim=0, ffn_dim=96, vocab_size=61,
             max_seq_len=T, norm_eps=1e-5, tied_embedding=True)
    config = transformers.GPT2Config(vocab_size=61, n_positions=T, n_embd=24, n_layer=2, n_head=3, n_inner=96,
                                     activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                     layer_norm_epsilon=1e-5, attn_implementation="eager")
    return transformers.GPT2LMHeadModel(config), c


def main():
    torch.manual_seed(0)  # the weights are overwritten; only the construction draws
    make("llama", *llama_like("llama", rope_theta=500000.0))
    make("qwen2", *llama_like("qwen2", qkv_bias=True, tied_embedding=True))
    make("qwen3", *llama_like("qwen3", qk_norm=True, head_dim=16, norm_eps=1e-6))
    make("gpt2", *gpt2_like())


if __name__ == "__main__":
    main()
